"""Figures 2, 4 and S5, S5.3, S6: a model with a skill, or with little data, into one with much.

A knows a digit that B has never seen, and some percent of the rest; B has the others of the rest.
Both are fused along w, the share of B. Inputs, where a way has them, are 400 training images of A's
own part, without labels: the paper's curve is `--paper, activations`.

Without inputs for the fusion itself matching does not depend on w: where widths are equal, A is
aligned once and averaged many times, which gives the bits of a merge from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jobs import Job, Values
from laboratory import SEEDS, WAYS, Laboratory, Way, more_inputs
from mnist import MLPNET, Recipe, StateDict, ensemble
from parts import SHARES, fours, pairs, portions

import otfuse_cli

INPUTS = 400
# Without the choice among ways: it would be judged on A's images, most of them of one digit.
ON_A = more_inputs(WAYS, INPUTS, published=True)
del ON_A["default, inputs"]
STARTS = {"same": "one start", "different": "two starts", "narrow": "A half as wide"}
ALONG, QUICK_ALONG = tuple(at / 10 for at in range(1, 10)), (0.1, 0.2, 0.3, 0.5, 0.8)
DIGITS, PERCENTS, QUICK_PERCENTS = (4, 6), (10, 5, 20), (10, 5)
# Digit, percent, start to what the paper says of it: A, B, and the best OT average.
SKILL = {(4, 10, "different"): (89.78, 87.35, 93.11)}
# A's share of the training set, and whether A begins where B does.
SPLITS = ((30, "same"), (10, "same"), (50, "same"), (30, "different"))
# The paper's: A, B, ensemble, plain average, OT average.
NO_DIGIT = {(30, "same"): (94.2, 95.0, 95.5, 95.1, 95.3)}
# Proportions of A, B, C, D to the paper's ensemble, plain average, OT average.
FOUR = {
    (0.7, 0.1, 0.2, 0.1): (95.0, 80.6, 93.6),
    (0.6, 0.1, 0.2, 0.1): (95.03, 78.44, 92.72),
    (0.7, 0.15, 0.2, 0.15): (94.91, 76.14, 91.67),
    (0.7, 0.1, 0.3, 0.1): (95.15, 77.93, 92.21),
}
# The paper's parents are a little weaker than ours; is it the training?
RECIPES = {
    "3 epochs": Recipe(MLPNET, epochs=3),
    "no momentum": Recipe(MLPNET, momentum=0.0),
    "rate 0.1": Recipe(MLPNET, rate=0.1),
}
OT = "--paper, activations"
# What else the published algorithm leaves open, on A's inputs.
MATCHED = {
    OT: ON_A[OT],
    "behind the activation": {**ON_A[OT], "post_activations": True},
    "2,000 images": {**ON_A[OT], "inputs": 2_000},
    "Sinkhorn 0.05": {**ON_A[OT], "solver": "sinkhorn", "epsilon": 0.05},
    "importance as mass": {**ON_A[OT], "mass": "importance"},
}


def jobs(lab: Laboratory) -> Iterator[Job]:
    """All of them."""
    along = QUICK_ALONG if lab.quick else ALONG
    seeds = list(lab.seeds)
    about: dict[str, Any] = {"w": along, "seeds": seeds, "ways": ON_A}
    for digit in DIGITS:
        for percent in QUICK_PERCENTS if lab.quick else PERCENTS:
            for start, words in STARTS.items():
                figures = SKILL.get((digit, percent, start), ())
                yield Job(
                    "Fig. 2",
                    f"digit {digit}, {percent} %, {words}",
                    {"digit": digit, "percent": percent, "start": start, **about},
                    lambda d=digit, p=percent, s=start: _curves(lab, d, p, s, along, seeds),
                    dict(zip(("A", "B", OT), figures, strict=False)),
                    seconds=len(seeds) * (8 + 2.2 * len(along)),
                )
    yield from _taken_apart(lab)
    for percent, start in SPLITS:
        yield Job(
            "S5.3",
            f"A has {percent} %, {STARTS[start]}",
            {"percent": percent, "start": start, **about},
            lambda p=percent, s=start: _curves(lab, None, p, s, along, seeds),
            dict(zip(("A", "B", "ensemble", "plain", OT), NO_DIGIT.get((percent, start), ()),
                     strict=False)),
            seconds=len(seeds) * (15 + 2.2 * len(along)),
        )  # fmt: skip
    yield from _several(lab)


def _taken_apart(lab: Laboratory) -> Iterator[Job]:
    """The paper's pair trained less or at a higher rate; and matched in other ways."""
    seeds = list(SEEDS)
    usual = {name: way for name, way in ON_A.items() if "blend" not in way}
    cases = [
        (f"{name}, {STARTS[start]}", start, usual, recipe)
        for start in ("same", "different")
        for name, recipe in RECIPES.items()
    ]
    cases.append(("matched otherwise, two starts", "different", MATCHED, Recipe(MLPNET)))
    for row, start, ways, recipe in cases:
        yield Job(
            "Fig. 2 apart",
            row,
            {"start": start, "recipe": recipe, "w": QUICK_ALONG, "seeds": seeds, "ways": ways},
            lambda s=start, w=ways, r=recipe: _curves(lab, 4, 10, s, QUICK_ALONG, seeds, w, r),
            dict(zip(("A", "B", OT), SKILL.get((4, 10, start), ()), strict=False)),
            seconds=40,
        )


def _several(lab: Laboratory) -> Iterator[Job]:
    """Four models: the paper's proportions, then the first of these with other training."""
    seeds = list(SEEDS)
    for proportions, figures in FOUR.items():
        yield Job(
            "S6",
            ", ".join(map(str, proportions)),
            {"proportions": proportions, "seeds": seeds, "ways": ON_A, "of": "probabilities too"},
            lambda proportions=proportions: _four(lab, proportions, seeds, Recipe(MLPNET)),
            dict(zip(("ensemble", "plain", OT), figures, strict=True)),
            seconds=60,
        )
    proportions, figures = next(iter(FOUR.items()))
    for name, recipe in RECIPES.items():
        yield Job(
            "S6",
            f"the first, {name}",
            {"proportions": proportions, "seeds": seeds, "ways": ON_A, "recipe": recipe},
            lambda recipe=recipe: _four(lab, proportions, seeds, recipe),
            dict(zip(("ensemble", "plain", OT), figures, strict=True)),
            seconds=60,
        )


def own_part(lab: Laboratory, digit: int | None, percent: int, seed: int) -> torch.Tensor:
    """Indices of the training images that A has."""
    shares = (percent / 100, 1 - percent / 100)
    return portions(lab.train, digit, shares, seed)[0]


def _curves(
    lab: Laboratory,
    digit: int | None,
    percent: int,
    start: str,
    along: Sequence[float],
    seeds: Sequence[int],
    ways: Mapping[str, Way] = ON_A,
    recipe: Recipe = Recipe(MLPNET),  # noqa: B008  # frozen
) -> Values:
    """`NAME @w` for each way and share of B."""
    given = lab.given
    found: dict[str, list[float]] = {}

    def keep(column: str, score: float) -> None:
        found.setdefault(column, []).append(score)

    together = pairs(digit, percent, list(seeds), start, lab.train, given.data, given.cache, recipe)
    for seed, pair in zip(seeds, together, strict=True):
        for name, network in zip("AB", pair, strict=True):
            keep(name, lab.score(network))
        images = lab.train.images[own_part(lab, digit, percent, seed)]
        for w in along:
            keep(f"ensemble @{w}", ensemble(pair, lab.test, (1 - w, w)))
        for name, way in ways.items():
            if name == "plain" and start == "narrow":
                continue
            fuse = Averages(lab, pair, way, images, seed)
            for w in along:
                keep(f"{name} @{w}", lab.score(fuse.at(w)))
    return found


class Averages:
    """A pair fused in one way at several shares of B."""

    def __init__(
        self,
        lab: Laboratory,
        pair: Sequence[StateDict],
        way: Way,
        images: torch.Tensor,
        seed: int,
    ) -> None:
        self._lab, self._pair, self._way, self._seed = lab, pair, way, seed
        self._images = images
        shapes = [[tensor.shape for tensor in network.values()] for network in pair]
        self._aligned: StateDict | None = None
        if "blend" not in way and shapes[0] == shapes[1]:
            self._aligned = lab.fused(pair, way, seed=seed, images=images, weights=(1, 0))

    def at(self, w: float) -> StateDict:
        """The fusion."""
        if self._aligned is None:
            return self._lab.fused(
                self._pair, self._way, seed=self._seed, images=self._images, weights=(1 - w, w)
            )
        published = self._way.get("paper") or self._way.get("align") == "none"
        return otfuse_cli.merge(
            self._aligned,
            self._pair[1],
            align="none",
            repair="none" if published else "auto",
            weights=(1 - w, w),
        )[0]


def _four(
    lab: Laboratory, proportions: tuple[float, ...], seeds: Sequence[int], recipe: Recipe
) -> Values:
    models = fours(4, list(seeds), lab.train, lab.given.data, lab.given.cache, recipe)
    own = [portions(lab.train, 4, SHARES, seed)[0] for seed in seeds]
    found = {name: [lab.score(four[at]) for four in models] for at, name in enumerate("ABCD")}
    found["ensemble"] = [ensemble(four, lab.test, proportions) for four in models]
    found["of probabilities"] = [
        ensemble(four, lab.test, proportions, of_probabilities=True) for four in models
    ]
    for name, way in ON_A.items():
        found[name] = [
            lab.score(
                lab.fused(
                    four,
                    way,
                    seed=seed,
                    images=lab.train.images[part],
                    weights=proportions,
                    anchor="first",
                )
            )
            for four, seed, part in zip(models, seeds, own, strict=True)
        ]
    return found
