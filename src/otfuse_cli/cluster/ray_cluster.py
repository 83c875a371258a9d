"""Workers of a Ray cluster: one that is named, one that runs here, or one that is started.

Nothing else imports Ray, and this module only once a cluster is asked for.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from ..errors import SolveFailed, UsageError
from ..runtime import Workers, cores
from .parcels import pack, unpack
from .piece import Assignment, PieceOutcome, Settings, SharedName, do_piece, settings_here

_EXTRA = "pip install 'otfuse-cli[ray]'"
# How often a piece is begun again whose worker or node died.
RETRIES = 3
# Pieces that are handed out for each that can be worked on: nobody waits for the next one.
_AHEAD = 2
# Seconds between looks at the cluster while a piece is waited for, and how long one without any CPU
# is waited for: nodes are replaced.
_LOOK_AGAIN, _PATIENCE = 5.0, 120.0
# Where clients of a cluster go, and how many seconds they wait for an answer.
_CLIENT_PORT, _ANSWER = 10001, 10.0
# What a worker takes beside its piece: the program itself, with torch.
_PROGRAM = 320 << 20
# Shared memory of a cluster that is started here; Ray spills what goes beyond it.
_SHARED_BYTES = 512 << 20


@contextmanager
def workers_of(cluster: str) -> Iterator[Workers]:
    """Those that `--cluster` names, for as long as the block lasts.

    Raises:
        UsageError: Ray is not installed, the name is none, or nobody answers.
    """
    if cluster != "auto" and not cluster.startswith("ray://"):
        raise UsageError(
            "no name of a cluster",
            where=f"--cluster {cluster}",
            fix="use auto, or ray://HOST:10001",
        )
    ray = _import_ray(cluster)
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, cluster)
    try:
        yield RayWorkers(ray, settings_here())
    finally:
        if ours:
            ray.shutdown()


def _import_ray(cluster: str) -> Any:
    # Before it is imported: it says so itself otherwise, on standard error.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
    except ImportError as error:
        raise UsageError(
            "a cluster needs Ray, which is not installed",
            where=f"--cluster {cluster}",
            why=str(error),
            fix=_EXTRA,
        ) from error
    return ray


def _connect(ray: Any, cluster: str) -> None:
    """Join the cluster; `auto` starts one where there is none.

    Raises:
        UsageError: Nobody answers, or not in the same version.
    """
    address = os.environ.get("RAY_ADDRESS", "") if cluster == "auto" else cluster
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    start = {
        "num_cpus": cores(),
        "object_store_memory": _SHARED_BYTES,
        "include_dashboard": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if address not in ("", "auto", "local"):
                _knock(address)
                ray.init(address=address, **({} if "://" in address else quiet))
                return
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            try:
                # Without an address: what `ray start` has started on this machine, else a new one;
                # but no cluster that another program keeps to itself.
                ray.init(**quiet, **start)
            except ValueError:  # one is there, and nothing is to be said of its size
                ray.init(**quiet)
        except Exception as error:
            raise _no_cluster(cluster, error) from error


def _knock(address: str) -> None:
    """Ask whether anybody answers there: Ray would ask for many minutes.

    Raises:
        OSError: Nobody does.
        ValueError: It is no address.
    """
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    if not parts.hostname:
        raise ValueError("it names no host")
    socket.create_connection((parts.hostname, parts.port or _CLIENT_PORT), _ANSWER).close()


def _no_cluster(cluster: str, error: Exception) -> UsageError:
    named = os.environ.get("RAY_ADDRESS") if cluster == "auto" else None
    where = f"--cluster {cluster}" + (f", RAY_ADDRESS={named}" if named else "")
    lines = str(error).strip().splitlines()
    missing = isinstance(error, ImportError) or "ray[client]" in str(error)
    return UsageError(
        "no such cluster",
        where=where,
        why=lines[0] if lines else type(error).__name__,
        fix=_EXTRA
        if missing
        else "check host and port (10001 by default) and that the same "
        "versions of Ray and Python run there, or use --cluster auto without RAY_ADDRESS",
    )


@dataclass
class RayWorkers:
    """The cluster that this process is connected to.

    Attributes:
        ray: The library.
        settings: How this process computes, and so has every worker.
        unlike: Nodes that compute with other instructions.
    """

    ray: Any
    settings: Settings
    unlike: dict[str, str] = field(default_factory=dict)
    away: bool = True
    _numbers: Iterator[int] = field(default_factory=count, init=False)

    def __post_init__(self) -> None:
        """Make the task that all pieces are."""
        self._name = uuid4().hex
        self._task = self.ray.remote(_piece)

    @property
    def remarks(self) -> tuple[str, ...]:
        """See `Workers`."""
        ours = self.settings.processor
        return tuple(
            f"worker node {node} computes with {theirs}, this machine with {ours}: last digits may "
            "differ from those of one machine"
            for node, theirs in sorted(self.unlike.items())
        )

    def share(self, value: Any, *, lasting: bool = False) -> _Sent:
        """See `Workers`.

        Raises:
            TypeError: It can't be sent.
        """
        name = f"{self._name}-{next(self._numbers)}"
        return _Sent(self.ray.put(pack(value)), SharedName(name, lasting))

    def each(
        self, work: Any, items: Iterable[Any], *, memory: Callable[[Any], int] | None = None
    ) -> Iterator[Any]:
        """See `Workers`: one task for each item, so many ahead of the one that is waited for."""
        for value, _ in self._run(work, items, memory, stage=False):
            yield value

    def stages(
        self, work: Any, items: Iterable[Any], *, memory: Callable[[Any], int] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """See `Workers`: what stays with a worker is in Ray's object store, and is made again."""
        return self._run(work, items, memory, stage=True)

    def _run(
        self,
        work: Any,
        items: Iterable[Any],
        memory: Callable[[Any], int] | None,
        *,
        stage: bool,
    ) -> Iterator[tuple[Any, Any]]:
        try:
            sent = work if isinstance(work, _Sent) else self.share(work)
        except TypeError:  # what can't be sent is done here
            for item in items:
                yield work(item) if stage else (work(item), None)
            return
        waiting: deque[tuple[Any, Any]] = deque()
        left = iter(items)
        try:
            more = True
            while more or waiting:
                while more and len(waiting) < self._most():
                    item = next(left, _END)
                    more = item is not _END
                    if more:
                        need = _PROGRAM + (0 if memory is None else memory(item))
                        waiting.append(self._start(sent, item, need, stage=stage))
                if waiting:
                    result, beside = waiting.popleft()
                    try:
                        value = self._result(result)
                    except BaseException:
                        waiting.appendleft((result, beside))
                        raise
                    yield value, beside
        finally:
            for result, _ in waiting:  # whoever stops asking wants nothing more of it
                self.ray.cancel(result, force=True)

    def _start(self, work: _Sent, item: Any, memory: int, *, stage: bool) -> tuple[Any, Any]:
        """A task, as what stands for its result and for what it makes beside that."""
        cpus, most = self._largest_node()
        if memory > most:
            raise UsageError(
                "no node of the cluster has the memory for this",
                where=f"about {memory / 2**30:.2f} GiB for one piece of the work",
                why=f"the largest node offers {most / 2**30:.2f} GiB",
                fix="use a node with more memory (ray start --memory BYTES), or no --cluster",
            )
        labels: list[SharedName | None] = []
        parts: list[Any] = []
        for part in item if isinstance(item, tuple) else (item,):
            sent = part if isinstance(part, _Sent) else None
            labels.append(None if sent is None else sent.label)
            parts.append(pack(part) if sent is None else sent.reference)
        known = tuple(labels) if isinstance(item, tuple) else None
        task = self._task.options(
            num_cpus=min(self.settings.threads, cpus),
            memory=memory,
            max_retries=RETRIES,
            num_returns=2,
        )
        order = Assignment(self.settings, work.label or _NAMELESS, known, stage)
        result, beside = task.remote(order, work.reference, *parts)
        return result, _Sent(beside) if stage else None

    def _result(self, reference: Any) -> Any:
        errors = self.ray.exceptions
        try:
            self._wait_for(reference)
            outcome: PieceOutcome = self.ray.get(reference)
        except errors.RayTaskError as error:
            raise _not_ours(error) from error
        except errors.RayError as error:
            raise _lost(error) from error
        if outcome.processor != self.settings.processor:
            self.unlike[outcome.node] = outcome.processor
        value = unpack(outcome.value)
        if outcome.failed:
            raise value
        return value

    def _wait_for(self, reference: Any) -> None:
        """Wait for a task as long as there is somebody who can do it.

        Raises:
            SolveFailed: No node has a CPU.
        """
        alone = 0
        while not self.ray.wait([reference], timeout=_LOOK_AGAIN)[0]:
            alone = 0 if self._cpus() else alone + 1
            if alone * _LOOK_AGAIN > _PATIENCE:
                raise _lost(RuntimeError("no node with a CPU is left"))

    def _cpus(self) -> float:
        return sum(float(node["Resources"].get("CPU", 0)) for node in self._nodes())

    def _most(self) -> int:
        """Pieces that are handed out at a time."""
        return max(_AHEAD, ceil(_AHEAD * self._cpus() / self.settings.threads))

    def _largest_node(self) -> tuple[int, int]:
        """CPUs and bytes of the largest nodes."""
        offers = [node["Resources"] for node in self._nodes()]
        cpus = max((int(offer.get("CPU", 0)) for offer in offers), default=0)
        return max(1, cpus), int(max((offer.get("memory", 0) for offer in offers), default=0))

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]


@dataclass(frozen=True)
class _Sent:
    """What stands for something in Ray's object store.

    Attributes:
        reference: Ray's.
        label: What workers know it by who keep it; None for what one piece alone takes.
    """

    reference: Any
    label: SharedName | None = None


_END: Any = object()
_NAMELESS = SharedName("")


def _piece(order: Assignment, work: Any, *parts: Any) -> tuple[PieceOutcome, Any]:
    """The task: `do_piece`, and where."""
    return do_piece(order, _node(), work, parts)


def _node() -> str:
    """Where this worker is, in words."""
    import ray

    services: Any = ray.util
    return f"{socket.gethostname()} ({services.get_node_ip_address()})"


def _not_ours(error: Any) -> Exception:
    """What a worker raised that is no error of the user's."""
    cause = error.cause
    missing = isinstance(cause, ModuleNotFoundError) or "ModuleNotFoundError" in str(error)
    if missing and "otfuse_cli" in str(error):
        return UsageError(
            "the workers don't have this package",
            where="--cluster",
            why="it is imported where a piece of the work is done",
            fix="pip install otfuse-cli on every node, the same version",
        )
    return cause if isinstance(cause, Exception) else RuntimeError(str(error))


def _lost(error: Exception) -> SolveFailed:
    lines = str(error).strip().splitlines()
    return SolveFailed(
        "the cluster lost a piece of the work",
        where="--cluster",
        why=f"{type(error).__name__}: {lines[0] if lines else 'no reason is given'}",
        fix=f"it was begun again {RETRIES} times; give workers more memory, or use no --cluster",
    )
