"""The options that shape a fusion, resolved and checked. Torch-free: the command line reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .option import FUSION, INPUTS, MATCHING, RUN, Options, choice, option, switch

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
    "epsilon_unit": ("deviation", "cost"),
    "residual": ("shared", "average", "identity", "orthogonal"),
    "scale": ("auto", "preserve", "balanced", "paper"),
    "repair": ("auto", "none"),
    "blend": ("auto", "average", "joint", "head", "graft"),
    "calibrate": ("none", "bn", "repair", "auto"),
    "vocab": ("refuse", "common", "anchor"),
    "over": ("weight", "width"),
    "criterion": ("l1", "l2", "random", "ot", "reconstruct"),
    "dtype": ("keep", "float32", "float64", "float16", "bfloat16"),
}

# Generators are seeded by multiples of it, in 64 bits.
_SEEDS = 1 << 32


@dataclass(frozen=True)
class Recipe(Options):
    """Every option that shapes the result, resolved. Goes into the report as it is.

    `epsilon` is in standard deviations of the centred cost, or in its own units. `scale` decides
    what maps between different widths do: keep the function and be averaged by how many units stand
    for one (`auto`), in full (`preserve`), or with both models' layers brought to one length
    (`balanced`); or the paper's maps. `mass` `importance` is a unit's mean activation times its
    deviation.

    Raises:
        UsageError: A value outside its choices or range.
    """

    align: str = choice(
        "wts",
        "--align",
        CHOICES["align"],
        panel=FUSION,
        common=True,
        text="Match units by their incoming weights, by what they do on the inputs, or not at all "
        "(the plain average).",
    )
    matcher: str = choice(
        "auto",
        "--matcher",
        CHOICES["matcher"],
        panel=MATCHING,
        text="How maps are found: "
        + ", ".join(f"{what} ({name})" for name, what in MATCHERS.items())
        + ", or the best of them (auto).",
    )
    effort: float = option(
        2e13,
        "--effort",
        panel=MATCHING,
        kind=float,
        metavar="FLOP",
        text="Operations that auto may plan to spend on a source; above it, it tries less.",
        low=0,
    )
    metric: str = choice(
        "euclidean",
        "--metric",
        CHOICES["metric"],
        panel=MATCHING,
        text="Ground metric between units.",
    )
    unit_norm: bool = switch(
        True,
        "--unit-norm/--raw",
        panel=MATCHING,
        text="Compare rows at unit norm, or as they are (cost only).",
        said="unit-norm",
    )
    mass: str = choice(
        "uniform",
        "--mass",
        CHOICES["mass"],
        panel=MATCHING,
        text="Mass of a unit: equal, the norm of its row, or what it does on the inputs.",
    )
    solver: str = choice(
        "exact",
        "--solver",
        CHOICES["solver"],
        panel=MATCHING,
        text="Solver of each transport problem.",
    )
    epsilon: float = option(
        0.05,
        "--epsilon",
        panel=MATCHING,
        kind=float,
        metavar="E",
        text="Regularisation of sinkhorn.",
        low=0,
        above=True,
    )
    epsilon_unit: str = choice(
        "deviation",
        "--epsilon-unit",
        CHOICES["epsilon_unit"],
        panel=MATCHING,
        text="What --epsilon counts: standard deviations of the cost, the same in every layer, or "
        "the cost itself (as --paper does).",
    )
    residual: str = choice(
        "shared",
        "--residual",
        CHOICES["residual"],
        panel=FUSION,
        text="Residual streams: one shared map, the paper's averaged maps, left in place, or "
        "turned (orthogonal: pre-norm transformers, in merge).",
    )
    beta: float = option(
        0.5,
        "--beta",
        panel=FUSION,
        kind=float,
        metavar="B",
        text="Share of the shortcut in --residual average, 0 to 1.",
        low=0,
        high=1,
    )
    scale: str = choice(
        "auto",
        "--scale",
        CHOICES["scale"],
        panel=FUSION,
        text="Different widths: keep the function, and count a source by how many of its units "
        "stand for one (auto; not prune-fuse), or in full (preserve), or bring both models' rows "
        "to one length (balanced); or the paper's scaling by M/N.",
    )
    passes: int = option(
        1,
        "--passes",
        panel=MATCHING,
        kind=int,
        metavar="P",
        text="From the second pass on, align each source to the mean of the other models.",
        low=1,
    )
    iterate: int = option(
        0,
        "--iterate",
        panel=MATCHING,
        kind=int,
        metavar="N",
        text="Rounds in which all models, the anchor too, are realigned to their present mean; "
        "fewer where nothing moves.",
        low=0,
    )
    repair: str = choice(
        "auto",
        "--repair",
        CHOICES["repair"],
        panel=FUSION,
        text="Undo the shrinking of imperfectly matched units, from the weights alone.",
    )
    post_activations: bool = switch(
        False,
        "--post-activations",
        panel=INPUTS,
        text="With --align acts: look at units after their activation function.",
    )
    seed: int = option(
        0,
        "--seed",
        panel=RUN,
        kind=int,
        metavar="N",
        text="Decides everything random.",
        low=0,
        high=_SEEDS - 1,
    )

    def to_dict(self) -> dict[str, Any]:
        """The recipe as the report holds it."""
        return asdict(self)
