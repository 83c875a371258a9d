"""Attention layers of a traced graph: what makes queries, keys and values, and who reads the heads.

Names and sizes; no numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UsageError
from ..model import LayerGraph, OpKind, Role
from .blocks import AxisBlock, blocks


@dataclass(frozen=True)
class Projection:
    """What makes the queries, keys or values of all heads: a block of a weight and of its bias."""

    weight: AxisBlock
    bias: AxisBlock | None


@dataclass(frozen=True)
class Attention:
    """One attention layer.

    Attributes:
        heads: Space of its heads (of its key-value groups, where queries share them).
        queries: Queries and keys, in either order; their last factor is the head's inside.
        values: Values.
        output: The block of the output layer that reads the heads.
        output_bias: Its bias.
        key_bias: The bias of the keys, where softmax doesn't see it.
        turns: Whether any rotation inside a head's queries and keys keeps the function.
    """

    heads: str
    queries: tuple[Projection, Projection]
    values: Projection
    output: AxisBlock
    output_bias: str | None
    key_bias: str | None
    turns: bool


def attentions(graph: LayerGraph) -> tuple[Attention, ...]:
    """Every attention layer, in execution order.

    Raises:
        UsageError: One of an unknown kind.
    """
    tops = [s for s in graph.free() if s.id in graph.indices and s.per is None]
    return tuple(attention(graph, s.id) for s in sorted(tops, key=lambda s: s.order))


def attention(graph: LayerGraph, heads: str) -> Attention:
    """The attention layer whose heads are the units of `heads`.

    Raises:
        UsageError: Queries, keys, values and outputs can't be told apart.
    """
    sizes = graph.sizes
    made: list[Projection] = []
    read: list[tuple[AxisBlock, str | None]] = []
    for op in graph.ops:
        weight = op.tensors.get("weight")
        if op.kind is not OpKind.LINEAR or weight is None:
            continue
        node, bias = graph.tensors[weight], op.tensors.get("bias")
        for dim in node.dims(heads):
            weight_blocks = blocks(node, dim, sizes)
            if Role.CONSUME in node.axes[dim].roles:
                read += [(block, bias) for block in weight_blocks]
                continue
            shifts: tuple[AxisBlock | None, ...] = (None,) * len(weight_blocks)
            if bias is not None:
                shifts = blocks(graph.tensors[bias], 0, sizes)
            made += [Projection(w, b) for w, b in zip(weight_blocks, shifts, strict=True)]
    # Softmax comes between queries and keys: a rotation is the most that keeps their products.
    # Values meet nothing but the output layer, which can undo any invertible map.
    values: list[Projection] = []
    queries: list[Projection] = []
    for projection in made:
        is_value = _is_value(graph, projection.weight.spaces[-1])
        (values if is_value else queries).append(projection)
    plain = all(part.weight.spaces[0] == heads for part in made)
    # Queries and keys look alike here; only the data flow of attention tells which are the keys.
    if len(values) != 1 or len(queries) != 2 or len(read) != 1 or not plain:
        raise turn_refusal("an attention layer of an unknown kind", f"space {heads}")
    inner = queries[0].weight.spaces[-1]
    output, output_bias = read[0]
    return Attention(
        heads,
        (queries[0], queries[1]),
        values[0],
        output,
        output_bias,
        _key_bias(graph, queries, values[0]),
        inner is not None and "orth" in graph.spaces[inner].exact,
    )


def _is_value(graph: LayerGraph, space: str | None) -> bool:
    return space is not None and "gl" in graph.spaces[space].exact


def _key_bias(graph: LayerGraph, queries: list[Projection], values: Projection) -> str | None:
    """The bias of a layer that makes nothing but keys, read by attention as it is."""
    weights = {q.weight.tensor for q in queries}
    for op in graph.ops:
        # Attention reads queries, keys and values in this order.
        if op.detail != "attention" or len(op.inputs) < 3 or len(op.inputs[1]) != 1:
            continue
        layer = graph.ops[op.inputs[1][0]]
        if (
            layer.kind is OpKind.LINEAR
            and layer.tensors.get("weight") in weights - {values.weight.tensor}
            and len(weights) == 2
        ):
            return layer.tensors.get("bias")
    return None


def turn_refusal(
    what: str, where: str, *, why: str | None = None, fix: str | None = None
) -> UsageError:
    """Why the stream of a network can't be turned."""
    return UsageError(
        what,
        where=where,
        why=why or "the stream of the network can't be turned",
        fix=fix or "use --residual shared",
    )
