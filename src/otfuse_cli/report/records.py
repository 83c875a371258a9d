"""The report: what a command did, as one frozen value (`otfuse.report/1`, docs/report.md).

Commands return it, the renderer prints it, `--json` and the report file hold it. Nothing of ours
may be imported here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA = "otfuse.report/1"
ENVELOPE = "otfuse.envelope/1"


@dataclass(frozen=True)
class FileRecord:
    """One checkpoint read or written. `dtypes` counts tensors by dtype; `sha256` of the file."""

    path: str
    sha256: str | None
    container: str
    tensors: int
    parameters: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True)
class SpaceRecord:
    """What transport did to one space of one source (`source` counts the checkpoints from 0).

    `sizes` is [source, anchor]; `ot_cost` is `<plan, producer cost>`; `identity_cost` and
    `moved_fraction` are null for unequal sizes; `random_cost`, the mean over random maps, is
    null where it was not asked for.
    """

    id: str
    source: int
    sizes: tuple[int, int]
    tensors: tuple[str, ...]
    ot_cost: float | None
    identity_cost: float | None
    moved_fraction: float | None
    solver: str
    marginal_error: float
    random_cost: float | None = None


@dataclass(frozen=True)
class LayerRecord:
    """OT cost of one layer: its space's plan against the layer's own rows.

    For an output layer the plan is the one that would be solved, diagnostic only, and
    `diagonal_mass` is its trace over its sum; otherwise null.
    """

    name: str
    source: int
    ot_cost: float | None
    identity_cost: float | None
    diagonal_mass: float | None = None
    random_cost: float | None = None
    moved_fraction: float | None = None


@dataclass(frozen=True)
class Pinned:
    """An axis that stays in place, and why."""

    axis: str
    reason: str


@dataclass(frozen=True)
class GraphRecord:
    """The layer graph in short: where it comes from, free spaces and their sizes, pins."""

    source: str
    spaces: Mapping[str, int]
    pinned: tuple[Pinned, ...]


@dataclass(frozen=True)
class AxisRecord:
    """One axis of a tensor: its expression, the spaces in it, and the roles it plays."""

    expr: str
    spaces: tuple[str, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the anchor; `axes` is null where there is no layer graph."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[AxisRecord, ...] | None


@dataclass(frozen=True)
class Candidate:
    """One alignment that was tried for one source."""

    name: str
    source: int
    objective: float | None
    agreement: float | None
    flop: float
    chosen: bool


@dataclass(frozen=True)
class StepRecord:
    """What the fused model is worth after a step, on the inputs of the fusion.

    `agreement` with the parents' ensemble, 0 to 1; `accuracy` in percent, null without labels. A
    step that was not kept left the model as it was.
    """

    name: str
    agreement: float
    accuracy: float | None
    kept: bool


@dataclass(frozen=True)
class RefitRecord:
    """How far a layer misses its target, relative to it: before and after its fit."""

    layer: str
    before: float
    after: float


@dataclass(frozen=True)
class Difference:
    """One difference of a checkpoint (`source`) from the anchor.

    `kind`: a tensor `missing` or `extra` there, another number of `axes`, a `size` that no width
    of the network explains; `width` (units of a space, in place of shapes) and `dtype` are allowed.
    """

    source: int
    kind: str
    name: str
    shape: tuple[int, ...] | None
    anchor_shape: tuple[int, ...] | None
    reason: str | None = None


@dataclass(frozen=True)
class Pair:
    """Costs of aligning one checkpoint to another, summed over spaces; the spaces in full.

    `identity_cost` and `moved_fraction` (of all units) are null for unequal sizes.
    """

    source: int
    anchor: int
    ot_cost: float
    identity_cost: float | None
    random_cost: float | None
    moved_fraction: float | None
    spaces: tuple[SpaceRecord, ...]


@dataclass(frozen=True)
class Estimate:
    """What a merge of the inputs would take; counted from shapes, nothing is timed.

    `memory_bytes` comes on top of the program itself: `tensor_bytes` (the largest pair of layers,
    with their copies), `cost_bytes` (costs and plans in flight), `kept_bytes` (tensors kept
    between steps). `flop` is what the default matcher plans within `effort`; `steps` has every
    search by name, those in `skipped` don't fit.
    """

    memory_bytes: int
    tensor_bytes: int
    cost_bytes: int
    kept_bytes: int
    flop: float
    effort: float
    steps: Mapping[str, float]
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Checks:
    """Do the aligned sources compute what they computed?

    `function`: `kept` where a network of the user's or of a library's was run and said so;
    `assumed` where names and shapes are all there is, with the `assumption` in words; `failed`;
    null where nothing was aligned or nothing could be run. Largest relative error of the outputs.
    """

    function: Literal["kept", "assumed", "failed"] | None = None
    max_error: float | None = None
    assumption: str | None = None


@dataclass(frozen=True)
class PrunedSpace:
    """Units of a space before and after; `survivors`: those of them found again (prune-fuse)."""

    id: str
    units: int
    kept: int
    survivors: int | None = None


@dataclass(frozen=True)
class PrunedLayer:
    """Parameters of a module before and after; `sparsity` is the share that went."""

    name: str
    parameters: int
    kept: int
    sparsity: float


@dataclass(frozen=True)
class Pruning:
    """What was pruned, by `prune` or before `prune-fuse`; `advice`: what else has to change."""

    criterion: str | None
    parameters: int
    kept: int
    sparsity: float
    spaces: tuple[PrunedSpace, ...]
    layers: tuple[PrunedLayer, ...]
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything a command has to say. Two runs differ only in `timings` and `peak_rss_bytes`."""

    command: str
    version: str
    inputs: tuple[FileRecord, ...] = ()
    output: tuple[FileRecord, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[TensorRecord, ...] = ()
    graph: GraphRecord | None = None
    spaces: tuple[SpaceRecord, ...] = ()
    layers: tuple[LayerRecord, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    differences: tuple[Difference, ...] = ()
    pairs: tuple[Pair, ...] = ()
    estimate: Estimate | None = None
    checks: Checks = field(default_factory=Checks)
    yardsticks: tuple[StepRecord, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    refits: tuple[RefitRecord, ...] = ()
    pruning: Pruning | None = None
    evaluation: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    peak_rss_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, `schema` first."""
        return {"schema": SCHEMA, **_plain(asdict(self))}

    def to_json(self) -> str:
        """The report as indented JSON text with a final newline; never NaN."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Paths to strings, tuples to lists, the rest as it is."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value
