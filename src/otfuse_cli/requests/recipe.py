"""The options that shape a fusion, resolved and checked. Torch-free: the command line reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from ..errors import UsageError

# Searches by their value of `--matcher`, with what help says of them
# (`matching/matchers/searches.py` has them, but for the sweep that all begin with).
MATCHERS: Mapping[str, str] = {
    "sweep": "one pass in graph order",
    "descent": "steps that look at both sides of a unit",
    "frank-wolfe": "all spaces at once",
}

CHOICES: Mapping[str, tuple[str, ...]] = {
    "align": ("wts", "acts", "none"),
    "matcher": ("auto", *MATCHERS),
    "metric": ("euclidean", "cosine", "correlation"),
    "mass": ("uniform", "norm", "importance"),
    "solver": ("exact", "sinkhorn"),
    "residual": ("shared", "average", "identity", "orthogonal"),
    "scale": ("auto", "preserve", "balanced", "paper"),
    "repair": ("auto", "none"),
    "blend": ("auto", "average", "joint", "head", "graft"),
    "calibrate": ("none", "bn", "repair", "auto"),
    "vocab": ("refuse", "common", "anchor"),
    "criterion": ("l1", "l2", "random", "ot", "reconstruct"),
    "dtype": ("keep", "float32", "float64", "float16", "bfloat16"),
}

# Generators are seeded by multiples of it, in 64 bits.
_SEEDS = 1 << 32


@dataclass(frozen=True)
class Recipe:
    """Every option that shapes the result, resolved. Goes into the report as it is.

    Attributes:
        align: `wts`, `acts` (what units do on the inputs), or `none` for the plain average.
        matcher: How maps are found: `sweep`, `descent`, `frank-wolfe`, or the best of them, `auto`.
        effort: Floating point operations that `auto` may plan to spend on one source.
        metric: Ground metric between units.
        unit_norm: Compare rows at unit norm (cost only).
        mass: `uniform`, `norm` (row norms), or `importance` (mean |activation| times its
            deviation).
        solver: `exact` or `sinkhorn`.
        epsilon: Entropic regularisation, in standard deviations of the centred cost.
        residual: How residual streams are mapped.
        beta: Share of the shortcut in `residual average`.
        scale: Consume maps that preserve the function, averaged by how many units stand for one
            (`auto`), in full (`preserve`), or with both models' layers brought to one length
            (`balanced`); or the paper's maps.
        passes: Rounds over the sources; from the second, each is matched to the mean of the others.
        repair: `auto`: undo the shrinking of imperfect matches, from the weights alone; or `none`.
        post_activations: Look at units after their activation function instead of before.
        seed: Decides everything random.
    """

    align: str = "wts"
    matcher: str = "auto"
    effort: float = 2e13
    metric: str = "euclidean"
    unit_norm: bool = True
    mass: str = "uniform"
    solver: str = "exact"
    epsilon: float = 0.05
    residual: str = "shared"
    beta: float = 0.5
    scale: str = "auto"
    passes: int = 1
    repair: str = "auto"
    post_activations: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name, None)
            if value is not None and value not in choices:
                raise UsageError(
                    f"unknown value {value!r}",
                    where=f"--{name}",
                    fix=f"use one of: {', '.join(choices)}",
                )
        if not (isfinite(self.epsilon) and self.epsilon > 0):
            raise UsageError("epsilon must be positive", where=f"--epsilon {self.epsilon}")
        if not (isfinite(self.effort) and self.effort >= 0):
            raise UsageError(
                "effort must be a number of operations", where=f"--effort {self.effort}"
            )
        require_seed(self.seed)
        if self.passes < 1:
            raise UsageError("there is at least one pass", where=f"--passes {self.passes}")
        if not 0 <= self.beta <= 1:
            raise UsageError("beta must lie between 0 and 1", where=f"--beta {self.beta}")

    def to_dict(self) -> dict[str, Any]:
        """The recipe as the report holds it."""
        return asdict(self)


def require_seed(seed: int) -> None:
    """Refuse a seed that not every generator takes.

    Raises:
        UsageError: It is negative, or has more than 32 bits.
    """
    if not 0 <= seed < _SEEDS:
        raise UsageError(
            "not a seed", where=f"--seed {seed}", fix=f"use a number from 0 to {_SEEDS - 1}"
        )
