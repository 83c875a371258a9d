"""Tables S10 and S11: a teacher into students of a half and a tenth of its widths.

The loss is the paper's: `g` times the cross entropy of the labels, and 1 - g times T^2 times the
divergence of the student's softened outputs from the teacher's. Without labels g is 0, and the
teacher is the ensemble of teacher and student.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from finetune import trained
from jobs import Job, Values
from laboratory import SEEDS, WAYS, Laboratory
from mnist import MLPNET, Recipe, Slope, StateDict, Student, cross_entropy, evaluate, students

# Ratio of widths to the students' hidden layers.
STUDENTS = {2: (200, 100, 50), 10: (40, 20, 10)}
# Ratio and temperature to the paper's best: from random weights, from B's, from the OT average.
PAPER: Mapping[tuple[int, float], tuple[float, float, float]] = {
    (2, 1): (98.06, 98.04, 98.17), (2, 4): (98.11, 98.21, 98.30), (2, 10): (98.15, 98.19, 98.28),
    (10, 1): (96.73, 97.28, 97.40), (10, 4): (97.39, 97.53, 97.57), (10, 10): (97.32, 97.67, 97.65),
}  # fmt: skip
TEMPERATURES, FACTORS = (1.0, 4.0, 10.0), (0.05, 0.7)
EPOCHS, QUICK_EPOCHS = 60, {2: 5, 10: 10}
RATE = 0.01
FUSED = {name: WAYS[name] for name in ("--paper", "default", "refit", "joint")}


def jobs(lab: Laboratory) -> Iterator[Job]:
    """One for each ratio, temperature and factor, and one without labels."""
    seeds = list(SEEDS if lab.quick else range(4))  # the paper's are four
    for ratio, hidden in STUDENTS.items():
        epochs = QUICK_EPOCHS[ratio] if lab.quick else EPOCHS
        recipe = Recipe(hidden, epochs, RATE)
        about = {"ratio": ratio, "epochs": epochs, "seeds": seeds, "ways": FUSED, "rate": RATE}
        seconds = (1.0 if ratio == 2 else 0.3) * epochs * len(seeds) * (2 + len(FUSED))
        for temperature, factor in product(TEMPERATURES, FACTORS):
            columns = ("random", "B", "--paper")
            yield Job(
                f"S10 ratio {ratio}",
                f"T {temperature:g}, labels {factor}",
                {**about, "temperature": temperature, "factor": factor},
                lambda recipe=recipe, t=temperature, g=factor: _distilled(lab, recipe, seeds, t, g),
                dict(zip(columns, PAPER[ratio, int(temperature)], strict=True)),
                seconds,
            )
        yield Job(
            f"S10 ratio {ratio}",
            "T 4, no labels",
            {**about, "temperature": 4.0, "factor": 0.0},
            lambda recipe=recipe: _distilled(lab, recipe, seeds, 4.0, 0.0),
            seconds=seconds,
        )


def _distilled(
    lab: Laboratory, recipe: Recipe, seeds: Sequence[int], temperature: float, factor: float
) -> Values:
    begin: list[tuple[str, int, StateDict]] = []
    teachers: list[torch.Tensor] = []
    for seed in seeds:
        (teacher,) = students(
            Recipe(MLPNET), [Student(seed, seed)], lab.given.data, lab.given.cache
        )
        (own,) = students(
            Recipe(recipe.hidden), [Student(seed, seed)], lab.given.data, lab.given.cache
        )
        starts = _starts(lab, recipe, teacher, own, seed)
        begin += [(name, seed, net) for name, net in starts.items()]
        logits = evaluate.mlpnet(teacher, lab.train.images)
        if not factor:
            logits = (logits + evaluate.mlpnet(own, lab.train.images)) / 2
        teachers += [logits] * len(starts)
    slope = softened(teachers, cross_entropy(lab.train), temperature, factor)
    return trained(lab, recipe, begin, slope=slope)


def _starts(
    lab: Laboratory, recipe: Recipe, teacher: StateDict, own: StateDict, seed: int
) -> dict[str, StateDict]:
    """Random weights, the student's own, and the teacher fused into it."""
    untrained = Recipe(recipe.hidden, epochs=0)
    random = students(untrained, [Student(1000 + seed, seed)], lab.given.data, lab.given.cache)[0]
    fused = {name: lab.fused((teacher, own), way, seed=seed) for name, way in FUSED.items()}
    return {"random": random, "B": own, **fused}


def softened(
    teachers: Sequence[torch.Tensor], labels: Slope, temperature: float, factor: float
) -> Slope:
    """Slope of the loss: each network's teacher gives logits (examples, 10)."""
    soft = torch.stack([(logits / temperature).softmax(-1) for logits in teachers])

    def slope(logits_GBO: torch.Tensor, index_GB: torch.Tensor) -> torch.Tensor:
        wanted = torch.stack([of[at] for of, at in zip(soft, index_GB, strict=True)])
        # T^2 of the loss, 1 / T of the inner derivative.
        toward = ((logits_GBO / temperature).softmax(-1) - wanted).mul_(temperature * (1 - factor))
        return toward.add_(labels(logits_GBO, index_GB), alpha=factor) if factor else toward

    return slope
