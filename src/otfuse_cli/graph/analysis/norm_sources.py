"""Which rows make the units that a BatchNorm normalises.

Followed back through whatever hands units on one by one: activations that pass positive factors,
pooling, sums, concatenation. Anything else on the way, and what is read is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..axes import Axis, Cat
from ..model import LayerGraph, Op, OpKind, Role

# Activations that positive factors pass through, as a trace and a spec call them.
_HOMOGENEOUS = frozenset({"relu", "relu_", "leaky_relu", "leaky_relu_", "rrelu_with_noise"})
_POOLS = frozenset({"max_pool", "avg_pool"})

# A tensor and the axis along which its rows make units; a norm's gain is a row of one number.
RowsOf = tuple[str, int]


@dataclass(frozen=True)
class Feed:
    """What makes some units that a norm reads.

    Attributes:
        axis: These units' part of the axis of the norm's tensors.
        rows: Tensors whose rows add up to them; none where that is not known.
    """

    axis: Axis
    rows: tuple[RowsOf, ...]


def norm_feeds(graph: LayerGraph, at: int) -> tuple[Feed, ...]:
    """What makes the units that the norm `graph.ops[at]` reads, part by part of its axis."""
    read = graph.ops[at].reads[0]
    return tuple(Feed(part, _rows(graph, at, 0, part) or ()) for part in _parts(read))


def is_normed(graph: LayerGraph, at: int) -> bool:
    """Whether a norm reads exactly what the layer `graph.ops[at]` writes."""
    op = graph.ops[at]
    beside = graph.ops[at + 1 : at + 2]
    readers = [o for o in graph.ops if o.inputs == ((at,),)] if op.inputs else []
    # A spec gives no data flow: there the operation behind a layer is what reads it.
    return any(o.kind is OpKind.NORM and o.reads == (op.writes,) for o in (*beside, *readers))


def weight_rows(graph: LayerGraph, op: Op) -> RowsOf | None:
    """The weight of a layer and the axis that makes its units, a row for each.

    None for a grouped transposed convolution: its groups are on the axis that it reads.
    """
    if op.kind not in (OpKind.LINEAR, OpKind.CONV):
        return None
    for name in op.tensors.values():
        node = graph.tensors[name]
        if len(node.axes) > 1:
            for dim, axis in enumerate(node.axes):
                if Role.PRODUCE in axis.roles:
                    return (name, dim) if axis.expr == op.writes else None
    return None


def _rows(graph: LayerGraph, at: int, read: int, part: Axis) -> tuple[RowsOf, ...] | None:
    """Rows that make `part` of what operation `at` reads."""
    makers: list[int] = []
    for maker in _before(graph, at, read):
        axis = graph.ops[maker].writes
        if axis is not None and part in _parts(axis):
            makers.append(maker)
    if len(makers) != 1:  # units of two makers side by side are parts of their own
        return None
    op = graph.ops[makers[0]]
    if op.kind is OpKind.ADD:
        rows: dict[RowsOf, None] = {}  # a set that keeps the order
        for summand in range(len(op.reads)):
            summand_rows = _rows(graph, makers[0], summand, part)
            if summand_rows is None:
                return None
            rows.update(dict.fromkeys(summand_rows))
        return tuple(rows)
    if _hands_on(op):
        return _rows(graph, makers[0], 0, part)
    made = (op.tensors["weight"], 0) if _gains(op) else weight_rows(graph, op)
    if made is None or graph.tensors[made[0]].axes[made[1]].expr != part:
        return None
    return (made,)


def _before(graph: LayerGraph, at: int, read: int) -> Sequence[int]:
    """Operations that a read is put together from; the one before where nothing says which."""
    op = graph.ops[at]
    if op.inputs:
        return op.inputs[read]
    follows = at > 0 and len(op.reads) == 1 and graph.ops[at - 1].writes == op.reads[0]
    return (at - 1,) if follows else ()


def _hands_on(op: Op) -> bool:
    """Whether every unit is made of that unit alone, and of a multiple of it a multiple."""
    passes = (op.kind is OpKind.ACT and op.detail in _HOMOGENEOUS) or (
        op.kind is OpKind.OTHER and op.detail in _POOLS
    )
    return passes and not op.tensors and op.reads[:1] == (op.writes,)


def _gains(op: Op) -> bool:
    return op.kind is OpKind.NORM and op.detail == "batch" and "weight" in op.tensors


def _parts(axis: Axis) -> tuple[Axis, ...]:
    return axis.parts if isinstance(axis, Cat) else (axis,)
