"""Fused accuracy against width (the paper's S9 table), and models of different widths.

    python examples/widths.py [--only equal|mixed] [--rows 40,200,400] [--ways ...] [--json FILE]

Equal widths: hidden layers 40-20-10 to 2000-1000-500, three pairs of networks each, data-free
(`synthetic`: refitted on 2,000 generated images). The relative gap is what a fused network lacks on
the better of its parents, in percent of it. Different widths: a source is fused into an anchor of
other widths, equal weights, three pairs each; `200 inputs` are training images without labels.

Up to 400-200-100 networks are trained as in the paper; wider ones for 2 epochs at a rate that falls
from 0.1 to zero, a fifth of the work. Of the two widest there are three networks each, and each is
fused with the next. The first run takes about half an hour on one core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mnist import Recipe, Split, StateDict, Student, accuracy, ensemble, load, options, students

import otfuse_cli

# Hidden layers, and the paper's relative gap there.
PAPER_GAP: Mapping[tuple[int, ...], float] = {
    (40, 20, 10): 14.44,
    (200, 100, 50): 4.16,
    (400, 200, 100): 1.45,
    (1000, 500, 250): 0.87,
    (2000, 1000, 500): 0.86,
}
PAIRS = 3
MIXED = ((400, 200), (200, 400), (400, 40), (2000, 400))
VARIANTS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "--scale paper": {"scale": "paper"},
    "--scale preserve --repair none": {"scale": "preserve", "repair": "none"},
    "--scale balanced": {"scale": "balanced"},
}
EQUAL: Mapping[str, dict[str, Any]] = {
    "plain": {"align": "none"},
    "--paper": {"paper": True},
    "default": {},
    "synthetic": {"synthetic": True, "input_shape": (1, 28, 28), "arch": "mlp"},
    "200 inputs": {"num_samples": 200, "arch": "mlp"},
}
WITH_INPUTS: Mapping[str, dict[str, Any]] = {"200 inputs": EQUAL["200 inputs"]}
QUICK = 400  # with inputs, networks wider than this take --matcher descent


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=("equal", "mixed"), help="one of the two tables")
    parser.add_argument("--rows", help="first hidden widths of the equal rows, e.g. 40,200,400")
    parser.add_argument("--mixed", help="rows of the mixed table, e.g. 400-200,200-400")
    every = list(dict.fromkeys([*EQUAL, *VARIANTS]))
    parser.add_argument("--ways", default=",".join(every), help="columns (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    test = load(given.data, "test")

    def networks(first: int) -> list[dict[str, torch.Tensor]]:
        hidden = shape(first)
        count = PAIRS if first >= 1000 else 2 * PAIRS
        wanted = [Student(given.seed + at, given.seed + at) for at in range(count)]
        return students(recipe(hidden), wanted, given.data, given.cache)

    ways = given.ways.split(",")
    bench = Bench(load(given.data, "train"), test)
    results: dict[str, Any] = {}
    if given.only != "mixed":
        rows = [int(r) for r in given.rows.split(",")] if given.rows else [h[0] for h in PAPER_GAP]
        chosen = {name: EQUAL[name] for name in EQUAL if name in ways}
        heads = ["hidden", "parents", "ensemble", *chosen]
        heads += [f"gap: {name}" for name in chosen] + ["the paper"]
        print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
        results["equal"] = [equal_row(first, networks(first), chosen, bench) for first in rows]
    if given.only != "equal":
        mixes = MIXED
        if given.mixed:
            mixes = tuple(tuple(map(int, m.split("-"))) for m in given.mixed.split(","))
        both = {**VARIANTS, **WITH_INPUTS}
        chosen = {name: both[name] for name in both if name in ways}
        print("\n| source -> anchor | source | anchor |", " | ".join(chosen), "|\n"
              + "|---" * (3 + len(chosen)) + "|")  # fmt: skip
        results["mixed"] = [
            mixed_row(one, other, networks(one)[:PAIRS], networks(other)[-PAIRS:], chosen, bench)
            for one, other in mixes
        ]
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def shape(first: int) -> tuple[int, ...]:
    """Hidden widths: each half of the one before."""
    return (first, first // 2, first // 4)


def recipe(hidden: tuple[int, ...]) -> Recipe:
    """The paper's training, or a shorter one that is as accurate."""
    if hidden[0] < 1000:
        return Recipe(hidden)
    return Recipe(hidden, epochs=2, rate=0.1, decay=True)


@dataclass(frozen=True)
class Bench:
    """Where inputs come from, and what is measured."""

    train: Split
    test: Split

    def fused(self, a: StateDict, b: StateDict, way: Mapping[str, Any]) -> float:
        """Accuracy of `a` fused into `b`."""
        more: dict[str, Any] = {}
        if "num_samples" in way:
            more["samples"] = {"x": self.train.images}
        if "arch" in way and max(len(n["fc1.weight"]) for n in (a, b)) > QUICK:
            more["matcher"] = "descent"
        return accuracy(otfuse_cli.merge(a, b, **way, **more)[0], self.test)


def equal_row(
    first: int,
    networks: list[dict[str, torch.Tensor]],
    ways: Mapping[str, Mapping[str, Any]],
    bench: Bench,
) -> dict[str, Any]:
    """Fuse pairs of one shape; prints a row, returns each pair's numbers."""
    count = len(networks)
    step = count // PAIRS  # 1: each with the next
    pairs = [(step * at, (step * at + 1) % count) for at in range(PAIRS)]
    found: dict[str, Any] = {"hidden": shape(first), "pairs": []}
    for one, other in pairs:
        a, b = networks[one], networks[other]
        parents = [accuracy(n, bench.test) for n in (a, b)]
        numbers: dict[str, Any] = {"parents": parents}
        numbers["ensemble"] = ensemble((a, b), bench.test, (0.5, 0.5))
        for name, way in ways.items():
            numbers[name] = bench.fused(a, b, way)
            numbers[f"gap {name}"] = 100 * (1 - numbers[name] / max(parents))
        found["pairs"].append(numbers)
    columns = ("ensemble", *ways, *(f"gap {name}" for name in ways))
    means = [f"{np.mean([p[c] for p in found['pairs']]):.2f}" for c in columns]
    parents_mean = f"{np.mean([p['parents'] for p in found['pairs']]):.2f}"
    name = "-".join(map(str, shape(first)))
    cells = [name, parents_mean, *means, f"{PAPER_GAP[shape(first)]:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)
    return found


def mixed_row(
    first: int,
    second: int,
    sources: list[dict[str, torch.Tensor]],
    anchors: list[dict[str, torch.Tensor]],
    ways: Mapping[str, Mapping[str, Any]],
    bench: Bench,
) -> dict[str, Any]:
    """Fuse sources into anchors of other widths; prints a row with each pair's accuracy."""
    found: dict[str, Any] = {"source": shape(first), "anchor": shape(second)}
    found["accuracies"] = {
        "source": [accuracy(n, bench.test) for n in sources],
        "anchor": [accuracy(n, bench.test) for n in anchors],
    }
    for name, way in ways.items():
        found["accuracies"][name] = [
            bench.fused(a, b, way) for a, b in zip(sources, anchors, strict=True)
        ]
    cells = [" ".join(f"{x:.2f}" for x in xs) for xs in found["accuracies"].values()]
    name = "{} -> {}".format(*("-".join(map(str, shape(w))) for w in (first, second)))
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return found


if __name__ == "__main__":
    main()
