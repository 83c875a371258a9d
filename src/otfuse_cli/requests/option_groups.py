"""Options that several verbs share, in the groups that requests are composed of.

None: not given. Torch-free, so that the command line can build a request before anything heavy is
imported. Groups are bases only: without methods of their own, `otfuse --help` is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output_names import DEFAULT_SHARD
from .option import (
    FUSION,
    INPUTS,
    OUTPUT,
    Options,
    choice,
    needed,
    option,
    switch,
    unset,
)
from .recipe import CHOICES, Recipe

if TYPE_CHECKING:
    import torch

    StateDict = Mapping[str, torch.Tensor]
else:
    StateDict = Mapping

Source = str | Path | StateDict
# A file, `file.py:loader`, or in memory: inputs, (inputs, labels), or a mapping of names to arrays.
SampleSource = Any

# `--arch`: a name, or from Python a factory or a module; for all, or by the checkpoint's position
# (texts `INDEX=SPEC`, or a mapping).
ArchSource = Any
# An entry's name for all checkpoints, or by position: `ema`, `1=ema`, several, or a mapping.
Key = str | Sequence[str] | Mapping[int, str]

PAPER: Mapping[str, Any] = {
    "align": "wts",
    "matcher": "sweep",
    "metric": "euclidean",
    "unit_norm": True,
    "mass": "uniform",
    "solver": "exact",
    "epsilon_unit": "cost",
    "residual": "average",
    "beta": 0.5,
    "scale": "paper",
    "passes": 1,
    "iterate": 0,
    "repair": "none",
}


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SeedOptions(Options):
    """What decides everything random."""

    seed: int = unset(Recipe, "seed", 0)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ComputeOptions(SeedOptions):
    """Where numerics run."""

    device: str = option(
        "auto",
        "--device",
        metavar="auto|cpu|cuda",
        text="Where numerics run; cuda:1 names a device.",
        common=True,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class NetworkOptions(Options):
    """What the network is, and where in a file its weights are."""

    arch: ArchSource = option(
        "auto",
        "--arch",
        panel=INPUTS,
        metavar="[INDEX=]SPEC",
        text="What the network looks like: auto (of a library that is installed, else by names and "
        "shapes), a family, spec.yaml, or the network itself: file.py:factory (runs that code), "
        "graph.pt2, hf:DIR. INDEX=SPEC, repeatable, for one checkpoint, counted from 0.",
        several=True,
        common=True,
    )
    key: Key | None = option(
        None,
        "--key",
        panel=INPUTS,
        metavar="[INDEX=]NAME",
        text="The entry to take of checkpoints that hold several models, or of the one at INDEX "
        "(from 0); repeatable.",
        several=True,
        common=True,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class GraphOptions(Options):
    """How a traced graph is read."""

    free_outputs: bool = switch(
        False,
        "--free-outputs",
        panel=INPUTS,
        text="Let the units of a traced network's outputs move: headless backbones.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class PairOptions(Options):
    """How far checkpoints may differ."""

    strict: bool = switch(
        True,
        "--strict/--no-strict",
        panel=INPUTS,
        text="Refuse checkpoints that hold different tensors, or keep what the anchor alone has "
        "and drop what it lacks.",
        said="strict",
    )
    vocab: str = choice(
        "refuse",
        "--vocab",
        CHOICES["vocab"],
        panel=INPUTS,
        text="Different vocabularies or classes: an error, average the rows that all have, or "
        "keep the anchor's.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class InputOptions(Options):
    """What networks are run on, to fuse them."""

    samples: SampleSource | None = option(
        None,
        "--samples",
        panel=INPUTS,
        metavar="FILE",
        text="Inputs x, and labels y where something is measured: .npz, .npy, .safetensors, .pt, "
        "or file.py:loader (runs that code). --arch must name a network to run.",
        common=True,
    )
    synthetic: bool = switch(
        False,
        "--synthetic",
        panel=INPUTS,
        text="Make inputs up: images of overlapping shapes, rows of first layers, token ids.",
        common=True,
    )
    synthetic_kind: str = option(
        "auto",
        "--synthetic-kind",
        panel=INPUTS,
        metavar="auto|leaves|noise|rows|tokens|class|statistics|balanced",
        text="What is made up; several are joined by +.",
    )
    synthetic_steps: int | None = option(
        None,
        "--synthetic-steps",
        panel=INPUTS,
        kind=int,
        metavar="N",
        text="Kinds statistics and class: gradient steps on every input.",
        said="20 of kind statistics, 12 of kind class",
        low=1,
    )
    input_shape: tuple[int, ...] | None = option(
        None,
        "--input-shape",
        panel=INPUTS,
        metavar="N,N...",
        text="Shape of one synthetic input: the image (1,28,28) that a vector was, say.",
    )
    num_samples: int | None = option(
        None,
        "--num-samples",
        panel=INPUTS,
        kind=int,
        metavar="N",
        text="How many inputs are drawn, by seed.",
        said="400, 2000 synthetic ones, 1000 of kind statistics, 900 of kind class, all to "
        "measure on",
        low=1,
        common=True,
    )
    pass_memory: float = option(
        4.0,
        "--pass-memory",
        kind=float,
        metavar="GIB",
        text="With inputs: memory for what networks hold between two layers; above it they run "
        "again for every layer.",
        low=0,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class FitOptions(Options):
    """How layers are fitted on inputs, and what has to be proven."""

    ridge: float = option(
        0.1,
        "--ridge",
        panel=FUSION,
        kind=float,
        metavar="R",
        text="How strongly a fit is pulled toward the average.",
        low=0,
    )
    force: bool = switch(
        False, "--force", panel=INPUTS, text="Refit with fewer than 25 inputs too."
    )
    require_proof: bool = switch(
        False,
        "--require-proof",
        text="Exit with 7, and write nothing, unless a network that --arch names was run and kept "
        "its function; names and shapes alone prove nothing.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RepairOptions(Options):
    """What is done with an average, from the weights alone."""

    repair: str | None = unset(Recipe, "repair")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RoundOptions(Options):
    """How often models are matched once more, to the mean of others or of all."""

    passes: int | None = unset(Recipe, "passes")
    iterate: int | None = unset(Recipe, "iterate")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MatchOptions(ComputeOptions):
    """How units are matched: the recipe's options, `--paper` for all of them."""

    align: str | None = unset(Recipe, "align")
    paper: bool = switch(
        False,
        "--paper",
        panel=FUSION,
        text="Exactly the method of Singh & Jaggi (2020); options given beside it win.",
    )
    residual: str | None = unset(Recipe, "residual")
    beta: float | None = unset(Recipe, "beta")
    scale: str | None = unset(Recipe, "scale")
    matcher: str | None = unset(Recipe, "matcher")
    effort: float | None = unset(Recipe, "effort")
    metric: str | None = unset(Recipe, "metric")
    unit_norm: bool | None = unset(Recipe, "unit_norm")
    mass: str | None = unset(Recipe, "mass")
    solver: str | None = unset(Recipe, "solver")
    epsilon: float | None = unset(Recipe, "epsilon")
    epsilon_unit: str | None = unset(Recipe, "epsilon_unit")

    def recipe(self) -> Recipe:
        """Given options over those of `--paper` over the defaults.

        Raises:
            UsageError: A value outside its choices or range.
        """
        preset = dict(PAPER) if self.paper else {}
        for item in fields(Recipe):
            given = getattr(self, item.name, None)
            if given is not None:
                preset[item.name] = given
        if preset.get("align") == "none":
            preset.setdefault("repair", "none")
        return Recipe(**preset)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class FusionOptions(MatchOptions, InputOptions, PairOptions, GraphOptions, NetworkOptions):
    """Options that `merge`, `prune-fuse` and `inspect --ot-costs` share."""

    post_activations: bool | None = unset(Recipe, "post_activations")
    max_memory: float | None = option(
        None,
        "--max-memory",
        kind=float,
        metavar="GIB",
        text="Refuse a merge whose matching needs more memory, before it begins.",
        said="no limit",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class ImproveOptions(FusionOptions, RoundOptions, RepairOptions, FitOptions):
    """What is done with the average when there are inputs. `refit` None: when there are any.

    `blend` None: `auto` when there are any. Nothing is written with `require_proof` unless a
    network was run and kept its function, with `require_gain` unless the anchor is no better.
    """

    refit: bool | None = switch(
        None,
        "--refit/--no-refit",
        panel=FUSION,
        text="Fit every layer of the average, in closed form, to what the parents compute on the "
        "inputs.",
        said="refit when there are inputs",
    )
    blend: str | None = choice(
        None,
        "--blend",
        CHOICES["blend"],
        panel=FUSION,
        text="With inputs: fit the average of matched units; keep the best units of all parents "
        "(joint); the anchor with another output layer (head) or with some units of the others "
        "(graft); auto: what agrees most with the parents.",
        said="auto with inputs",
        common=True,
    )
    require_gain: bool = switch(
        False,
        "--require-gain",
        panel=FUSION,
        text="Write nothing (exit 7) where the anchor alone is better on the inputs, by more than "
        "chance.",
    )
    calibrate: str | None = choice(
        None,
        "--calibrate",
        CHOICES["calibrate"],
        panel=FUSION,
        text="Bring BatchNorm statistics (bn) or every layer's mean and deviation (repair) to "
        "where they belong on the inputs; kept if agreement with the parents rises.",
        said="auto with inputs and without a refit",
    )

    cluster: str | None = option(
        None,
        "--cluster",
        metavar="auto|ray://HOST:PORT",
        text="Let a Ray cluster match sources, run networks and average: one that is named, or "
        "auto, the one of RAY_ADDRESS or of this machine, else one that is started here for the "
        "command. The result is the same.",
        said="none",
    )

    @property
    def has_inputs(self) -> bool:
        """Whether there is anything to run networks on."""
        return self.samples is not None or self.synthetic

    @property
    def refits(self) -> bool:
        """Whether layers are fitted."""
        if self.refit is not None:
            return self.refit and self.has_inputs
        return self.has_inputs and not self.paper and self.align != "none"

    @property
    def blending(self) -> str:
        """How parents become one: `--blend`, or what it stands for."""
        return self.blend or ("auto" if self.refits else "average")

    @property
    def calibration(self) -> str:
        """How statistics are brought to where they belong: `--calibrate`, or what it stands for."""
        if self.calibrate is not None:
            return self.calibrate
        plain = self.refits or self.paper or self.align == "none"
        return "auto" if self.has_inputs and not plain else "none"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class OverwriteOptions(Options):
    """What happens to outputs that are there."""

    overwrite: bool = switch(
        False, "--overwrite", panel=OUTPUT, text="Replace an output that exists.", common=True
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class WriteOptions(OverwriteOptions):
    """Where results go. `report` None: beside the output; `-`: standard output, no file."""

    output: Path | None = option(
        None,
        "--output",
        "-o",
        panel=OUTPUT,
        kind=Path,
        metavar="OUT",
        text="Where the new checkpoint goes; the suffix decides the format, without one it is a "
        "folder.",
        common=True,
    )
    report: Path | None = option(
        None,
        "--report",
        panel=OUTPUT,
        kind=Path,
        metavar="PATH",
        text="Where the report goes; - for standard output, in place of text.",
        said="OUT with suffix .report.json; inspect: nowhere",
    )
    dtype: str = choice(
        "keep", "--dtype", CHOICES["dtype"], panel=OUTPUT, text="Stored dtype of floating tensors."
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class OutputOptions(WriteOptions):
    """How results are written. `shard_size` is for folders (`5GB`)."""

    keep_extras: bool = switch(
        False,
        "--keep-extras",
        panel=OUTPUT,
        text="Carry over what lies beside the weights in the anchor's file (.pt only).",
    )
    shard_size: str | None = option(
        None,
        "--shard-size",
        panel=OUTPUT,
        metavar="SIZE",
        text="Most bytes in a file of an output folder: 500MB, 2GiB.",
        said=DEFAULT_SHARD,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AverageOptions(OutputOptions):
    """What is averaged, by patterns of tensor names, and where the average goes."""

    skip: tuple[str, ...] = option(
        (),
        "--skip",
        panel=FUSION,
        metavar="GLOB",
        text="Tensors to take from the anchor as they are, instead of averaging; repeatable.",
        several=True,
    )
    only: tuple[str, ...] = option(
        (),
        "--only",
        panel=FUSION,
        metavar="GLOB",
        text="Average these tensors alone; the others are the anchor's; repeatable.",
        several=True,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class UntieOptions(Options):
    """Whether tied embeddings stay tied."""

    untie: bool = switch(
        False,
        "--untie",
        panel=INPUTS,
        text="Give an output layer that is tied to the embedding a weight of its own: a copy, "
        "which is then fused as an output layer.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class WidthOptions(Options):
    """How wide the result of joint fusion is, where it is not as wide as the anchor."""

    width: float | None = option(
        None,
        "--width",
        panel=FUSION,
        kind=float,
        metavar="F",
        text="Joint fusion into a network F times as wide as the anchor: up to the number of "
        "checkpoints, where it is the mean of their logits, without inputs too. Other kinds of "
        "--blend have the anchor's widths.",
        said="the anchor's",
        low=0,
        above=True,
        common=True,
    )
    layer: Mapping[str, float] | None = option(
        None,
        "--layer",
        panel=FUSION,
        metavar="NAME=F",
        text="A width of its own for the units of a module, tensor or space; may be repeated.",
        several=True,
    )
    width_multiple: int | None = option(
        None,
        "--width-multiple",
        panel=FUSION,
        kind=int,
        metavar="N",
        text="With --width: numbers of units are made multiples of N.",
        low=1,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AnchorOptions(Options):
    """Whom the others are aligned to."""

    anchor: str = option(
        "last",
        "--anchor",
        panel=FUSION,
        metavar="last|first|medoid|INDEX",
        text="The checkpoint that gives widths and file format, and that the others are aligned "
        "to; INDEX counts from 0, medoid is the one nearest to all others.",
        common=True,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class PlotOptions(OverwriteOptions):
    """A picture of what was found."""

    plot: Path | None = option(
        None,
        "--plot",
        panel=OUTPUT,
        kind=Path,
        metavar="FILE.png|svg|html",
        text="Draw what was found, costs with transport maps or curves; html needs no more.",
        common=True,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MeasureOptions(Options):
    """What networks are measured on, and how. `num_samples` None: all."""

    samples: SampleSource = needed(InputOptions, "samples")
    num_samples: int | None = unset(InputOptions, "num_samples")
    batch: int = option(
        250,
        "--batch",
        kind=int,
        metavar="N",
        text="Samples that the network takes at a time.",
        low=1,
        common=True,
    )
