"""Parents that saw different parts of the training set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from mnist import MLPNET, Recipe, Split, Student, students

NARROW = (200, 100, 50)
SHARES = (0.1, 0.3, 0.5, 0.1)  # of the four-model variant, the paper's S6
ELSEWHERE = 1000  # added to the seed of a start that is not B's

Network = dict[str, torch.Tensor]


def portions(
    train: Split, digit: int | None, shares: tuple[float, ...], seed: int
) -> list[torch.Tensor]:
    """Indices for each model: the first has every `digit`, the rest is divided by `shares`."""
    alone = torch.zeros(len(train.labels), dtype=torch.bool)
    if digit is not None:
        alone = train.labels == digit
    special, rest = alone.nonzero().flatten(), (~alone).nonzero().flatten()
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
    ends = torch.tensor(shares).cumsum(0).mul(len(rest)).round().long().tolist()
    parts = [rest[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return [torch.cat([special, parts[0]]), *parts[1:]]


def pairs(
    digit: int | None,
    percent: int,
    seeds: list[int],
    start: str,
    train: Split,
    data: Path,
    cache: Path,
    recipe: Recipe = Recipe(MLPNET),  # noqa: B008  # frozen
) -> list[tuple[Network, Network]]:
    """A (`percent` of what has no owner) and B (what is left of it), for each seed.

    Args:
        digit: All of it is A's; None: there is no such digit.
        percent: A's share of the others.
        seeds: Of the division, and of starts and orders.
        start: `same` (A from B's initial weights), `different`, or `narrow` (A half as wide).
        train: The training set.
        data: Where it lies.
        cache: Where trained networks are kept.
        recipe: How they are trained.
    """
    parts = [portions(train, digit, (percent / 100, 1 - percent / 100), seed) for seed in seeds]
    moved = 0 if start == "same" else ELSEWHERE
    a = replace(recipe, hidden=NARROW) if start == "narrow" else recipe
    a_students = [
        Student(seed + moved, seed + ELSEWHERE, part[0])
        for seed, part in zip(seeds, parts, strict=True)
    ]
    b_students = [Student(seed, seed, part[1]) for seed, part in zip(seeds, parts, strict=True)]
    return list(
        zip(
            students(a, a_students, data, cache),
            students(recipe, b_students, data, cache),
            strict=True,
        )
    )


def fours(
    digit: int,
    seeds: list[int],
    train: Split,
    data: Path,
    cache: Path,
    recipe: Recipe = Recipe(MLPNET),  # noqa: B008  # frozen
) -> list[tuple[Network, ...]]:
    """A (knows `digit`), B, C and D from one start, with 10, 30, 50 and 10 % of the rest."""
    parts = [portions(train, digit, SHARES, seed) for seed in seeds]
    models = [
        students(
            recipe,
            [
                Student(seed, seed + at * ELSEWHERE, part[at])
                for seed, part in zip(seeds, parts, strict=True)
            ],
            data,
            cache,
        )
        for at in range(len(SHARES))
    ]
    return list(zip(*models, strict=True))
