"""Prune a VGG11, then fuse the dense network into what is left: how much comes back?

    python examples/pruning/run.py [--out examples/pruning] [--images 2000] [--resume]

cifar10-vgg11half-0 from the folder that OTFUSE_SHARED names: each convolution in turn, and all of
them, pruned by l1 and l2; all of them at random, three seeds; at 20, 40, 60, 80 and 90 %. Measured
on a fixed subset of the CIFAR-10 test images: the pruned network, prune-fuse without data, and
prune-fuse with 400 training images without labels. Writes results.json after every cell, results.md
and results.png at the end; `--resume` goes on where a run was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import otfuse_cli

sys.path.insert(0, str(Path(__file__).parents[1]))
from evaluate import SHARED, cifar, load

DENSE = SHARED / "checkpoints" / "cifar10-vgg11half-0.safetensors"
CONVOLUTIONS = tuple(f"features.{at}" for at in (0, 3, 6, 8, 11, 13, 16, 18))
POOLED = frozenset(CONVOLUTIONS[at] for at in (0, 1, 3, 5, 7))
AMOUNTS = (0.2, 0.4, 0.6, 0.8, 0.9)
REFIT_INPUTS = 400
SINGLE_AMOUNT = 0.4  # the amount at which single layers should come back whole


@dataclass(frozen=True)
class Cell:
    """One pruned network and what became of it, accuracies in percent, seconds of CPU time."""

    layer: str  # a convolution, or "all"
    criterion: str
    seed: int
    amount: float
    pruned: float
    fused: float
    refit: float
    seconds: float

    @property
    def case(self) -> tuple[str, str, int, float]:
        return self.layer, self.criterion, self.seed, self.amount


class Network:
    """The VGG11 on fixed images; stages in front of the first changed weight are run once."""

    def __init__(self, dense: Mapping[str, torch.Tensor], images: int) -> None:
        x, y = cifar()
        chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:images]
        self.labels = y[chosen]
        self.dense = dense
        self.inputs = [x[chosen]]
        for name in CONVOLUTIONS:
            self.inputs.append(self.stage(name, dense, self.inputs[-1]))

    def stage(self, name: str, w: Mapping[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in values.split(250):
            part = part.contiguous(memory_format=torch.channels_last)
            out = F.conv2d(part, w[f"{name}.weight"], padding=1).relu()
            parts.append(F.max_pool2d(out, 2) if name in POOLED else out)
        return torch.cat(parts)

    def accuracy(self, weights: Mapping[str, torch.Tensor]) -> float:
        w = {name: tensor.float() for name, tensor in weights.items()}
        first = 0
        while first < len(CONVOLUTIONS) and torch.equal(
            w[f"{CONVOLUTIONS[first]}.weight"], self.dense[f"{CONVOLUTIONS[first]}.weight"]
        ):
            first += 1
        values = self.inputs[first]
        for name in CONVOLUTIONS[first:]:
            values = self.stage(name, w, values)
        logits = F.linear(values.flatten(1), w["classifier.weight"])
        return 100.0 * float((logits.argmax(1) == self.labels).double().mean())


def refit_inputs(folder: Path) -> Path:
    """Training images without labels, as prune-fuse reads them."""
    path = folder / "refit-inputs.pt"
    x, _ = cifar("train")
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:REFIT_INPUTS]
    torch.save({"x": x[chosen].contiguous()}, path)
    return path


def cases() -> Iterator[tuple[str, str, int, float]]:
    for amount in AMOUNTS:
        for criterion in ("l1", "l2"):
            yield "all", criterion, 0, amount
        for seed in range(3):
            yield "all", "random", seed, amount
    for layer in CONVOLUTIONS:
        for criterion in ("l1", "l2"):
            for amount in AMOUNTS:
                yield layer, criterion, 0, amount


@torch.inference_mode()
def measure(case: tuple[str, str, int, float], network: Network, samples: Path) -> Cell:
    layer, criterion, seed, amount = case
    start = time.process_time()
    share = {"amount": amount} if layer == "all" else {"layer": {layer: amount}}
    pruned, _ = otfuse_cli.prune(DENSE, criterion=criterion, seed=seed, **share)
    fused, _ = otfuse_cli.prune_fuse(DENSE, pruned)
    arch = f"{Path(__file__).parents[1] / 'networks.py'}:vgg11half"
    refit, _ = otfuse_cli.prune_fuse(DENSE, pruned, samples=samples, arch=arch)
    scores = [network.accuracy(weights) for weights in (pruned, fused, refit)]
    return Cell(*case, *scores, time.process_time() - start)


def summary(cells: list[Cell], dense: float) -> list[str]:
    """How often fusion helps, in the words of the table."""
    better = [c for c in cells if c.fused > c.pruned]
    deep = [c for c in cells if c.amount >= 0.8 and dense - c.pruned >= 5]
    much = [c for c in deep if c.fused - c.pruned >= 5]
    single = [c for c in cells if c.layer != "all" and c.amount == SINGLE_AMOUNT]
    worst = max((dense - c.refit for c in single), default=0.0)
    return [
        f"Fused above pruned in {len(better)} of {len(cells)} cells "
        f"({100 * len(better) / len(cells):.0f} %).",
        f"At 80 % and above, where the pruned network lost 5 points or more ({len(deep)} cells), "
        f"fusion gives back 5 points or more in {len(much)}.",
        f"Refit of single layers at {100 * SINGLE_AMOUNT:.0f} %: at most {worst:.2f} points below "
        "the dense network.",
    ]


def table(cells: list[Cell], dense: float, images: int) -> str:
    """Pruned / fused / refit by layer, criterion and amount; random draws are averaged."""
    groups: dict[tuple[str, str], dict[float, list[Cell]]] = {}
    for cell in cells:
        groups.setdefault((cell.layer, cell.criterion), {}).setdefault(cell.amount, []).append(cell)
    seconds = sum(c.seconds for c in cells)
    lines = [
        f"Dense network: {dense:.2f} % on {images} test images. "
        "Cells: pruned / fused / refit, in %.",
        "",
        "| layer | criterion | " + " | ".join(f"{100 * a:.0f} %" for a in AMOUNTS) + " |",
        "|---|---|" + "---|" * len(AMOUNTS),
    ]
    for (layer, criterion), by_amount in groups.items():
        row = []
        for amount in AMOUNTS:
            own = by_amount.get(amount, [])
            parts = [[getattr(c, name) for c in own] for name in ("pruned", "fused", "refit")]
            row.append(" / ".join(f"{sum(p) / len(p):.1f}" for p in parts) if own else "")
        lines.append(f"| {layer} | {criterion} | " + " | ".join(row) + " |")
    lines += [
        "",
        *summary(cells, dense),
        f"Total run time: {seconds / 60:.0f} minutes of one core.",
    ]
    return "\n".join(lines) + "\n"


def plot(cells: list[Cell], dense: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = list(dict.fromkeys(c.layer for c in cells))
    figure, axes = plt.subplots(3, 3, figsize=(11, 9), sharex=True, sharey=True)
    for axis, layer in zip(axes.flat, layers, strict=False):
        for criterion, colour in (("l1", "C0"), ("l2", "C1"), ("random", "C2")):
            own = [c for c in cells if (c.layer, c.criterion) == (layer, criterion)]
            for name, style in (("pruned", ":"), ("fused", "-"), ("refit", "--")):
                points = []
                for amount in AMOUNTS:
                    values = [getattr(c, name) for c in own if c.amount == amount]
                    if values:
                        points.append((100 * amount, sum(values) / len(values)))
                if points:
                    label = f"{criterion} {name}"
                    axis.plot(*zip(*points, strict=True), style, color=colour, label=label)
        axis.axhline(dense, color="0.7", linewidth=0.8)
        axis.set_title(layer, fontsize=9)
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel("units removed, %")
    figure.supylabel("test accuracy, %")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--images", type=int, default=2000, help="test images, drawn once")
    parser.add_argument("--resume", action="store_true", help="keep what results.json holds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    arguments.out.mkdir(parents=True, exist_ok=True)
    stored = arguments.out / "results.json"
    samples = refit_inputs(arguments.out)
    weights = load(DENSE)
    with torch.inference_mode():
        network = Network(weights, arguments.images)
    dense = network.accuracy(weights)
    cells = []
    if arguments.resume and stored.exists():
        cells = [Cell(**cell) for cell in json.loads(stored.read_text())["cells"]]
    known = {cell.case for cell in cells}
    for case in cases():
        if case in known:
            continue
        cells.append(measure(case, network, samples))
        cell = cells[-1]
        print(
            f"{cell.layer:12} {cell.criterion:6} {100 * cell.amount:2.0f} %: "
            f"pruned {cell.pruned:.2f}, fused {cell.fused:.2f}, refit {cell.refit:.2f}",
            flush=True,
        )
        data = {"dense": dense, "images": arguments.images, "cells": [asdict(c) for c in cells]}
        stored.write_text(json.dumps(data, indent=1) + "\n")
    samples.unlink()
    text = table(cells, dense, arguments.images)
    (arguments.out / "results.md").write_text(text)
    plot(cells, dense, arguments.out / "results.png")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
