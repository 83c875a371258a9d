"""Joint fusion of the real pairs by `otfuse merge`: accuracy over seeds, CPU time, peak memory.

    python examples/joint.py [mnist vgg resnet vit wide ...] [--seeds 0,1,2,3,4] [--only TEXT]

Every row is a command of its own. Test accuracy in percent on the full test set, mean and standard
deviation over the seeds of the inputs, which are drawn from the training split without labels, or
made up; CPU seconds and peak memory are means over the seeds, of one thread, import of torch and
reading the inputs included. `wide` fuses the second ViT with one of hidden width 96 (train_vit.py
makes it; --narrow FILE) into 160. Pairs and data come from OTFUSE_SHARED (see evaluate.py); ViTs
need transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev

import evaluate
import numpy as np
import torch

NETWORKS = Path(__file__).with_name("networks.py")
PAIRS = evaluate.SHARED / "checkpoints"
OTFUSE = [sys.executable, "-c", "import sys; from otfuse_cli.cli.app import main; sys.exit(main())"]
TURNED = ("--residual", "orthogonal")
# Nothing has to be aligned for the union: the cheapest matching will do.
JOINT = ("--blend", "joint", "--matcher", "sweep")
AUTO = ("--blend", "auto")


@dataclass(frozen=True)
class Row:
    """A way to fuse a pair.

    Attributes:
        name: What it is called.
        options: Of `otfuse merge`.
        inputs: How many real ones; None for none.
        drawn: Whether the result depends on the seed.
    """

    name: str
    options: tuple[str, ...] = ()
    inputs: int | None = None
    drawn: bool = True


@dataclass(frozen=True)
class Pair:
    """Two checkpoints, and the ways to fuse them."""

    checkpoints: tuple[Path, Path]
    arch: str
    rows: tuple[Row, ...]


def by_inputs(name: str, options: Sequence[str], numbers: Sequence[int]) -> Iterator[Row]:
    """One row for each number of real inputs."""
    for number in numbers:
        yield Row(f"{name}, {number:,}", tuple(options), number)


def made_up(*more: str, **ways: Sequence[str]) -> Iterator[Row]:
    """One row for each way, on inputs that are made up."""
    for name, options in ways.items():
        yield Row(f"{name}, synthetic", ("--synthetic", *more, *options))


def wider(*factors: str) -> Iterator[Row]:
    """One row for each factor of the widths."""
    for factor in factors:
        options = (*JOINT, "--width", factor)
        yield from by_inputs(f"joint, {factor} times as wide", options, (1_000,))


def pairs(narrow: Path) -> dict[str, Pair]:
    """The pairs by name."""

    def two(stem: str, suffix: str = ".safetensors") -> tuple[Path, Path]:
        return PAIRS / f"{stem}-0{suffix}", PAIRS / f"{stem}-1{suffix}"

    vit = two("cifar10-vit")
    average = ("--blend", "average")
    wide = tuple(by_inputs("joint", JOINT, (1_000,)))
    more = (*wider("1.25", "1.5", "2"), *by_inputs("auto", AUTO, (1_000,)))
    images = (
        *by_inputs("refit", average, (1_000,)),
        *wide,
        *made_up(refit=average, joint=JOINT, auto=AUTO),
        *more,
    )
    both = [("refit", average), ("joint", JOINT), ("auto", AUTO)]
    return {
        "mnist": Pair(
            two("mnist-mlpnet", ".checkpoint"),
            "mlp",
            (
                *(r for name, options in both for r in by_inputs(name, options, (200, 2_000))),
                *made_up("--input-shape", "1,28,28", refit=average, joint=JOINT, auto=AUTO),
            ),
        ),
        "vgg": Pair(
            two("cifar10-vgg11half"),
            f"{NETWORKS}:vgg11half",
            images,
        ),
        "resnet": Pair(
            two("cifar10-resnet18w16"),
            f"{NETWORKS}:resnet18w16",
            images,
        ),
        "vit": Pair(
            vit,
            f"{NETWORKS}:vit",
            (
                Row("plain", ("--align", "none"), drawn=False),
                Row("permuted", drawn=False),
                Row("turned", TURNED, drawn=False),
                *by_inputs("turned, refit", (*TURNED, *average), (200, 1_000)),
                *made_up(joint=JOINT, auto=AUTO),
                *by_inputs("joint", JOINT, (200, 1_000)),
                *more,
            ),
        ),
        "wide": Pair((narrow, vit[1]), f"{NETWORKS}:vit", wide),
    }


def merge(pair: Pair, row: Row, seed: int, folder: Path) -> tuple[float, float, float]:
    """Accuracy, CPU seconds and peak MiB of one command."""
    out = folder / "out.safetensors"
    options = ["-o", str(out), "--overwrite", "-q", "--seed", str(seed), *row.options]
    if "--align" not in row.options and row.name != "permuted":
        options += ["--arch", pair.arch]
    if row.inputs is not None:
        images = (evaluate.mnist if pair.arch == "mlp" else evaluate.cifar)("train")[0]
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        np.savez(folder / "x.npz", x=images[chosen[: row.inputs]].numpy())
        options += ["--samples", str(folder / "x.npz"), "--num-samples", str(row.inputs)]
    command = [*OTFUSE, "merge", *map(str, pair.checkpoints), *options]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    # Not `ru_maxrss`: a child of a large process is told its parent's.
    peak = json.loads((folder / "out.report.json").read_text())["peak_rss_bytes"]
    return evaluate.accuracy(evaluate.load(out)), usage.ru_utime + usage.ru_stime, peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="*", default=["mnist", "vgg", "resnet", "vit"])
    parser.add_argument("--seeds", default="0,1,2,3,4", help="of the inputs (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose names hold this")
    parser.add_argument("--narrow", type=Path, default=Path("vit-96.safetensors"), metavar="FILE")
    given = parser.parse_args()
    seeds = [int(n) for n in given.seeds.split(",")]
    torch.set_num_threads(1)
    known = pairs(given.narrow)
    print("| pair | parents | way | test accuracy | CPU s | peak, MiB |\n|" + "---|" * 6)
    for name in given.pairs:
        pair = known[name]
        own = ", ".join(f"{evaluate.accuracy(evaluate.load(c)):.2f}" for c in pair.checkpoints)
        for row in pair.rows:
            if given.only not in row.name:
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = [
                    merge(pair, row, seed, Path(folder)) for seed in (seeds if row.drawn else [0])
                ]
            scores, seconds, peaks = zip(*found, strict=True)
            spread = f" ± {pstdev(scores):.2f}" if len(scores) > 1 else ""
            cells = [name, own, row.name, f"{mean(scores):.2f}{spread}"]
            cells += [f"{mean(seconds):.0f}", f"{mean(peaks):.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
