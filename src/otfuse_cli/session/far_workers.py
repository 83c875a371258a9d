"""`--cluster`: who works on the pieces of a fusion, and where numerics run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UsageError
from ..requests.requests import ImproveOptions
from ..runtime import Progress, Runtime, resolve_device


@contextmanager
def open_workers(options: ImproveOptions, progress: Progress) -> Iterator[Runtime]:
    """The runtime of a fusion: this process alone, or with the workers of a cluster.

    Raises:
        UsageError: No such device, no such cluster, or both asked for.
    """
    cluster, seed = options.cluster, options.recipe().seed
    if cluster is None:
        yield Runtime(resolve_device(options.device), seed, progress)
        return
    if options.device not in ("auto", "cpu"):
        raise UsageError(
            "a cluster computes on CPUs",
            where=f"--device {options.device} and --cluster {cluster}",
            why="results have to have the same bits on every node",
            fix="leave one of the two out",
        )
    from ..cluster.ray_cluster import workers_of

    with workers_of(cluster) as workers:
        yield Runtime("cpu", seed, progress, workers)
