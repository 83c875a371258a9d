"""Tables 1 and S3: training on from the parents of the MNIST pair, averages and fusions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jobs import Job, Values
from laboratory import WAYS, Laboratory
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
    """One for each rate: all starts are trained together."""
    epochs = QUICK_EPOCHS if lab.quick else EPOCHS
    seeds = list(range(3)) if lab.quick else list(lab.seeds)
    for rate in QUICK_RATES if lab.quick else RATES:
        columns = ("A", "B", "plain", "--paper, activations")
        figures = dict(zip((f"{c}, best" for c in columns), RATES[rate], strict=True))
        yield Job(
            "S3",
            f"rate {rate}",
            {"rate": rate, "epochs": epochs, "seeds": seeds, "ways": WAYS},
            lambda rate=rate: _finetuned(lab, Recipe(MLPNET, epochs, rate), seeds),
            figures,
            seconds=1.8 * epochs * len(seeds) * (len(WAYS) + 2),
        )


def starts(lab: Laboratory, seed: int) -> dict[str, StateDict]:
    """The parents, and what they are fused into; the seed draws inputs."""
    found: dict[str, StateDict] = dict(zip("AB", lab.pair, strict=True))
    return found | {name: lab.fused(lab.pair, way, seed=seed) for name, way in WAYS.items()}


def _finetuned(lab: Laboratory, recipe: Recipe, seeds: Sequence[int]) -> Values:
    begin = [(name, seed, net) for seed in seeds for name, net in starts(lab, seed).items()]
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
