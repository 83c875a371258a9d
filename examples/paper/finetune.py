"""Tables 1, 2 and S3: training on from MNIST networks, from averages and from fusions of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from jobs import Job, Values
from laboratory import OF_FOUR, WAYS, Laboratory, Way
from mnist import MLPNET, Recipe, StateDict, Student, fit

# Rates to the paper's best checkpoints: A, B, plain average, OT average (60 epochs).
RATES = {
    0.01: (98.21, 98.13, 98.23, 98.35),
    0.002: (98.13, 98.03, 98.13, 98.21),
    0.001: (98.09, 98.03, 97.98, 98.14),
    0.00067: (98.11, 98.00, 97.83, 98.07),
    0.0005: (98.09, 98.01, 97.70, 98.05),
}
QUICK_RATES = (0.01, 0.002)
EPOCHS, QUICK_EPOCHS = 60, 10


def jobs(lab: Laboratory) -> Iterator[Job]:
    """Of the pair and of four networks, one for each rate: all starts are trained together."""
    epochs = QUICK_EPOCHS if lab.quick else EPOCHS
    rates = QUICK_RATES if lab.quick else tuple(RATES)
    columns = ("A", "B", "plain", "--paper, activations")
    figures = {rate: dict(zip(columns, RATES[rate], strict=True)) for rate in rates}
    for row, count, ways in (("rate", 2, WAYS), ("four networks, rate", 4, OF_FOUR)):
        for rate in rates:
            yield Job(
                "S3",
                f"{row} {rate}",
                {"rate": rate, "epochs": epochs, "seeds": list(lab.seeds), "ways": ways},
                lambda count=count, ways=ways, rate=rate: _finetuned(
                    lab, count, ways, Recipe(MLPNET, epochs, rate)
                ),
                figures[rate] if count == 2 else {},
                seconds=1.9 * epochs * len(lab.seeds) * (len(ways) + 2),
            )


def _finetuned(lab: Laboratory, count: int, ways: Mapping[str, Way], recipe: Recipe) -> Values:
    """The paper's pair, or the first two of more; and fusions of all: trained on.

    Seeds draw inputs and orders.
    """
    parents = lab.pair if count == 2 else lab.mlps(count)
    begin: list[tuple[str, int, StateDict]] = []
    for seed in lab.seeds:
        begin += [(name, seed, net) for name, net in zip("AB", parents, strict=False)]
        begin += [(n, seed, lab.fused(parents, way, seed=seed)) for n, way in ways.items()]
    return trained(lab, recipe, begin)


def trained(
    lab: Laboratory, recipe: Recipe, begin: Sequence[tuple[str, int, StateDict]], **more: object
) -> Values:
    """Networks trained on together: accuracies before, at the best epoch, and after the last."""
    curves: list[list[float]] = [[lab.score(net)] for _, _, net in begin]

    def look(_: int, networks: list[dict[str, torch.Tensor]]) -> None:
        for curve, network in zip(curves, networks, strict=True):
            curve.append(lab.score(network))

    group = [Student(seed, seed) for _, seed, _ in begin]
    networks = [net for _, _, net in begin]
    fit(recipe, group, lab.train, begin=networks, after_epoch=look, **more)
    found: dict[str, list[float]] = {}
    for (name, _, _), curve in zip(begin, curves, strict=True):
        for part, value in (("start", curve[0]), ("best", max(curve[1:])), ("last", curve[-1])):
            found.setdefault(f"{name}, {part}", []).append(value)
    return found
