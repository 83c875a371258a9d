"""Tables of fusion without training: S1, S2 of the appendix, and N models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jobs import Job, Values
from laboratory import COUNTS, OF_MANY, WAYS, Laboratory
from mnist import Recipe, Student, ensemble, fit
from safetensors.torch import load_file, save_file

import otfuse_cli

ACTS = {"paper": True, "align": "acts"}
SINKHORN = {"solver": "sinkhorn"}

# Samples to the paper's fused and aligned accuracies: its tables with regularisation 0.05 and 0.1,
# and what it says of the exact solver.
SAMPLES: Mapping[str, tuple[Mapping[str, Any], Mapping[int, tuple[float, float]]]] = {
    "S2.3 Sinkhorn 0.05": (
        {**SINKHORN, "epsilon": 0.05},
        {2: (24.80, 20.08), 10: (75.04, 88.18), 25: (90.95, 95.36), 50: (93.47, 96.04),
         100: (95.40, 97.05), 200: (95.78, 97.01)},
    ),
    "S2.4 Sinkhorn 0.1": (
        {**SINKHORN, "epsilon": 0.1},
        {2: (25.05, 19.42), 10: (72.86, 74.35), 25: (89.49, 90.88), 50: (92.88, 94.54),
         100: (95.14, 96.42), 200: (95.70, 96.63)},
    ),
    "S2.3 exact": ({}, {2: (), 10: (), 25: (), 50: (), 100: (), 200: (96.21, 97.72), 400: ()}),
}  # fmt: skip

# Epochs to the paper's A, B, ensemble, plain average and OT average (50 samples).
EPOCHS = {
    1: (92.03, 92.40, 92.50, 47.39, 87.10),
    2: (94.39, 94.43, 94.79, 52.28, 91.72),
    5: (96.83, 96.58, 96.93, 58.96, 95.30),
    7: (97.36, 97.34, 97.48, 68.76, 95.26),
    10: (97.72, 97.75, 97.88, 73.84, 95.92),
    15: (97.91, 97.97, 98.11, 73.55, 95.60),
    20: (98.11, 98.04, 98.13, 73.91, 95.31),
}

# What S1.2 leaves open, each by itself, on 200 samples.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "pre-activations": {},
    "post-activations": {"post_activations": True},
    "importance as mass": {"mass": "importance"},
    "weights, unit rows": {"align": "wts"},
    "weights, raw rows": {"align": "wts", "unit_norm": False},
    "weights, norm as mass": {"align": "wts", "mass": "norm"},
}


def jobs(lab: Laboratory) -> Iterator[Job]:
    """All of them."""
    yield from _samples(lab)
    yield from _epochs(lab)
    yield from _variants(lab)
    yield from _outputs(lab)
    yield from _several(lab)


def _samples(lab: Laboratory) -> Iterator[Job]:
    seeds = list(lab.seeds)
    for item, (options, figures) in SAMPLES.items():
        for number, figure in figures.items():
            way = {**ACTS, **options, "inputs": number}
            yield Job(
                item,
                f"{number} samples",
                {"way": way, "seeds": seeds},
                lambda way=way: _fused_and_aligned(lab, way, seeds),
                dict(zip(("fused", "A aligned"), figure, strict=False)),
                seconds=4 * len(seeds),
            )
        way = {"paper": True, **options}
        figure = {"S2.3 Sinkhorn 0.05": (95.66, 96.32), "S2.3 exact": (96.63, 97.72)}.get(item, ())
        yield Job(
            item,
            "weights",
            {"way": way},
            lambda way=way: _fused_and_aligned(lab, way, [0]),
            dict(zip(("fused", "A aligned"), figure, strict=False)),
        )


def _fused_and_aligned(lab: Laboratory, way: Mapping[str, Any], seeds: Sequence[int]) -> Values:
    fused = [lab.score(lab.fused(lab.pair, way, seed=seed)) for seed in seeds]
    aligned = [lab.score(lab.fused(lab.pair, way, seed=s, weights=(1, 0))) for s in seeds]
    return {"fused": fused, "A aligned": aligned}


def _epochs(lab: Laboratory) -> Iterator[Job]:
    for epoch, figures in EPOCHS.items():
        columns = ("A", "B", "ensemble", "plain", "--paper, activations")
        yield Job(
            "S2.1",
            f"{epoch} epochs",
            {"epoch": epoch, "inputs": 50, "seeds": list(lab.seeds), "way": WAYS["default"]},
            lambda epoch=epoch: _epoch(lab, epoch),
            dict(zip(columns, figures, strict=True)),
            seconds=60 if epoch == 1 else 8,
        )


def _epoch(lab: Laboratory, epoch: int) -> Values:
    pair = [load_file(path) for path in _snapshots(lab)[epoch]]
    seeds = lab.seeds
    acts = {**ACTS, "inputs": 50}
    return {
        "A": [lab.score(pair[0])],
        "B": [lab.score(pair[1])],
        "ensemble": [ensemble(pair, lab.test, (0.5, 0.5))],
        "plain": [lab.score(lab.fused(pair, WAYS["plain"]))],
        "--paper, activations": [lab.score(lab.fused(pair, acts, seed=s)) for s in seeds],
        "--paper": [lab.score(lab.fused(pair, WAYS["--paper"]))],
        "default": [lab.score(lab.fused(pair, WAYS["default"]))],
    }


def _snapshots(lab: Laboratory) -> dict[int, list[Any]]:
    """Two networks after each of the epochs, trained once."""
    folder = lab.given.cache / "epochs"
    paths = {e: [folder / f"mlp-{at}-epoch{e}.safetensors" for at in range(2)] for e in EPOCHS}
    if not all(path.exists() for pair in paths.values() for path in pair):
        folder.mkdir(parents=True, exist_ok=True)

        def save(epoch: int, networks: list[dict[str, torch.Tensor]]) -> None:
            for path, network in zip(paths.get(epoch, ()), networks, strict=False):
                save_file(network, path)

        fit(Recipe(epochs=max(EPOCHS)), [Student(0, 0), Student(1, 1)], lab.train, after_epoch=save)
    return paths


def _variants(lab: Laboratory) -> Iterator[Job]:
    seeds = list(lab.seeds)
    for name, options in VARIANTS.items():
        way = {**ACTS, "inputs": 200, **options}
        if way["align"] == "wts":
            del way["inputs"]
        yield Job(
            "S1.2",
            name,
            {"way": way, "seeds": seeds},
            lambda way=way: _fused_and_aligned(lab, way, seeds),
            seconds=4 * len(seeds),
        )


def _outputs(lab: Laboratory) -> Iterator[Job]:
    for name in ("--paper", "default"):
        yield Job("S2.2", name, {"way": WAYS[name]}, lambda name=name: _diagonal(lab, name))


def _diagonal(lab: Laboratory, name: str) -> Values:
    _, report = otfuse_cli.merge(*lab.pair, **WAYS[name])
    found = [layer.diagonal_mass for layer in report.layers if layer.diagonal_mass is not None]
    return {"trace over sum": found}


def _several(lab: Laboratory) -> Iterator[Job]:
    for count in COUNTS:
        yield Job(
            "N models",
            f"{count} MLPs",
            {"count": count, "ways": OF_MANY},
            lambda count=count: _of_many(lab, count),
            seconds=200,
        )


def _of_many(lab: Laboratory, count: int) -> Values:
    parents = lab.mlps(count)
    found: dict[str, list[float]] = {"parents": [lab.score(p) for p in parents]}
    found["ensemble"] = [ensemble(parents, lab.test, (1 / count,) * count)]
    for name, way in OF_MANY.items():
        found[name] = [lab.score(lab.fused(parents, way))]
    return found
