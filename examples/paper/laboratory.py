"""The MNIST networks of the paper's tables, and the ways they are fused in."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import evaluate
import torch
from mnist import MLPNET, Recipe, Split, StateDict, Student, accuracy, load, students

import otfuse_cli

PAIR = [evaluate.SHARED / "checkpoints" / f"mnist-mlpnet-{at}.checkpoint" for at in (0, 1)]
# Ways to fuse, with what `otfuse merge` takes: those with `inputs` are given as many.
Way = Mapping[str, Any]
WAYS: Mapping[str, Way] = {
    "plain": {"align": "none"},
    "--paper": {"paper": True},
    "--paper, activations": {"paper": True, "align": "acts", "inputs": 200},
    "default": {},
    "default, inputs": {"inputs": 200},
    "refit": {"blend": "average", "inputs": 200},
    "joint": {"blend": "joint", "matcher": "sweep", "inputs": 200},
}
# Of more than two networks, and how many.
OF_MANY: Mapping[str, Way] = {**WAYS, "default, --passes 4": {"passes": 4}}
COUNTS = (2, 4, 6, 8)
# Of the quick tables, and of those that have no more in the full ones.
SEEDS = range(3)
# Starts of training on from four: those of which two networks have shown that they differ.
OF_FOUR = {n: WAYS[n] for n in ("plain", "--paper, activations", "default", "joint")}


def more_inputs(ways: Mapping[str, Way], inputs: int, *, published: bool = False) -> dict[str, Way]:
    """The same, but that those with inputs have as many; of the paper's, if it is said."""
    more = {n for n, way in ways.items() if "inputs" in way and (published or "paper" not in way)}
    return {n: {**way, "inputs": inputs} if n in more else way for n, way in ways.items()}


@dataclass(frozen=True)
class Laboratory:
    """Data, the cache of trained networks, and how much is done (`quick`)."""

    given: argparse.Namespace
    quick: bool

    @cached_property
    def train(self) -> Split:
        """Training images."""
        return load(self.given.data, "train")

    @cached_property
    def test(self) -> Split:
        """Test images."""
        return load(self.given.data, "test")

    @cached_property
    def pair(self) -> list[dict[str, torch.Tensor]]:
        """The paper's pair: 97.72 and 97.75."""
        return [evaluate.load(path) for path in PAIR]

    @property
    def seeds(self) -> range:
        """As many as the paper's tables have, or three."""
        return SEEDS if self.quick else range(5)

    def mlps(self, count: int, recipe: Recipe | None = None) -> list[dict[str, torch.Tensor]]:
        """Networks trained as in the paper (S1.1), seeds 0 and on."""
        wanted = [Student(seed, seed) for seed in range(count)]
        return students(recipe or Recipe(MLPNET), wanted, self.given.data, self.given.cache)

    def score(self, network: StateDict) -> float:
        """Percent of the test images."""
        return accuracy(network, self.test)

    def fused(
        self,
        parents: Sequence[StateDict],
        way: Way,
        *,
        seed: int = 0,
        images: torch.Tensor | None = None,
        **more: Any,
    ) -> dict[str, torch.Tensor]:
        """Parents fused in one way; inputs are images, of the training set, that the seed draws."""
        options = {**way, **more}
        number = options.pop("inputs", None)
        if number is not None:
            seen = self.train.images if images is None else images
            options |= {"arch": "mlp", "samples": {"x": seen}, "num_samples": number}
        return otfuse_cli.merge(*parents, seed=seed, **options)[0]
