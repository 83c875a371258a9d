"""S5.3 and S6: parts of the data without a special digit, and four models, one of which knows it.

Inputs, where a way has them, are 400 training images of A's own part, without labels. Figures 2 and
S5 are those of examples/skill_transfer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "skill_transfer"))

from jobs import Job, Values
from laboratory import WAYS, Laboratory
from mnist import MLPNET, Recipe, StateDict, Student, ensemble, students
from parents import ELSEWHERE, SHARES, fours, portions

INPUTS = 400
# A's share of the training set, and whether A begins where B does.
SPLITS = ((0.3, True), (0.1, True), (0.5, True), (0.3, False))
SHARES_OF_B = (0.1, 0.3, 0.5, 0.7, 0.9)
# The paper's: A, B, ensemble, plain average, OT average.
NO_DIGIT = {(0.3, True): (94.2, 95.0, 95.5, 95.1, 95.3)}
# Proportions of A, B, C, D to the paper's ensemble, plain average, OT average.
FOUR = {
    (0.7, 0.1, 0.2, 0.1): (95.0, 80.6, 93.6),
    (0.6, 0.1, 0.2, 0.1): (95.03, 78.44, 92.72),
    (0.7, 0.15, 0.2, 0.15): (94.91, 76.14, 91.67),
    (0.7, 0.1, 0.3, 0.1): (95.15, 77.93, 92.21),
}
ON_A = {name: {**way, "inputs": INPUTS} if "inputs" in way else way for name, way in WAYS.items()}


def jobs(lab: Laboratory) -> Iterator[Job]:
    """All of them."""
    seeds = list(range(3))
    for share, same in SPLITS:
        columns = ("A", "B", "ensemble", "plain", "--paper, activations")
        yield Job(
            "S5.3",
            f"A has {share:.0%}, {'one start' if same else 'two starts'}",
            {"share": share, "same": same, "w": SHARES_OF_B, "seeds": seeds, "ways": ON_A},
            lambda share=share, same=same: _without_digit(lab, share, same, seeds),
            dict(zip(columns, NO_DIGIT.get((share, same), ()), strict=False)),
            seconds=240,
        )
    for proportions, figures in FOUR.items():
        yield Job(
            "S6",
            ", ".join(map(str, proportions)),
            {"proportions": proportions, "seeds": seeds, "ways": ON_A},
            lambda proportions=proportions: _four(lab, proportions, seeds),
            dict(zip(("ensemble", "plain", "--paper, activations"), figures, strict=True)),
            seconds=60,
        )


def _without_digit(lab: Laboratory, share: float, same: bool, seeds: Sequence[int]) -> Values:
    """Each way at its best share of B, by the mean over seeds."""
    parts = [portions(lab.train, -1, (share, 1 - share), seed) for seed in seeds]
    moved = 0 if same else ELSEWHERE
    wanted = [
        [Student(s + moved, s + ELSEWHERE, p[0]) for s, p in zip(seeds, parts, strict=True)],
        [Student(s, s, p[1]) for s, p in zip(seeds, parts, strict=True)],
    ]
    models = [students(Recipe(MLPNET), w, lab.given.data, lab.given.cache) for w in wanted]
    pairs = list(zip(*models, strict=True))
    found: dict[str, list[float]] = {
        name: [lab.score(pair[at]) for pair in pairs] for at, name in enumerate("AB")
    }
    curves: dict[str, list[list[float]]] = {}
    for w in SHARES_OF_B:
        weights = (1 - w, w)
        together = [ensemble(pair, lab.test, weights) for pair in pairs]
        curves.setdefault("ensemble", []).append(together)
        for name in ON_A:
            scores = [
                _fused(lab, pair, name, seed, part[0], weights=weights)
                for pair, seed, part in zip(pairs, seeds, parts, strict=True)
            ]
            curves.setdefault(name, []).append(scores)
    return found | {name: max(points, key=sum) for name, points in curves.items()}


def _four(lab: Laboratory, proportions: tuple[float, ...], seeds: Sequence[int]) -> Values:
    models = fours(4, list(seeds), lab.train, lab.given.data, lab.given.cache)
    own = [portions(lab.train, 4, SHARES, seed)[0] for seed in seeds]
    found = {name: [lab.score(four[at]) for four in models] for at, name in enumerate("ABCD")}
    found["ensemble"] = [ensemble(four, lab.test, proportions) for four in models]
    for name in ON_A:
        found[name] = [
            _fused(lab, four, name, seed, part, weights=proportions, anchor="first")
            for four, seed, part in zip(models, seeds, own, strict=True)
        ]
    return found


def _fused(
    lab: Laboratory,
    parents: Sequence[StateDict],
    name: str,
    seed: int,
    part: Sequence[int],
    **more: object,
) -> float:
    return lab.score(
        lab.fused(parents, ON_A[name], seed=seed, images=lab.train.images[part], **more)
    )
