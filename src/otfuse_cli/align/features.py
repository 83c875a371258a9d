"""What units are compared by: their incoming weights (DESIGN section 3, Features).

The rows of every tensor that makes the units of a space, other axes already moved onto the
anchor, the bias as the weight of a constant input, a following BatchNorm folded in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..graph.axes import axis_units
from ..graph.model import LayerGraph, OpKind, Role
from ..transport.cost import unit_rows
from .alignment import Alignment
from .apply import transport
from .models import Model
from .unfold import unfold

# torch.nn's default; a checkpoint doesn't hold it, and only the direction of a row depends on it.
_BATCH_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Producer:
    """A tensor whose rows make the units of a space, with what belongs to those rows.

    Attributes:
        layer: Module path, for the report.
        weight: Tensor name.
        dim: Its axis that makes the units.
        bias: Name of the bias along that axis.
        norm: Tensors of the BatchNorm that follows, by part.
    """

    layer: str
    weight: str
    dim: int
    bias: str | None = None
    norm: Mapping[str, str] | None = None


def producers(graph: LayerGraph, space: str) -> tuple[Producer, ...]:
    """Producers of a space in checkpoint order; tensors of role VECTOR where there is no other."""
    found = []
    for name, dim in graph.members[space]:
        if Role.PRODUCE in graph.tensors[name].axes[dim].roles:
            found.append(_producer(graph, name, dim))
    if not found:
        for name, dim in graph.members[space]:
            if Role.VECTOR in graph.tensors[name].axes[dim].roles:
                found.append(Producer(name.rpartition(".")[0] or name, name, dim))
    return tuple(found)


def _producer(graph: LayerGraph, weight: str, dim: int) -> Producer:
    for position, op in enumerate(graph.ops):
        if op.kind is OpKind.NORM or weight not in op.tensors.values():
            continue
        bias = op.tensors.get("bias")
        if (
            bias is not None
            and graph.tensors[bias].axes[0].expr != graph.tensors[weight].axes[dim].expr
        ):
            bias = None
        norm = None
        after = graph.ops[position + 1] if position + 1 < len(graph.ops) else None
        if (
            after
            and after.kind is OpKind.NORM
            and after.detail == "batch"
            and after.reads == (op.writes,)
        ):
            norm = after.tensors
        return Producer(op.name, weight, dim, bias, norm)
    return Producer(weight.rpartition(".")[0] or weight, weight, dim)


def raw_rows(
    model: Model,
    producer: Producer,
    space: str,
    alignment: Alignment | None = None,
    *,
    pool: frozenset[str] = frozenset(),
) -> torch.Tensor:
    """Rows of one producer: (units, features), for a family (index units, units, features).

    With an alignment, every axis but `space` is moved onto the anchor first. `pool` names spaces
    whose order is not known yet (families of `space` among them).
    """
    graph = model.graph
    node = graph.tensors[producer.weight]
    # Hard maps only move numbers: they need not be widened before they are in their place.
    late = producer.norm is None and not pool and (alignment is None or alignment.hard)
    weight = (model.stored if late else model.read)(producer.weight)
    columns = [] if producer.bias is None else [model.read(producer.bias)]
    if producer.norm is not None:
        gain, shift = _batch_norm(model, producer.norm)
        shape = [-1 if d == producer.dim else 1 for d in range(weight.dim())]
        weight = weight * gain.view(shape)
        columns = [gain * c + shift for c in columns] or [shift]
    sizes = graph.sizes
    if alignment is not None:
        weight = transport(weight, producer.weight, graph, alignment, without=space)
        sizes = moved_sizes(graph, alignment, without=space)
    index = graph.spaces[space].per
    exprs = [axis.expr for axis in node.axes]
    found = unfold(weight, exprs, producer.dim, space, sizes, index=index, pool=pool)
    del weight
    found = [model.widened(rows) for rows in found] if late else found
    for column in columns:
        if alignment is not None and len(set(axis_units(exprs[producer.dim]))) > 1:
            column = _move_column(column, producer, graph, alignment, space)
        found += unfold(column, [exprs[producer.dim]], 0, space, sizes, index=index, pool=pool)
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def _move_column(
    column: torch.Tensor, producer: Producer, graph: LayerGraph, alignment: Alignment, space: str
) -> torch.Tensor:
    """A bias along a structured axis (`head * dim`) moves like the rows of its weight."""
    assert producer.bias is not None
    return transport(column, producer.bias, graph, alignment, without=space)


def _batch_norm(model: Model, norm: Mapping[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """A BatchNorm in eval mode as gain and shift per unit."""
    variance = model.read(norm["running_var"])
    gain = (variance + _BATCH_NORM_EPS).rsqrt()
    if "weight" in norm:
        gain = gain * model.read(norm["weight"])
    shift = -model.read(norm["running_mean"]) * gain
    if "bias" in norm:
        shift = shift + model.read(norm["bias"])
    return gain, shift


def moved_sizes(graph: LayerGraph, alignment: Alignment, *, without: str) -> dict[str, int]:
    """Units by space after every space but one was moved onto the anchor."""
    sizes = dict(graph.sizes)
    for space, map in alignment.maps.items():
        if space != without:
            sizes[space] = map.sizes[1]
    for space, maps in alignment.families.items():
        if space != without and maps:
            sizes[space] = maps[0].sizes[1]
    return sizes


def joined(rows: Sequence[torch.Tensor], *, unit_norm: bool) -> torch.Tensor:
    """Rows of several producers side by side, as the cost compares them.

    Each producer's rows are scaled to unit norm (`unit_norm`), concatenated, and divided by the
    square root of the number of producers.
    """
    scaled = [unit_rows(r) if unit_norm else r for r in rows]
    return scaled[0] if len(scaled) == 1 else torch.cat(scaled, -1) / len(scaled) ** 0.5
