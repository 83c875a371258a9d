"""`merge --cluster` with one and two workers of one core, against the same merge here.

    python benchmarks/cluster.py [--only mlps|vgg] [--models 8,32,128] [--repeat 3] [--inputs 400]
        [--cpu] [--folder DIR] [--json FILE]

K MLPs (784-200-100-10, made up) without inputs, and the VGG pair with inputs (OTFUSE_SHARED):
wall seconds by stage, the best of several runs, as ratios to the run here; bytes that the command
sent to the cluster and took from it. One thread each. What must hold, the same tensors, is
asserted. Both workers are on this machine, so that whatever else runs there counts twice. Where
others use it `--cpu` tells more: CPU seconds of the merge here, of the pieces, and of the command
beside them, without Ray, but with all packing and unpacking.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("OTFUSE_SHARED", ROOT.parent / "shared"))
WIDTHS = (784, 200, 100, 10)
STORE = 1 << 30  # what waits between two layers of the VGG pair is not spilled


@dataclass(frozen=True)
class Taken:
    """What a merge took.

    Attributes:
        seconds: From its call to its return.
        stages: The same by stage of the report.
        sent: Bytes to the cluster.
        received: Bytes from it.
    """

    seconds: float
    stages: Mapping[str, float]
    sent: int = 0
    received: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("mlps", "vgg"))
    parser.add_argument("--models", default="8,32,128", help="numbers of MLPs (8,32,128)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the best counts (3)")
    parser.add_argument("--inputs", type=int, default=400, help="of the VGG pair (400)")
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds, without Ray")
    parser.add_argument("--folder", type=Path, help="where MLPs are written (a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        cases: dict[str, tuple[Sequence[Path], dict[str, Any]]] = {}
        if given.only != "vgg":
            for count in map(int, given.models.split(",")):
                cases[f"{count} MLPs"] = (mlps(folder, count), {})
        if given.only != "mlps":
            cases[f"VGG pair, {given.inputs} inputs"] = vgg_pair(given.inputs)
        if given.cpu:
            count_seconds(cases)
            return
        taken = measure(cases, given.repeat, mlps(folder, 4))
    show(taken)
    if given.json:
        plain = {c: {w: vars(t) for w, t in runs.items()} for c, runs in taken.items()}
        given.json.write_text(json.dumps(plain, indent=1) + "\n")


def mlps(folder: Path, count: int) -> list[Path]:
    """Files of made-up MLPs; more of them begin with the same ones."""
    import torch
    from safetensors.torch import save_file

    paths = [folder / f"{k:04}.safetensors" for k in range(count)]
    for seed, path in enumerate(paths):
        if path.exists():
            continue
        generator = torch.Generator().manual_seed(seed)
        state = {}
        for at, (inner, outer) in enumerate(pairwise(WIDTHS), 1):
            state[f"fc{at}.weight"] = torch.randn(outer, inner, generator=generator) / inner**0.5
            state[f"fc{at}.bias"] = torch.randn(outer, generator=generator) / 10
        save_file(state, path)
    return paths


def vgg_pair(inputs: int) -> tuple[list[Path], dict[str, Any]]:
    names = [f"cifar10-vgg11half-{k}.safetensors" for k in (0, 1)]
    how = {
        "arch": f"{ROOT}/examples/networks.py:vgg11half",
        "samples": f"{ROOT}/examples/evaluate.py:cifar_train",
        "num_samples": inputs,
    }
    return [SHARED / "checkpoints" / name for name in names], how


def measure(
    cases: Mapping[str, tuple[Sequence[Path], dict[str, Any]]], repeat: int, few: Sequence[Path]
) -> dict[str, dict[str, Taken]]:
    """Every case here, with one worker, and with two, who have merged a few before."""
    import ray
    from ray.cluster_utils import Cluster

    taken: dict[str, dict[str, Taken]] = {case: {} for case in cases}
    first: dict[str, Any] = {}

    def run_all(who: str, **more: str) -> None:
        for case, (paths, how) in cases.items():
            best, tensors = timed(paths, {**how, **more}, repeat)
            require_same(first.setdefault(case, tensors), tensors)
            taken[case][who] = best
            print(f"{case:24} {who:10} {best.seconds:8.2f} s", flush=True, file=sys.stderr)

    run_all("here")
    node = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        for who in ("1 worker", "2 workers"):
            if who == "2 workers":
                cluster.add_node(**node)
            for _ in range(2):  # processes start, libraries are loaded
                merge(few, {}, cluster="auto")
            run_all(who, cluster="auto")
    finally:
        ray.shutdown()
        cluster.shutdown()
    return taken


def count_seconds(cases: Mapping[str, tuple[Sequence[Path], dict[str, Any]]]) -> None:
    """CPU seconds of this process: merging here, and as a cluster and its command, in turn."""
    sys.path.insert(0, str(ROOT / "tests"))
    from far_away import InProcessRay
    from otfuse_cli.cluster import ray_cluster

    do_piece, spent = ray_cluster.do_piece, 0.0

    def timed_piece(*args: Any) -> Any:
        nonlocal spent
        begun = time.process_time()
        try:
            return do_piece(*args)
        finally:
            spent += time.process_time() - begun

    ray = InProcessRay()

    @contextmanager
    def workers_of(cluster: str) -> Iterator[ray_cluster.RayWorkers]:
        yield ray_cluster.RayWorkers(ray, ray_cluster.settings_here())

    for name, value in (
        ("do_piece", timed_piece),
        ("workers_of", workers_of),
        ("_node", lambda: "here"),
    ):
        setattr(ray_cluster, name, value)
    print("| merge | here, s | pieces, s | command, s | pieces | sent, MB | received, MB |")
    print("|---|---|---|---|---|---|---|")
    for case, (paths, how) in cases.items():
        merge(paths[:2], {**how, "num_samples": 60} if how else how)  # what is made once
        begun = time.process_time()
        here = merge(paths, how)[0]
        alone = time.process_time() - begun
        before, spent = ray.tasks, 0.0
        with Counted() as counted:
            begun = time.process_time()
            there = merge(paths, how, cluster="auto")[0]
            both = time.process_time() - begun
        require_same(here, there)
        print(
            f"| {case} | {alone:.1f} | {spent:.1f} | {both - spent:.1f} | {ray.tasks - before} | "
            f"{counted.sent / 1e6:.1f} | {counted.received / 1e6:.1f} |",
            flush=True,
        )


def merge(paths: Sequence[Path], how: Mapping[str, Any], **more: Any) -> Any:
    import otfuse_cli

    return otfuse_cli.merge(*paths, **how, **more)


def timed(paths: Sequence[Path], how: Mapping[str, Any], repeat: int) -> tuple[Taken, Any]:
    """The fastest of several merges, and what came of it."""
    best: Taken | None = None
    for _ in range(repeat):
        with Counted() as counted:
            begun = time.perf_counter()
            tensors, report = merge(paths, how)
            seconds = time.perf_counter() - begun
        if best is None or seconds < best.seconds:
            best = Taken(seconds, dict(report.timings), counted.sent, counted.received)
    assert best is not None
    return best, tensors


class Counted:
    """Bytes that this process sends and receives meanwhile."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def __enter__(self) -> Counted:
        from otfuse_cli.cluster import ray_cluster

        self.module, self.before = ray_cluster, (ray_cluster.pack, ray_cluster.unpack)
        pack, unpack = self.before

        def counted_pack(value: Any) -> Any:
            parcel = pack(value)
            self.sent += parcel.nbytes
            return parcel

        def counted_unpack(parcel: Any) -> Any:
            self.received += parcel.nbytes
            return unpack(parcel)

        self._set(counted_pack, counted_unpack)
        return self

    def __exit__(self, *_: object) -> None:
        self._set(*self.before)

    def _set(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.module.pack, self.module.unpack = pack, unpack


def require_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    import torch

    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def show(taken: Mapping[str, Mapping[str, Taken]]) -> None:
    print("| merge | here, s | 1 worker | 2 workers | 2 against 1 | sent, MB | received, MB |")
    print("|---|---|---|---|---|---|---|")
    for case, runs in taken.items():
        here, one, two = runs["here"], runs["1 worker"], runs["2 workers"]
        print(
            f"| {case} | {here.seconds:.2f} | {one.seconds / here.seconds:.2f} | "
            f"{two.seconds / here.seconds:.2f} | {two.seconds / one.seconds:.2f} | "
            f"{two.sent / 1e6:.1f} | {two.received / 1e6:.1f} |"
        )
    print()
    for case, runs in taken.items():
        for who, run in runs.items():
            stages = ", ".join(f"{stage} {s:.2f}" for stage, s in run.stages.items() if s >= 0.05)
            print(f"{case}, {who}: {stages}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
