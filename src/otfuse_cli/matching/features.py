"""What units are compared by: their incoming weights (docs/methods/transport.md, Features).

The rows of every tensor that makes the units of a space, other axes already moved onto the
anchor, the bias as the weight of a constant input, a following BatchNorm folded in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..graph.axes import Axis, Fixed, axis_units
from ..graph.model import LayerGraph, OpKind, Role
from ..transport.cost import unit_rows
from .alignment import Alignment
from .apply import transport
from .models import Model
from .unfold import unfold

# torch.nn's default; a checkpoint doesn't hold it, and only the direction of a row depends on it.
_BATCH_NORM_EPS = 1e-5


# Roles of the tensors that units are compared by, the most telling first.
_MAKERS = (Role.PRODUCE, Role.VECTOR, Role.SCALE, Role.CONSUME)


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
    """Tensors that say what the units of a space are, in checkpoint order; never none.

    Those that make them; where there are none, those with a number for each unit; else those that
    scale them (a convolution's weight that is modulated before it is used), else what reads them.
    """
    for role in _MAKERS:
        with_role = [
            (name, dim)
            for name, dim in graph.members[space]
            if role in graph.tensors[name].axes[dim].roles
        ]
        if with_role and role is Role.PRODUCE:
            return tuple(_producer(graph, name, dim) for name, dim in with_role)
        if with_role:
            return tuple(Producer(_layer(name), name, dim) for name, dim in with_role)
    return tuple(Producer(_layer(name), name, dim) for name, dim in graph.members[space])


def _layer(tensor: str) -> str:
    return tensor.rpartition(".")[0] or tensor


def _producer(graph: LayerGraph, weight: str, dim: int) -> Producer:
    for position, op in enumerate(graph.ops):
        if op.kind is OpKind.NORM or weight not in op.tensors.values():
            continue
        rows = graph.tensors[weight].axes[dim].expr

        def along(part: str | None, rows: Axis = rows) -> bool:
            """Whether a tensor has an entry for each row; a group's rows may have one for all."""
            return part is not None and rows in [a.expr for a in graph.tensors[part].axes]

        bias = op.tensors.get("bias")
        after = graph.ops[position + 1] if position + 1 < len(graph.ops) else None
        normed = (
            after
            and after.kind is OpKind.NORM
            and after.detail == "batch"
            and after.reads == (op.writes,)
            and along(after.tensors.get("running_mean"))
        )
        norm = after.tensors if after and normed else None
        bias = bias if along(bias) else None
        return Producer(op.name, weight, dim, bias, norm)
    return Producer(_layer(weight), weight, dim)


def raw_rows(
    model: Model,
    producer: Producer,
    space: str,
    alignment: Alignment | None = None,
    *,
    pool: frozenset[str] = frozenset(),
    widen: bool = True,
) -> torch.Tensor:
    """Rows of one producer: (units, features), for a family (index units, units, features).

    With an alignment, every axis but `space` is moved onto the anchor first. `pool` names spaces
    whose order is not known yet (families of `space` among them). Without `widen`, rows that
    nothing is computed with stay in the dtype of the file.
    """
    graph = model.graph
    node = graph.tensors[producer.weight]
    # Hard maps only move numbers: they need not be widened before they are in their place.
    late = producer.norm is None and not pool and (alignment is None or alignment.hard)
    weight = (model.stored if late else model.read)(producer.weight)
    columns = [] if producer.bias is None else [(producer.bias, model.read(producer.bias))]
    if producer.norm is not None:
        gain, shift = _batch_norm(model, producer.norm)
        shape = [-1 if d == producer.dim else 1 for d in range(weight.dim())]
        weight = weight * gain.view(shape)
        bias = columns[0][1] if columns else 0.0
        columns = [(producer.norm["running_mean"], gain * bias + shift)]
    sizes = graph.sizes
    if alignment is not None:
        weight = transport(
            weight, producer.weight, graph, alignment, without=space, only=producer.dim
        )
        sizes = moved_sizes(graph, alignment, without=space)
    index = graph.spaces[space].per
    exprs = [axis.expr for axis in node.axes]
    if alignment is not None and space in alignment.maps:
        # A recurrent weight reads its own units: these columns have moved, and are features.
        for dim, expr in enumerate(exprs):
            if dim != producer.dim and space in axis_units(expr):
                exprs[dim] = Fixed(weight.shape[dim])
    unfolded = unfold(weight, exprs, producer.dim, space, sizes, index=index, pool=pool)
    del weight
    if late and (widen or columns):
        unfolded = [model.widened(rows) for rows in unfolded]
    elif late:
        unfolded = [rows.to(model.device) for rows in unfolded]
    for name, column in columns:
        axes = [axis.expr for axis in graph.tensors[name].axes]
        if alignment is not None:
            column = transport(column, name, graph, alignment, without=space)
        along = axes.index(exprs[producer.dim])
        unfolded += unfold(column, axes, along, space, sizes, index=index, pool=pool)
    return unfolded[0] if len(unfolded) == 1 else torch.cat(unfolded, -1)


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
