"""The report: what a command did, as one frozen value (`otfuse.report/1`, docs/report.md).

Commands return it, the renderer prints it, `--json` and the report file hold it. The reader of
stored reports (`files`) and the JSON Schema (`schema`) are derived from these types. Nothing of
ours but the choices of options may be imported here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from ..requests.recipe import CHOICES
from .value_types import (
    Amount,
    Command,
    Count,
    Digest,
    Number,
    Percent,
    Positive,
    Share,
    Sparsity,
    promise,
)

SCHEMA = "otfuse.report/1"
ENVELOPE = "otfuse.envelope/1"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the report: a frozen value, compared and shown by its fields."""

    def replace(self, **changes: Any) -> Self:
        """The same record with other values in the fields that `changes` names."""
        return msgspec.structs.replace(self, **changes)


class FileRecord(Record, frozen=True):
    """One checkpoint read or written.

    `dtypes` counts tensors by dtype; `sha256` is null where the file was not read whole.
    """

    path: str
    sha256: Digest | None
    container: str
    tensors: Count
    parameters: Count
    dtypes: Mapping[str, Positive]


class SpaceRecord(Record, frozen=True):
    """What transport did to one space of one source (`source` counts the checkpoints from 0).

    `ot_cost` is `<plan, producer cost>`; `identity_cost` and `moved_fraction` are null for unequal
    sizes; `random_cost`, the mean over random maps, is null where it was not asked for.
    """

    id: str
    source: Count
    sizes: Annotated[tuple[Count, Count], promise("Source, anchor.")]
    tensors: tuple[str, ...]
    ot_cost: Amount | None
    identity_cost: Amount | None
    moved_fraction: Share | None
    solver: str
    marginal_error: Amount
    random_cost: Amount | None = None


class LayerRecord(Record, frozen=True):
    """OT cost of one layer: its space's plan against the layer's own rows.

    For an output layer the plan is the one that would be solved, diagnostic only, and
    `diagonal_mass` is its trace over its sum; otherwise null.
    """

    name: str
    source: Count
    ot_cost: Amount | None
    identity_cost: Amount | None
    diagonal_mass: Share | None = None
    random_cost: Amount | None = None
    moved_fraction: Share | None = None


class Pinned(Record, frozen=True):
    """An axis that stays in place, and why."""

    axis: str
    reason: str


class GraphRecord(Record, frozen=True, forbid_unknown_fields=False):
    """The layer graph in short: where it comes from, free spaces and their sizes, pins.

    `matched` is the share of parameters in tensors with units that may move.
    """

    source: str
    spaces: Mapping[str, Count]
    pinned: tuple[Pinned, ...]
    matched: Share | None = None


class AxisRecord(Record, frozen=True, forbid_unknown_fields=False):
    """One axis of a tensor: its expression, the spaces in it, and the roles it plays."""

    expr: str
    spaces: tuple[str, ...]
    roles: tuple[str, ...]


class TensorRecord(Record, frozen=True, forbid_unknown_fields=False):
    """A tensor of the anchor; `axes` is null where there is no layer graph."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    axes: tuple[AxisRecord, ...] | None


class Candidate(Record, frozen=True):
    """One alignment that was tried for one source."""

    name: str
    source: Count
    objective: Number | None
    agreement: Share | None
    flop: Amount
    chosen: bool


class StepRecord(Record, frozen=True):
    """What the fused model is worth after a step, on the inputs of the fusion.

    `agreement` with the parents' ensemble, 0 to 1; `accuracy` in percent, null without labels. A
    step that was not kept left the model as it was.
    """

    name: str
    agreement: Share
    accuracy: Percent | None
    kept: bool


class RefitRecord(Record, frozen=True):
    """How far a layer misses its target, relative to it: before and after its fit."""

    layer: str
    before: Amount
    after: Amount


class Difference(Record, frozen=True):
    """One difference of a checkpoint (`source`) from the anchor.

    `kind`: a tensor `missing` or `extra` there, another number of `axes`, a `size` that no width
    of the network explains; `width` (units of a space, in place of shapes) and `dtype` are allowed.
    """

    source: Count
    kind: Annotated[str, promise(enum=["missing", "extra", "axes", "size", "width", "dtype"])]
    name: str
    shape: tuple[Count, ...] | None
    anchor_shape: tuple[Count, ...] | None
    reason: str | None = None


class Pair(Record, frozen=True):
    """Costs of aligning one checkpoint to another, summed over spaces; the spaces in full.

    `identity_cost` and `moved_fraction` (of all units) are null for unequal sizes.
    """

    source: Count
    anchor: Count
    ot_cost: Amount
    identity_cost: Amount | None
    random_cost: Amount | None
    moved_fraction: Share | None
    spaces: tuple[SpaceRecord, ...]


class Estimate(Record, frozen=True):
    """What a merge of the inputs would take; counted from shapes, nothing is timed.

    `memory_bytes` comes on top of the program itself: `tensor_bytes` (the largest pair of layers,
    with their copies), `cost_bytes` (costs and plans in flight), `kept_bytes` (tensors kept
    between steps). `flop` is what the default matcher plans within `effort`; `steps` has every
    search by name, those in `skipped` don't fit.
    """

    memory_bytes: Count
    tensor_bytes: Count
    cost_bytes: Count
    kept_bytes: Count
    flop: Amount
    effort: Amount
    steps: Mapping[str, Amount]
    skipped: tuple[str, ...]


class Checks(Record, frozen=True):
    """Do the aligned sources compute what they computed?

    `function`: `kept` where a network of the user's or of a library's was run and said so;
    `assumed` where names and shapes are all there is, with the `assumption` in words; `failed`;
    null where nothing was aligned or nothing could be run. Largest relative error of the outputs.
    """

    function: Literal["kept", "assumed", "failed"] | None = None
    max_error: Amount | None = None
    assumption: str | None = None


class PrunedSpace(Record, frozen=True):
    """Units of a space before and after.

    `survivors`: units of the pruned network that are units of the dense one; null for `prune`.
    """

    id: str
    units: Positive
    kept: Positive
    survivors: Count | None = None


class PrunedLayer(Record, frozen=True):
    """Parameters of a module before and after; `sparsity` is the share that went."""

    name: str
    parameters: Count
    kept: Count
    sparsity: Sparsity


class RemovedBlock(Record, frozen=True):
    """A residual block that was removed, as the whole network names it.

    `miss`: how far the outputs are from those of the whole network without this block and those
    that were removed before it, after a fit on a few inputs: relative entropy of the classes, in
    nats (of outputs with one entry: squares, relative to their variance).
    """

    name: str
    miss: Amount


class Pruning(Record, frozen=True):
    """What was pruned, by `prune` or before `prune-fuse`; `advice`: what else has to change.

    `blocks`: those that `prune --depth` removed, in the order in which they went.
    """

    criterion: Annotated[str | None, promise(enum=[*CHOICES["criterion"], None])]
    parameters: Count
    kept: Count
    sparsity: Sparsity
    spaces: tuple[PrunedSpace, ...]
    layers: tuple[PrunedLayer, ...]
    advice: tuple[str, ...]
    blocks: tuple[RemovedBlock, ...] = ()


class WidenedSpace(Record, frozen=True):
    """Units of a space: the anchor's, those of all checkpoints together, the result's."""

    id: str
    anchor: Positive
    together: Positive
    units: Positive


class Widened(Record, frozen=True):
    """A result with widths of its own: parameters of the anchor, and of the result.

    `advice`: what has to change where the network is built.
    """

    anchor_parameters: Count
    parameters: Count
    spaces: tuple[WidenedSpace, ...]
    advice: tuple[str, ...]


class DepthPair(Record, frozen=True):
    """A place of the anchor and the one of a source that stands for it, by the layer before them.

    `cka`: how alike they are on the inputs (linear CKA, 0 to 1).
    """

    anchor_layer: str
    source_layer: str
    cka: Share


class RoundRecord(Record, frozen=True):
    """A round of `--iterate`; 0 is how models were aligned before the first.

    `spread`: what the aligned models lack on their mean, the sum over matched tensors of
    `w |aligned - mean|^2`. `moved`: units that got another place, of all units of all models.
    """

    round: Count
    spread: Amount
    moved: Share | None


class DepthRecord(Record, frozen=True):
    """What of a source of another depth stands for what of the anchor.

    `anchor_layers`, `source_layers` and `matrix` (a row for each of the anchor's): how alike all of
    them are, where `inspect --depth` asks for it; else empty.
    """

    source: Count
    pairs: tuple[DepthPair, ...]
    anchor_layers: tuple[str, ...] = ()
    source_layers: tuple[str, ...] = ()
    matrix: tuple[tuple[Share, ...], ...] = ()


Tensors = Annotated[
    tuple[TensorRecord, ...], promise("What inspect and check saw in the anchor; else empty.")
]
Pairs = Annotated[
    tuple[Pair, ...],
    promise("Every checkpoint to every other, where inspect compares more than two."),
]
Yardsticks = Annotated[
    tuple[StepRecord, ...],
    promise("What every parent is worth by itself, on the inputs of the fusion."),
]
Evaluation = Annotated[
    Mapping[str, Any],
    promise(
        "Plain values, and mappings of names to numbers.",
        additionalProperties={
            "anyOf": [
                {"type": ["string", "number", "boolean", "null"]},
                {"type": "object", "additionalProperties": {"type": ["number", "null"]}},
            ]
        },
    ),
]


# A newer release may add keys at the top: they are passed over. The tag is its key `schema`.
class Report(Record, frozen=True, forbid_unknown_fields=False, tag_field="schema", tag=SCHEMA):
    """Everything a command has to say. Two runs differ only in `timings` and `peak_rss_bytes`."""

    command: Command
    version: Annotated[str, promise("The otfuse that wrote this.")]
    inputs: tuple[FileRecord, ...] = ()
    output: tuple[FileRecord, ...] = ()
    recipe: Mapping[str, Any] = {}
    tensors: Tensors = ()
    graph: GraphRecord | None = None
    spaces: tuple[SpaceRecord, ...] = ()
    layers: tuple[LayerRecord, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    differences: tuple[Difference, ...] = ()
    pairs: Pairs = ()
    estimate: Estimate | None = None
    checks: Checks = msgspec.field(default_factory=Checks)
    yardsticks: Yardsticks = ()
    steps: tuple[StepRecord, ...] = ()
    refits: tuple[RefitRecord, ...] = ()
    depth: tuple[DepthRecord, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    pruning: Pruning | None = None
    widened: Widened | None = None
    evaluation: Evaluation | None = None
    warnings: tuple[str, ...] = ()
    timings: Annotated[Mapping[str, Amount], promise("Wall seconds by stage.")] = {}
    peak_rss_bytes: Count = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, `schema` first."""
        return {"schema": SCHEMA, **_plain(self)}

    def to_json(self) -> str:
        """The report as indented JSON text with a final newline; never NaN."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Records to objects, paths to strings, tuples to lists, the rest as it is."""
    if isinstance(value, Record):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value
