"""What each command is asked to do: one frozen request per verb, and the recipe it resolves to.

Torch-free, so that the command line can build a request before anything heavy is imported. An
option that is None was not given; `FusionOptions.recipe` fills it from `--paper` or the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import UsageError
from .recipe import CHOICES, Recipe, require_seed

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
    "InspectRequest",
    "MergeRequest",
    "OutputOptions",
    "PruneFuseRequest",
    "PruneRequest",
    "Recipe",
    "SampleSource",
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


# Most groups of options are bases only: without methods of their own, `otfuse --help` is faster.
@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class FusionOptions:
    """Options that `merge`, `prune-fuse` and `inspect --ot-costs` share. None: not given."""

    arch: ArchSource = "auto"
    free_outputs: bool = False
    key: Key | None = None
    strict: bool = True
    vocab: str = "refuse"
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
    post_activations: bool | None = None
    samples: SampleSource | None = None
    synthetic: bool = False
    synthetic_kind: str = "auto"
    input_shape: tuple[int, ...] | None = None
    num_samples: int | None = None
    max_memory: float | None = None
    pass_memory: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require_inputs(self.num_samples)
        _require_memory("--pass-memory", self.pass_memory)
        if self.max_memory is not None:
            _require_memory("--max-memory", self.max_memory)
        others = getattr(super(), "__post_init__", None)
        if others is not None:
            others()

    def recipe(self) -> Recipe:
        """Given options over those of `--paper` over the defaults.

        Raises:
            UsageError: A value outside its choices or range.
        """
        _require_choice("vocab", self.vocab)
        preset = dict(_PAPER) if self.paper else {}
        for field in fields(Recipe):
            given = getattr(self, field.name)
            if given is not None:
                preset[field.name] = given
        if preset.get("align") == "none":
            preset.setdefault("repair", "none")
        return Recipe(**preset)


@dataclass(frozen=True, kw_only=True)
class ImproveOptions(FusionOptions):
    """What is done with the average when there are inputs. `refit` None: when there are any.

    `blend` None: `auto` when there are any. Nothing is written with `require_proof` unless a
    network was run and kept its function, with `require_gain` unless the anchor is no better.
    """

    require_proof: bool = False
    refit: bool | None = None
    force: bool = False
    ridge: float = 0.1
    blend: str | None = None
    require_gain: bool = False
    calibrate: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_ridge(self.ridge)
        for name in ("calibrate", "blend"):
            value = getattr(self, name)
            if value is not None and value not in CHOICES[name]:
                raise UsageError(
                    f"unknown value {value!r}",
                    where=f"--{name}",
                    fix=f"use one of: {', '.join(CHOICES[name])}",
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
class OutputOptions:
    """Where results go. `report` None: beside the output; `-`: standard output, no file.

    `shard_size` is for folders (`5GB`).
    """

    output: Path | None = None
    report: Path | None = None
    overwrite: bool = False
    keep_extras: bool = False
    shard_size: str | None = None
    dtype: Literal["keep", "float32", "float64", "float16", "bfloat16"] = "keep"

    def __post_init__(self) -> None:
        _require_choice("dtype", self.dtype)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AverageOptions(OutputOptions):
    """What is averaged, by patterns of tensor names, and where the average goes."""

    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MergeRequest(ImproveOptions, AverageOptions):
    """Fuse `checkpoints` (two or more) with `weights` into the anchor's shape.

    `weights` may be given by tensor: patterns of names to a weight per checkpoint.
    """

    checkpoints: tuple[Source, ...]
    weights: tuple[float, ...] | Mapping[str, Sequence[float]] | None = None
    anchor: str = "last"
    untie: bool = False


@dataclass(frozen=True, kw_only=True)
class PruneFuseRequest(ImproveOptions, AverageOptions):
    """Fuse `dense` into its pruned version, which is the anchor.

    `dense_weight` None: 0.7 where every unit of `pruned` is one of `dense`, otherwise 0.5.
    """

    dense: Source
    pruned: Source
    dense_weight: float | None = None
    keep_shape: bool = False

    def recipe(self) -> Recipe:
        """As for `merge`, but the dense network counts in full: the pruned one is made of it."""
        if self.scale is None and not self.paper:
            return replace(self, scale="preserve").recipe()
        return super().recipe()


@dataclass(frozen=True, kw_only=True)
class PruneRequest(OutputOptions):
    """Remove units of `checkpoint`: the share `amount`, or shares by name (`layer`).

    Inputs, and what is done with them, are for `criterion="reconstruct"`.
    """

    checkpoint: Source
    amount: float | None = None
    criterion: str = "l1"
    only: tuple[str, ...] = ()
    layer: Mapping[str, float] | None = None
    arch: ArchSource = "auto"
    require_proof: bool = False
    key: Key | None = None
    device: str = "auto"
    samples: SampleSource | None = None
    synthetic: bool = False
    synthetic_kind: str = "auto"
    input_shape: tuple[int, ...] | None = None
    num_samples: int | None = None
    ridge: float = 0.1
    force: bool = False
    pass_memory: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seed(self.seed)
        _require_inputs(self.num_samples)
        _require_memory("--pass-memory", self.pass_memory)
        _require_choice("criterion", self.criterion)
        _require_ridge(self.ridge)

    def inputs(self) -> ImproveOptions:
        """Which inputs, and how layers are fitted on them, as a fusion takes it."""
        shared = {field.name for field in fields(ImproveOptions)}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name in shared}
        return ImproveOptions(**own, blend="joint")


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
    max_moved: float | None = None
    plot: Path | None = None
    report: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.max_cost
        if limit is not None and not (isfinite(limit) and limit >= 0):
            raise UsageError("a cost is finite and not negative", where=f"--max-cost {limit}")
        limit = self.max_moved
        if limit is not None and not 0 <= limit <= 1:
            raise UsageError("a fraction lies between 0 and 1", where=f"--max-moved {limit}")

    @property
    def costs(self) -> bool:
        """Whether anything that was asked for needs OT costs: inputs serve nothing else."""
        wanted = (self.max_cost, self.max_moved, self.plot, self.samples)
        asked = self.ot_costs or self.synthetic or self.align == "acts"
        return asked or any(option is not None for option in wanted)


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """Prove a layer graph on the module of `arch`: the traced one, or the one that `spec` says."""

    checkpoint: Source
    arch: ArchSource
    spec: str | None = None
    free_outputs: bool = False
    key: Key | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_seed(self.seed)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MeasureOptions:
    """What networks are measured on, and how. `num_samples` None: all."""

    samples: SampleSource
    num_samples: int | None = None
    batch: int = 250

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError("at least one is needed", where=f"{flag} {value}")
        others = getattr(super(), "__post_init__", None)
        if others is not None:
            others()


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(MeasureOptions):
    """Measure `checkpoints`; on request their ensemble and their plain average as well."""

    checkpoints: tuple[Source, ...]
    ensemble: bool = False
    average: bool = False
    arch: ArchSource = "auto"
    key: Key | None = None
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class CurveRequest(MeasureOptions, FusionOptions):
    """Measure two checkpoints and what lies between them, plainly averaged and fused."""

    checkpoints: tuple[Source, ...]
    steps: int = 11
    untie: bool = False
    plot: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 2:
            raise UsageError(
                "a curve has two ends", where=f"--steps {self.steps}", fix="use 2 or more"
            )


@dataclass(frozen=True, kw_only=True)
class DemoRequest(ImproveOptions, OutputOptions):
    """Fuse the bundled pair of digit classifiers and measure what comes out."""


def _require_inputs(number: int | None) -> None:
    if number is not None and number < 1:
        raise UsageError("at least one sample is needed", where=f"--num-samples {number}")


def _require_memory(option: str, memory: float) -> None:
    if not (isfinite(memory) and memory >= 0):
        raise UsageError("memory is finite and not negative", where=f"{option} {memory}")


def _require_ridge(ridge: float) -> None:
    if not (isfinite(ridge) and ridge >= 0):
        raise UsageError("a ridge is finite and not negative", where=f"--ridge {ridge}")


def _require_choice(name: str, value: str) -> None:
    if value not in CHOICES[name]:
        raise UsageError(
            f"unknown value {value!r}",
            where=f"--{name}",
            fix=f"use one of: {', '.join(CHOICES[name])}",
        )


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
