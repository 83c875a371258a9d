"""Accuracy and time of every way to fuse one pair, beside two peers.

    python benchmarks/peers.py [--repeat 3] [--only descent,auto] [--test 2000]

The pair is VGG11 at half width in the folder that OTFUSE_SHARED names. Peers, both our own writing
of what is published: Git Re-Basin's weight matching as it reads (one assignment by SciPy for each
layer in random order, until a pass changes nothing; best of nothing, one run), and the algorithm of
Singh & Jaggi (`baseline.py`). All go from two files to one, on one thread, in turns, after a first
round that warms up; seconds are CPU seconds, medians. Ways with inputs take 1,000 training images.
Accuracy is that of the file written, on the test images.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from baseline import SHARED, Clock, Layer, fuse, vgg_layers

EXAMPLES = Path(__file__).parents[1] / "examples"
PAIR = [str(SHARED / "checkpoints" / f"cifar10-vgg11half-{at}.safetensors") for at in (0, 1)]
INPUTS = 1_000
WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512)

# Way to its options; those with inputs need the network.
WAYS = {
    "descent": ("--matcher", "descent"),
    "auto": ("--matcher", "auto"),
    "paper": ("--paper",),
    "refit": ("--blend", "average"),
    "joint": ("--blend", "joint"),
}


def rebasin(one: str, other: str, out: str, layers: list[Layer], seed: int = 0) -> None:
    """Weight matching, file to file."""
    from safetensors.torch import load_file, save_file
    from scipy.optimize import linear_sum_assignment

    stored = load_file(one), load_file(other)
    source, anchor = ({n: t.float() for n, t in tensors.items()} for tensors in stored)
    spaces = [layer.makes for layer in layers if layer.makes]
    order = {s: torch.arange(len(anchor[s])) for s in spaces}
    generator = torch.Generator().manual_seed(seed)
    moved = True
    while moved:
        moved = False
        for at in torch.randperm(len(spaces), generator=generator).tolist():
            space, size = spaces[at], len(order[spaces[at]])
            gain = torch.zeros(size, size)
            for layer in layers:
                theirs, mine = anchor[layer.weight], source[layer.weight]
                if layer.makes == space:
                    mine = mine.index_select(1, order[layer.reads]) if layer.reads else mine
                    gain += theirs.flatten(1) @ mine.flatten(1).T
                elif layer.reads == space:
                    mine = mine.index_select(0, order[layer.makes]) if layer.makes else mine
                    gain += theirs.transpose(0, 1).flatten(1) @ mine.transpose(0, 1).flatten(1).T
            best = torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])
            rows = torch.arange(size)
            now, before = (gain[rows, i].double().sum() for i in (best, order[space]))
            if now > before + 1e-12:
                order[space], moved = best, True
    fused = {}
    for layer in layers:
        mine = source[layer.weight]
        mine = mine.index_select(0, order[layer.makes]) if layer.makes else mine
        mine = mine.index_select(1, order[layer.reads]) if layer.reads else mine
        fused[layer.weight] = ((mine + anchor[layer.weight]) / 2).to(stored[1][layer.weight].dtype)
    save_file(fused, out)


def merge(way: str, out: str, inputs: Path) -> None:
    """One of our ways, by the command line in this process."""
    from otfuse_cli.cli.app import main as otfuse

    options = [*WAYS[way]]
    if "--blend" in options:
        network = f"{EXAMPLES / 'networks.py'}:vgg11half"
        options += ["--arch", network, "--samples", str(inputs), "--num-samples", str(INPUTS)]
    if otfuse(["merge", *PAIR, "-o", out, "--overwrite", "--quiet", *options]):
        raise SystemExit(f"otfuse merge {' '.join(options)} failed")


def runs(layers: list[Layer], inputs: Path) -> dict[str, Callable[[str], None]]:
    """Name of a row to what writes its file."""

    def published(out: str) -> None:
        fuse(*PAIR, out, layers, Clock())

    rows: dict[str, Callable[[str], None]] = {
        "Git Re-Basin (peer)": lambda out: rebasin(*PAIR, out, layers),
        "published algorithm (peer)": published,
    }
    for way, options in WAYS.items():
        name = f"otfuse merge {' '.join(options)}".strip()
        rows[name] = lambda out, way=way: merge(way, out, inputs)
    return rows


def in_turns(
    rows: dict[str, Callable[[str], None]], folder: Path, repeat: int
) -> dict[str, list[float]]:
    """CPU seconds of every row, in rounds after one that warms up; files by `out_of`."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(repeat + 1):
        for name, run in rows.items():
            began = time.process_time()
            run(out_of(rows, folder, name))
            if round_:
                seconds[name].append(time.process_time() - began)
    return seconds


def out_of(rows: dict[str, Callable[[str], None]], folder: Path, name: str) -> str:
    """Where a row writes."""
    return str(folder / f"{list(rows).index(name)}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3, help="rounds after the first (default 3)")
    parser.add_argument("--only", help="parts of row names, separated by commas; peers always run")
    parser.add_argument("--test", type=int, help="test images (default all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    import evaluate
    import numpy as np

    layers, _ = vgg_layers(WIDTHS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        images = evaluate.cifar("train")[0]
        drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:INPUTS]
        np.savez(folder / "x.npz", x=images[drawn].numpy())
        rows = runs(layers, folder / "x.npz")
        if options.only:
            wanted = ["peer", *options.only.split(",")]
            rows = {n: run for n, run in rows.items() if any(word in n for word in wanted)}
        seconds = in_turns(rows, folder, options.repeat)
        middle = {name: median(times) for name, times in seconds.items()}
        first = next(iter(rows))
        x, y = evaluate.cifar("test")
        x, y = x[: options.test], y[: options.test]
        print("| way | test accuracy, % | CPU s | of Git Re-Basin |")
        print("|---|---|---|---|")
        for name in rows:
            percent = evaluate.accuracy_on(evaluate.load(out_of(rows, folder, name)), x, y)
            taken = middle[name]
            print(f"| {name} | {percent:.2f} | {taken:.2f} | {taken / middle[first]:.2f} |")


if __name__ == "__main__":
    main()
