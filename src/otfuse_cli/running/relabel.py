"""Hard maps on tensors: permute the units of every axis as its expression says. Exact, no matmul.

A map is an index vector, `new = old[map]`, which may leave units out (pruning; not in families); a
family's has one row per unit of its index space, by the unit's new place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..graph.axes import Axis, Cat, Fixed, Unit, axis_size, axis_units, units_of
from ..graph.model import GraphTensor, LayerGraph, Space

Maps = Mapping[str, Tensor]


def axis_index(
    axis: Axis, maps: Maps, spaces: Mapping[str, Space], at: Mapping[str, int] | None = None
) -> Tensor:
    """Old position of every new position of `axis`, int64.

    Args:
        axis: Its expression.
        maps: By space; spaces without one stay.
        spaces: Of the graph.
        at: New unit of the index spaces of families whose index isn't on this axis.
    """
    fixed = dict(at or {})
    if isinstance(axis, Fixed):
        return torch.arange(axis.size)
    if isinstance(axis, Unit):
        return _unit_index(axis.space, maps, spaces, fixed)
    if isinstance(axis, Cat):
        pieces, start = [], 0
        sizes = {id: space.size for id, space in spaces.items()}
        for part in axis.parts:
            pieces.append(axis_index(part, maps, spaces, fixed) + start)
            start += axis_size(part, sizes)  # where a map drops units, more than the piece has
        return torch.cat(pieces)
    index = _product_index(axis.factors, maps, spaces, fixed)
    return index.reshape(-1)


def relabel(
    tensor: Tensor, described: GraphTensor, maps: Maps, spaces: Mapping[str, Space]
) -> Tensor:
    """`tensor` with its units in their new order (a copy where anything moves)."""
    return relabel_axes(tensor, described, [maps] * tensor.ndim, spaces)


def relabel_axes(
    tensor: Tensor, described: GraphTensor, maps: Sequence[Maps], spaces: Mapping[str, Space]
) -> Tensor:
    """As `relabel`, with maps of its own for every axis."""
    axes = [axis.expr for axis in described.axes]
    waiting = {d: _outside(axis, maps[d], spaces) for d, axis in enumerate(axes)}
    while waiting:
        ready = _next_axis(axes, waiting)
        needs = waiting.pop(ready)
        tensor = _along(tensor, ready, axes, maps[ready], spaces, needs, {})
    return tensor


def _next_axis(axes: Sequence[Axis], waiting: Mapping[int, Sequence[str]]) -> int:
    """An axis to move: one whose families are indexed by another axis comes after that one."""
    for dim, needs in waiting.items():
        if not any(_holds(axes, waiting, need) for need in needs):
            return dim
    return next(iter(waiting))


def relabel_state(state: Mapping[str, Tensor], graph: LayerGraph, maps: Maps) -> dict[str, Tensor]:
    """All tensors of the graph (tied names included) with their units in the new order."""
    out = dict(state)
    for name, described in graph.tensors.items():
        moved = relabel(state[name], described, maps, graph.spaces)
        for alias in (name, *described.aliases):
            if alias in out:
                out[alias] = moved
    return out


def draw_maps(graph: LayerGraph, generator: torch.Generator) -> dict[str, Tensor]:
    """A random cyclic permutation for every free space: no unit stays in its place."""
    maps: dict[str, Tensor] = {}
    for space in graph.free():
        if space.per is None:
            maps[space.id] = _cycle(space.size, generator)
        else:
            rows = graph.spaces[space.per].size
            maps[space.id] = torch.stack([_cycle(space.size, generator) for _ in range(rows)])
    return maps


def _cycle(n: int, generator: torch.Generator) -> Tensor:
    order = torch.randperm(n, generator=generator)
    index = torch.empty_like(order)
    index[order] = order.roll(1)
    return index


def _unit_index(
    space: str, maps: Maps, spaces: Mapping[str, Space], at: Mapping[str, int]
) -> Tensor:
    described = spaces[space]
    if space not in maps:
        return torch.arange(described.size)
    if described.per is None:
        return maps[space]
    return maps[space][at[described.per]]


def _product_index(
    factors: Sequence[Axis], maps: Maps, spaces: Mapping[str, Space], at: dict[str, int]
) -> Tensor:
    """Old flat positions, shaped by factor."""
    sizes = {id: space.size for id, space in spaces.items()}
    shape = [axis_size(f, sizes) for f in factors]
    index_at = _next_index(factors, maps, spaces, at)
    if index_at is None:
        flat = torch.zeros(1, dtype=torch.int64)
        new_shape = []
        for factor, n in zip(factors, shape, strict=True):
            index = axis_index(factor, maps, spaces, at)
            flat = (flat[:, None] * n + index[None, :]).reshape(-1)
            new_shape.append(len(index))
        return flat.reshape(new_shape)
    unit = factors[index_at]
    assert isinstance(unit, Unit)
    index = _unit_index(unit.space, maps, spaces, at)
    rest = [*factors[:index_at], *factors[index_at + 1 :]]
    inner = int(torch.tensor(shape[index_at + 1 :]).prod()) if shape[index_at + 1 :] else 1
    planes = []
    for new, old in enumerate(index.tolist()):
        plane = _product_index(rest, maps, spaces, {**at, unit.space: new}).reshape(-1)
        # The flat position of the rest, opened to make room for this factor.
        planes.append((plane // inner * shape[index_at] + old) * inner + plane % inner)
    outer = [*shape[:index_at], *shape[index_at + 1 :]]
    return torch.stack([p.reshape(outer) for p in planes], dim=index_at)


def _next_index(
    factors: Sequence[Axis], maps: Maps, spaces: Mapping[str, Space], at: Mapping[str, int]
) -> int | None:
    """A factor that indexes families in the others, and whose own index is known."""
    units = [f.space if isinstance(f, Unit) else None for f in factors]
    for i, space in enumerate(units):
        if space is None or space in at:
            continue
        indexed_by = spaces[space].per if space in maps else None
        if indexed_by is not None and indexed_by not in at:
            continue
        others = units_of((*factors[:i], *factors[i + 1 :]))
        if any(unit in maps and spaces[unit].per == space for unit in others):
            return i
    return None


def _outside(axis: Axis, maps: Maps, spaces: Mapping[str, Space]) -> list[str]:
    """Index spaces of families on `axis` that aren't factors beside their members."""

    def missing(expr: Axis, beside: frozenset[str]) -> list[str]:
        if isinstance(expr, Fixed):
            return []
        if isinstance(expr, Unit):
            per = spaces[expr.space].per if expr.space in maps else None
            return [per] if per is not None and per not in beside else []
        if isinstance(expr, Cat):
            children = expr.parts
        else:
            children = expr.factors
            beside = beside | {f.space for f in children if isinstance(f, Unit)}
        needs: list[str] = []
        for child in children:
            needs.extend(missing(child, beside))
        return needs

    return list(dict.fromkeys(missing(axis, frozenset())))


def _holds(axes: Sequence[Axis], waiting: Mapping[int, object], space: str) -> bool:
    """Whether an axis that hasn't been moved yet carries `space`."""
    return any(space in axis_units(axes[d]) for d in waiting)


def _along(
    tensor: Tensor,
    dim: int,
    axes: Sequence[Axis],
    maps: Maps,
    spaces: Mapping[str, Space],
    needs: Sequence[str],
    at: dict[str, int],
) -> Tensor:
    """Move one axis, slice by slice of the axes that index its families."""
    if not needs:
        if not any(unit in maps for unit in axis_units(axes[dim])):
            return tensor
        return tensor.index_select(dim, axis_index(axes[dim], maps, spaces, at))
    space, *rest = needs
    other = next(d for d, axis in enumerate(axes) if d != dim and space in axis_units(axis))
    unit_of = _unit_of(axes[other], space, spaces)
    out = tensor.clone()
    for unit in range(spaces[space].size):
        where = (unit_of == unit).nonzero().reshape(-1)
        piece = tensor.index_select(other, where)
        moved = _along(piece, dim, axes, maps, spaces, rest, {**at, space: unit})
        out.index_copy_(other, where, moved)
    return out


def _unit_of(axis: Axis, space: str, spaces: Mapping[str, Space]) -> Tensor:
    """Which unit of `space` every position of `axis` belongs to; -1 for none."""
    if isinstance(axis, Unit):
        n = spaces[axis.space].size
        return torch.arange(n) if axis.space == space else torch.full((n,), -1)
    if isinstance(axis, Fixed):
        return torch.full((axis.size,), -1)
    if isinstance(axis, Cat):
        return torch.cat([_unit_of(part, space, spaces) for part in axis.parts])
    unit = torch.full((1,), -1)
    for factor in axis.factors:
        factor_unit = _unit_of(factor, space, spaces)
        unit = torch.maximum(unit[:, None], factor_unit[None, :]).reshape(-1)
    return unit


__all__ = ["Maps", "axis_index", "draw_maps", "relabel", "relabel_axes", "relabel_state"]
