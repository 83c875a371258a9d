"""Fused accuracy against width (the paper's S9 table), and models of different widths.

    python examples/widths.py [--only equal|mixed] [--rows 40,200,400] [--json FILE]

Equal widths: hidden layers 40-20-10 to 2000-1000-500, three pairs of networks each, data-free. The
relative gap is what a fused network lacks on the better of its parents, in percent of it. Different
widths: a source is fused into an anchor of other widths, equal weights, three pairs each.

Up to 400-200-100 networks are trained as in the paper; wider ones for 2 epochs at a rate that falls
from 0.1 to zero, a fifth of the work. Of the two widest there are three networks each, and each is
fused with the next. The first run takes about half an hour on one core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mnist import Recipe, Split, StateDict, Student, accuracy, load, options, students

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


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=("equal", "mixed"), help="one of the two tables")
    parser.add_argument("--rows", help="first hidden widths of the equal rows, e.g. 40,200,400")
    parser.add_argument("--mixed", help="rows of the mixed table, e.g. 400-200,200-400")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    test = load(given.data, "test")

    def networks(first: int) -> list[dict[str, torch.Tensor]]:
        hidden = shape(first)
        count = PAIRS if first >= 1000 else 2 * PAIRS
        wanted = [Student(given.seed + at, given.seed + at) for at in range(count)]
        return students(recipe(hidden), wanted, given.data, given.cache)

    results: dict[str, Any] = {}
    if given.only != "mixed":
        rows = [int(r) for r in given.rows.split(",")] if given.rows else [h[0] for h in PAPER_GAP]
        print("| hidden | parents | ensemble | plain | `--paper` | default | gap: plain "
              "| `--paper` | default | the paper |\n" + "|---" * 10 + "|")  # fmt: skip
        results["equal"] = [equal_row(first, networks(first), test) for first in rows]
    if given.only != "equal":
        mixes = MIXED
        if given.mixed:
            mixes = tuple(tuple(map(int, m.split("-"))) for m in given.mixed.split(","))
        print("\n| source -> anchor | source | anchor |", " | ".join(VARIANTS), "|\n"
              + "|---" * (3 + len(VARIANTS)) + "|")  # fmt: skip
        results["mixed"] = [
            mixed_row(one, other, networks(one)[:PAIRS], networks(other)[-PAIRS:], test)
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


def equal_row(first: int, networks: list[dict[str, torch.Tensor]], test: Split) -> dict[str, Any]:
    """Fuse pairs of one shape; prints a row, returns each pair's numbers."""
    count = len(networks)
    step = count // PAIRS  # 1: each with the next
    pairs = [(step * at, (step * at + 1) % count) for at in range(PAIRS)]
    found: dict[str, Any] = {"hidden": shape(first), "pairs": []}
    for one, other in pairs:
        a, b = networks[one], networks[other]
        parents = [accuracy(a, test), accuracy(b, test)]
        numbers: dict[str, Any] = {"parents": parents, "ensemble": _both(a, b, test)}
        runs = {"plain": {"align": "none"}, "paper": {"paper": True}, "default": {}}
        for name, chosen in runs.items():
            fused, _ = otfuse_cli.merge(a, b, **chosen)
            numbers[name] = accuracy(fused, test)
            numbers[f"gap {name}"] = 100 * (1 - numbers[name] / max(parents))
        found["pairs"].append(numbers)
    columns = ("ensemble", "plain", "paper", "default", "gap plain", "gap paper", "gap default")
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
    test: Split,
) -> dict[str, Any]:
    """Fuse sources into anchors of other widths; prints a row with each pair's accuracy."""
    found: dict[str, Any] = {"source": shape(first), "anchor": shape(second)}
    found["accuracies"] = {
        "source": [accuracy(n, test) for n in sources],
        "anchor": [accuracy(n, test) for n in anchors],
    }
    for name, chosen in VARIANTS.items():
        found["accuracies"][name] = [
            accuracy(otfuse_cli.merge(a, b, **chosen)[0], test)
            for a, b in zip(sources, anchors, strict=True)
        ]
    cells = [" ".join(f"{x:.2f}" for x in xs) for xs in found["accuracies"].values()]
    name = "{} -> {}".format(*("-".join(map(str, shape(w))) for w in (first, second)))
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return found


def _both(a: StateDict, b: StateDict, test: Split) -> float:
    from mnist import ensemble

    return ensemble((a, b), test, (0.5, 0.5))


if __name__ == "__main__":
    main()
