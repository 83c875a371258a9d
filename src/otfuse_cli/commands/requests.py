"""What each command is asked to do: one frozen request per verb, and the recipe it resolves to.

Torch-free, so that the command line can build a request before anything heavy is imported. An
option that is None was not given; `FusionOptions.recipe` fills it from `--paper` or the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..align.recipe import CHOICES, Recipe
from ..errors import UsageError

if TYPE_CHECKING:
    import torch

    StateDict = Mapping[str, torch.Tensor]
else:
    StateDict = Mapping

Source = str | Path | StateDict

__all__ = [
    "CHOICES",
    "CheckRequest",
    "DemoRequest",
    "FusionOptions",
    "InspectRequest",
    "MergeRequest",
    "OutputOptions",
    "PruneFuseRequest",
    "PruneRequest",
    "Recipe",
    "Source",
    "normalised",
]

_PAPER: Mapping[str, Any] = {
    "align": "wts",
    "matcher": "sweep",
    "metric": "euclidean",
    "unit_norm": True,
    "mass": "uniform",
    "solver": "exact",
    "residual": "average",
    "beta": 0.5,
    "scale": "paper",
    "passes": 1,
    "repair": "none",
}


@dataclass(frozen=True, kw_only=True)
class FusionOptions:
    """Options that `merge`, `prune-fuse` and `inspect --ot-costs` share. None: not given."""

    arch: str = "auto"
    free_outputs: bool = False
    key: str | None = None
    device: str = "auto"
    paper: bool = False
    align: str | None = None
    matcher: str | None = None
    effort: float | None = None
    metric: str | None = None
    unit_norm: bool | None = None
    mass: str | None = None
    solver: str | None = None
    epsilon: float | None = None
    residual: str | None = None
    beta: float | None = None
    scale: str | None = None
    passes: int | None = None
    repair: str | None = None
    seed: int = 0

    def recipe(self) -> Recipe:
        """Given options over those of `--paper` over the defaults.

        Raises:
            UsageError: A value outside its choices or range.
        """
        preset = dict(_PAPER) if self.paper else {}
        for field in fields(Recipe):
            given = getattr(self, field.name)
            if given is not None:
                preset[field.name] = given
        if preset.get("align") == "none":
            preset.setdefault("repair", "none")
        return Recipe(**preset)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where results go. `report` None: beside the output."""

    output: Path | None = None
    report: Path | None = None
    overwrite: bool = False
    dtype: Literal["keep", "float32", "float64", "float16", "bfloat16"] = "keep"

    def __post_init__(self) -> None:
        if self.dtype not in CHOICES["dtype"]:
            raise UsageError(
                f"unknown value {self.dtype!r}",
                where="--dtype",
                fix=f"use one of: {', '.join(CHOICES['dtype'])}",
            )


@dataclass(frozen=True, kw_only=True)
class MergeRequest(FusionOptions, OutputOptions):
    """Fuse `checkpoints` (two or more) with `weights` into the anchor's shape."""

    checkpoints: tuple[Source, ...]
    weights: tuple[float, ...] | None = None
    anchor: str = "last"


@dataclass(frozen=True, kw_only=True)
class PruneFuseRequest(FusionOptions, OutputOptions):
    """Fuse `dense` into its pruned version, which is the anchor.

    `dense_weight` None: 0.7 where every unit of `pruned` is one of `dense`, otherwise 0.5.
    """

    dense: Source
    pruned: Source
    dense_weight: float | None = None
    keep_shape: bool = False


@dataclass(frozen=True, kw_only=True)
class PruneRequest(OutputOptions):
    """Remove units of `checkpoint`: the share `amount`, or shares by name (`layer`)."""

    checkpoint: Source
    amount: float | None = None
    criterion: str = "l1"
    only: tuple[str, ...] = ()
    layer: Mapping[str, float] | None = None
    arch: str = "auto"
    key: str | None = None
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criterion not in CHOICES["criterion"]:
            raise UsageError(
                f"unknown value {self.criterion!r}",
                where="--criterion",
                fix=f"use one of: {', '.join(CHOICES['criterion'])}",
            )


@dataclass(frozen=True, kw_only=True)
class InspectRequest(FusionOptions):
    """Look at one checkpoint, or compare several with the last one as anchor."""

    checkpoints: tuple[Source, ...]
    matcher: str | None = "sweep"  # a pre-flight is quick
    anchor: str = "last"
    ot_costs: bool = False
    graph: bool = False
    write_spec: Path | None = None
    max_cost: float | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """Prove a layer graph on the module of `arch`: the traced one, or the one that `spec` says."""

    checkpoint: Source
    arch: str
    spec: str | None = None
    free_outputs: bool = False
    key: str | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class DemoRequest(FusionOptions, OutputOptions):
    """Fuse the bundled pair of digit classifiers and measure what comes out."""


def normalised(weights: tuple[float, ...] | None, count: int) -> tuple[float, ...]:
    """`count` weights that sum to 1; equal ones when none were given.

    Raises:
        UsageError: Wrong number, a negative or non-finite weight, or a sum of zero.
    """
    if weights is None:
        return (1.0 / count,) * count
    where = "--weights " + ",".join(f"{w:g}" for w in weights)
    if len(weights) != count:
        raise UsageError(
            f"{len(weights)} weights for {count} checkpoints",
            where=where,
            fix="give one weight per checkpoint, in the order in which they are named",
        )
    if any(not isfinite(w) or w < 0 for w in weights):
        raise UsageError(
            "weights must be finite and not negative",
            where=where,
            fix="for example --weights 0.7,0.3",
        )
    total = sum(weights)
    if not isfinite(total) or total <= 0:
        raise UsageError(
            "weights sum to zero" if total == 0 else "weights overflow",
            where=where,
            why="they are normalised to sum to 1",
            fix="give at least one positive weight",
        )
    return tuple(w / total for w in weights)
