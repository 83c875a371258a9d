"""What each command is asked to do: one frozen request per verb, composed of groups of options.

A field is an option of the verb's command. Torch-free, so that the command line can build a
request before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .option import FUSION, INPUTS, OUTPUT, PRUNING, argument, choice, needed, option, switch, unset
from .option_groups import (
    AnchorOptions,
    ArchSource,
    AverageOptions,
    ComputeOptions,
    FitOptions,
    FusionOptions,
    GraphOptions,
    ImproveOptions,
    InputOptions,
    MatchOptions,
    MeasureOptions,
    NetworkOptions,
    OutputOptions,
    PlotOptions,
    RepairOptions,
    RoundOptions,
    SampleSource,
    SeedOptions,
    Source,
    UntieOptions,
    WidthOptions,
    WriteOptions,
)
from .recipe import CHOICES, Recipe

# In place of a file name: standard output for a report, standard input for one to look at.
STANDARD = Path("-")

__all__ = [
    "CHOICES",
    "STANDARD",
    "ArchSource",
    "AverageOptions",
    "CheckRequest",
    "CurveRequest",
    "DemoRequest",
    "EvaluateRequest",
    "FusionOptions",
    "ImproveOptions",
    "InspectRequest",
    "MeasureOptions",
    "MergeRequest",
    "OutputOptions",
    "PruneFuseRequest",
    "PruneRequest",
    "Recipe",
    "SampleSource",
    "Source",
    "WriteOptions",
    "normalised",
]


def _checkpoints() -> Any:
    return argument(
        "CKPT",
        text="Checkpoints; of a fusion the last one is the anchor, unless --anchor says so.",
        several=True,
    )


@dataclass(frozen=True, kw_only=True)
class MergeRequest(ImproveOptions, WidthOptions, AnchorOptions, UntieOptions, AverageOptions):
    """Fuse `checkpoints` (two or more) with `weights` into the anchor's shape.

    `weights` may be given by tensor: patterns of names to a weight per checkpoint.
    """

    checkpoints: tuple[Source, ...] = _checkpoints()
    weights: tuple[float, ...] | Mapping[str, Sequence[float]] | None = option(
        None,
        "--weights",
        panel=FUSION,
        metavar="W,W...|FILE.yaml",
        text="A weight per checkpoint, made to sum to 1; a file gives weights by tensor.",
        said="equal",
        common=True,
    )

    @property
    def asks_for_width(self) -> bool:
        """Whether the result is to have widths of its own."""
        return self.width is not None or bool(self.layer) or self.width_multiple is not None


@dataclass(frozen=True, kw_only=True)
class PruneFuseRequest(ImproveOptions, AverageOptions):
    """Fuse `dense` into its pruned version, which is the anchor.

    `dense_weight` None: 0.7 where every unit of `pruned` is one of `dense`, otherwise 0.5.
    """

    dense: Source = argument("DENSE", text="The unpruned checkpoint.")
    pruned: Source = argument("PRUNED", text="Its pruned version: the anchor.")
    dense_weight: float | None = option(
        None,
        "--dense-weight",
        panel=FUSION,
        kind=float,
        metavar="W",
        text="Weight of DENSE; PRUNED has the rest.",
        said="0.7 if all units of PRUNED are DENSE's, else 0.5",
        common=True,
    )
    keep_shape: bool = switch(
        False,
        "--keep-shape",
        panel=FUSION,
        text="Where PRUNED is masked (weight_mask, rows of zeros): write its shape, pruned units "
        "zero, instead of a smaller network.",
        common=True,
    )

    def recipe(self) -> Recipe:
        """As for `merge`, but the dense network counts in full: the pruned one is made of it."""
        if self.scale is None and not self.paper:
            return replace(self, scale="preserve").recipe()
        return super().recipe()


@dataclass(frozen=True, kw_only=True)
class PruneRequest(FitOptions, InputOptions, NetworkOptions, ComputeOptions, OutputOptions):
    """Remove units of `checkpoint`: the share `amount`, or shares by name (`layer`); or blocks.

    Inputs, and what is done with them, are for `criterion="reconstruct"` and for `depth`.
    """

    checkpoint: Source = argument("CKPT", text="A checkpoint of the network.")
    amount: float | None = option(
        None,
        "--amount",
        panel=PRUNING,
        kind=float,
        metavar="SHARE",
        text="Share of units to remove from every layer, more than 0 and less than 1.",
        common=True,
    )
    depth: int | None = option(
        None,
        "--depth",
        panel=PRUNING,
        kind=int,
        metavar="N",
        text="Residual blocks to remove: those that are missed least on inputs, on which what is "
        "left is then fitted.",
        low=1,
        common=True,
    )
    criterion: str = choice(
        "l1",
        "--criterion",
        CHOICES["criterion"],
        panel=PRUNING,
        text="Units to keep: of large incoming weights (l1, l2), random ones, those that the "
        "others can be merged into at least cost (ot, which merges them), or those that explain "
        "the others best on inputs, on which layers are then fitted (reconstruct).",
        common=True,
    )
    layer: Mapping[str, float] | None = option(
        None,
        "--layer",
        panel=PRUNING,
        metavar="NAME=SHARE",
        text="A share of its own for the units of a module, tensor or space, 0 to keep them all; "
        "may be repeated.",
        several=True,
        common=True,
    )
    only: tuple[str, ...] = unset(
        AverageOptions,
        "only",
        (),
        panel=PRUNING,
        text="Apply --amount to these spaces, modules or tensors only, --depth to these blocks; "
        "may be repeated.",
    )
    ridge: float = unset(
        FitOptions,
        "ridge",
        0.1,
        panel=PRUNING,
        text="With --criterion reconstruct or --depth: how strongly a fit is pulled toward what "
        "the kept units make of the others, or to where it begins.",
    )

    def inputs(self) -> ImproveOptions:
        """Which inputs, and how layers are fitted on them, as a fusion takes it."""
        taken = {item.name for item in fields(ImproveOptions)}
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name in taken}
        return ImproveOptions(**shared, blend="joint")


@dataclass(frozen=True, kw_only=True)
class InspectRequest(FusionOptions, AnchorOptions, PlotOptions):
    """Look at one checkpoint, or compare several with the last one as anchor."""

    checkpoints: tuple[Source, ...] = _checkpoints()
    ot_costs: bool = switch(
        False,
        "--ot-costs",
        panel=FUSION,
        text="OT cost of every space and layer, beside the cost of leaving units in place.",
        common=True,
    )
    graph: bool = switch(
        False,
        "--graph",
        panel=FUSION,
        text="Every space of the layer graph, and what stays in place.",
        common=True,
    )
    depth: bool = switch(
        False,
        "--depth",
        panel=FUSION,
        text="With inputs: how alike the layers of the checkpoints are, and which stand for which "
        "where depths differ.",
        common=True,
    )
    max_cost: float | None = option(
        None,
        "--max-cost",
        panel=FUSION,
        kind=float,
        metavar="X",
        text="Exit with 7 if a space costs more than X.",
        low=0,
        common=True,
    )
    max_moved: float | None = option(
        None,
        "--max-moved",
        panel=FUSION,
        kind=float,
        metavar="F",
        text="Exit with 7 if more than this fraction of a space's units moves, 0 to 1.",
        low=0,
        high=1,
    )
    matcher: str | None = unset(
        Recipe, "matcher", "sweep", text="How maps are found; a pre-flight is quick."
    )
    write_spec: Path | None = option(
        None,
        "--write-spec",
        panel=OUTPUT,
        kind=Path,
        metavar="FILE",
        text="Write the layer graph as a spec, for --arch.",
    )
    report: Path | None = unset(WriteOptions, "report")

    @property
    def costs(self) -> bool:
        """Whether anything that was asked for needs OT costs: inputs serve little else."""
        gated = self.max_cost is not None or self.max_moved is not None
        if gated or self.ot_costs or self.align == "acts":
            return True
        shown = self.synthetic or self.plot is not None or self.samples is not None
        return shown and not self.depth


@dataclass(frozen=True, kw_only=True)
class CheckRequest(GraphOptions, NetworkOptions, SeedOptions):
    """Prove a layer graph on the module of `arch`: the traced one, or the one that `spec` says."""

    checkpoint: Source = argument("CKPT", text="A checkpoint of the network.")
    arch: ArchSource = needed(NetworkOptions, "arch")
    spec: str | None = option(
        None,
        "--spec",
        panel=INPUTS,
        metavar="SPEC",
        text="Check this family or spec.yaml on the network instead of the traced graph.",
        common=True,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(MeasureOptions, NetworkOptions, ComputeOptions):
    """Measure `checkpoints`; on request their ensemble and their plain average as well."""

    checkpoints: tuple[Source, ...] = _checkpoints()
    ensemble: bool = switch(
        False,
        "--ensemble",
        panel=FUSION,
        text="Also measure the mean of the checkpoints' outputs.",
        common=True,
    )
    average: bool = switch(
        False,
        "--average",
        panel=FUSION,
        text="Also measure the plain average of the checkpoints.",
        common=True,
    )


@dataclass(frozen=True, kw_only=True)
class CurveRequest(
    MeasureOptions,
    MatchOptions,
    RoundOptions,
    RepairOptions,
    GraphOptions,
    NetworkOptions,
    UntieOptions,
    PlotOptions,
):
    """Measure two checkpoints and what lies between them, plainly averaged and fused."""

    checkpoints: tuple[Source, ...] = _checkpoints()
    steps: int = option(
        11,
        "--steps",
        panel=FUSION,
        kind=int,
        metavar="N",
        text="Points of a curve over weights, both ends included.",
        low=2,
        common=True,
    )
    over: str = choice(
        "weight",
        "--over",
        CHOICES["over"],
        panel=FUSION,
        text="What changes along the curve: the weight of the second checkpoint, or the width of "
        "what joint fusion makes of all of them.",
        common=True,
    )
    widths: tuple[float, ...] | None = option(
        None,
        "--widths",
        panel=FUSION,
        metavar="F,F...",
        text="Widths of a curve over them, relative to the last checkpoint.",
        said="from the last checkpoint's to that of all together, by a quarter",
        common=True,
    )
    inputs: SampleSource | None = option(
        None,
        "--inputs",
        panel=INPUTS,
        metavar="FILE",
        text="With --over width: what networks are fused on, as --samples of merge; not what they "
        "are measured on.",
        said="made up, as by merge --synthetic",
        common=True,
    )
    num_inputs: int | None = option(
        None,
        "--num-inputs",
        panel=INPUTS,
        kind=int,
        metavar="N",
        text="How many of these are drawn, by seed.",
        said="as merge --num-samples",
        low=1,
    )


@dataclass(frozen=True, kw_only=True)
class DemoRequest(MatchOptions, RoundOptions, RepairOptions, WriteOptions):
    """Fuse the bundled pair of digit classifiers and measure what comes out."""


def normalised(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
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
