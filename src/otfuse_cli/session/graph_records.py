"""A layer graph and its tensors as the report holds them."""

from __future__ import annotations

from ..checkpoint.open import Checkpoint
from ..graph.axes import axis_units
from ..graph.model import LayerGraph, TensorAxis
from ..graph.sizes import matched_share
from ..report.records import AxisRecord, GraphRecord, Pinned, TensorRecord


def graph_record(graph: LayerGraph) -> GraphRecord:
    """The graph in short: free spaces with sizes, pinned axes with reasons."""
    pinned: dict[tuple[str, str], None] = {}  # in the order of the tensors, each once
    for tensor in graph.tensors.values():
        for dim, axis in enumerate(tensor.axes):
            for unit in axis_units(axis.expr):
                reason = graph.spaces[unit].pinned
                if reason is not None:
                    pinned[f"{tensor.name}:{dim}", reason] = None
    return GraphRecord(
        graph.source,
        {space.id: space.size for space in graph.free()},
        tuple(Pinned(axis, reason) for axis, reason in pinned),
        matched_share(graph),
    )


def tensor_records(checkpoint: Checkpoint, graph: LayerGraph | None) -> tuple[TensorRecord, ...]:
    """Every tensor of a checkpoint, with the meaning of its axes where a graph tells it."""
    records = []
    for name, info in checkpoint.infos.items():
        dtype = str(info.dtype).removeprefix("torch.")
        axes = None if graph is None else tuple(map(_axis_record, graph.tensors[name].axes))
        records.append(TensorRecord(name, info.shape, dtype, axes))
    return tuple(records)


def _axis_record(axis: TensorAxis) -> AxisRecord:
    units = dict.fromkeys(axis_units(axis.expr))
    return AxisRecord(str(axis.expr), tuple(units), tuple(sorted(axis.roles)))
