"""Maps applied to tensors, factor by factor.

`W' = einsum('nm,n...->m...', produce, W)` on axes that make units or carry one number per unit,
`W' = einsum('...n,nm->...m', W, consume)` on axes that read them (docs/methods/transport.md, Maps).
An axis with structure is taken apart into its factors first, so no Kronecker product is formed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..graph.axes import Axis, Cat, Fixed, Prod, Unit, axis_size, axis_units
from ..graph.model import LayerGraph, Role
from ..transport.maps import Map
from .alignment import Alignment, Families, Maps


def transport(
    tensor: torch.Tensor,
    name: str,
    graph: LayerGraph,
    alignment: Alignment,
    *,
    anchor: torch.Tensor | None = None,
    without: str | None = None,
    only: int | None = None,
) -> torch.Tensor:
    """Move a source's tensor onto the anchor's units.

    Args:
        tensor: The source's tensor, any dtype that the maps take.
        name: Its name in `graph`.
        graph: The source's graph.
        alignment: Maps of that source; spaces without one stay in place.
        anchor: The anchor's tensor, for maps that leave some anchor units without a source.
        without: Leave this space alone.
        only: On this dimension only; None = on all of them.
    """
    # The anchor has its own number of units of every space, of one that is left alone too.
    theirs = {s: m.sizes[1] for s, m in alignment.maps.items()}
    theirs |= {s: m[0].sizes[1] for s, m in alignment.families.items() if m}
    dims = _dims(name, graph, alignment, without, only)
    return _Mover(graph, theirs).move(tensor, dims, anchor)


def row_indices(
    name: str, graph: LayerGraph, alignment: Alignment
) -> tuple[torch.Tensor | None, ...] | None:
    """A hard alignment of one tensor as an index for each axis, None where it stays.

    `transport` is then the same as picking these along every axis, in any order, and any rows of
    the result can be had without the others.

    Returns:
        None where there are no such indices: soft maps, scales, an axis inside which units move
        differently for each unit of another axis.
    """
    if not alignment.hard:
        return None
    indices: list[torch.Tensor | None] = []
    for dim in _dims(name, graph, alignment):
        if not any(map(dim.moves, axis_units(dim.expr))):
            indices.append(None)
            continue
        spaces = set(axis_units(dim.expr))
        if any(u in dim.families and graph.spaces[u].per not in spaces for u in spaces):
            return None
        size = axis_size(dim.expr, graph.sizes)
        index = _Mover(graph).move(torch.arange(size), [dim], None)
        indices.append(None if torch.equal(index, torch.arange(size)) else index)
    return tuple(indices)


def _dims(
    name: str,
    graph: LayerGraph,
    alignment: Alignment,
    without: str | None = None,
    only: int | None = None,
) -> list[_Dim]:
    dims = []
    for dim, axis in enumerate(graph.tensors[name].axes):
        maps = alignment.on(name, dim)
        # A tied tensor that makes and reads its units takes the produce side
        # (docs/methods/transport.md, Maps).
        consume = Role.CONSUME in axis.roles and Role.PRODUCE not in axis.roles
        overridden = (name, dim) in alignment.overrides
        families: Families = {} if overridden else alignment.families
        scales = {} if overridden else dict(alignment.scales)
        if without is not None and only in (None, dim):
            maps = {s: m for s, m in maps.items() if s != without}
            families = {s: m for s, m in families.items() if s != without}
            scales.pop(without, None)
        dims.append(_Dim(axis.expr, consume, maps, families, scales))
    return dims


def transport_value(
    value: torch.Tensor,
    axes: Sequence[Axis | None],
    graph: LayerGraph,
    alignment: Alignment,
    *,
    anchor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move what a source computes onto the anchor's units: every axis by the produce map.

    Args:
        value: An activation of the source.
        axes: What its axes are; None = stays in place.
        graph: The source's graph.
        alignment: Maps of that source.
        anchor: The anchor's activation, for maps that leave some anchor units without a source.
    """
    still = Fixed(1)
    scales = dict(alignment.scales)
    dims = [
        _Dim(still if a is None else a, False, alignment.maps, alignment.families, scales)
        for a in axes
    ]
    return _Mover(graph).move(value, dims, anchor)


@dataclass(frozen=True)
class _Dim:
    """One dimension on its way: its expression, the side of the plan, the maps that hold there."""

    expr: Axis
    consume: bool
    maps: Maps
    families: Families
    scales: Mapping[str, torch.Tensor]

    def moves(self, space: str) -> bool:
        """Whether the space has a map here."""
        return space in self.maps or space in self.families


@dataclass(frozen=True)
class _Mover:
    graph: LayerGraph
    theirs: Mapping[str, int] = field(default_factory=dict)

    def move(
        self, tensor: torch.Tensor, dims: list[_Dim], anchor: torch.Tensor | None
    ) -> torch.Tensor:
        """Take axes apart until each dimension is one space or fixed, move those, put together."""
        indices = {
            self.graph.spaces[u].per for d in dims for u in axis_units(d.expr) if u in d.families
        }
        for at, dim in enumerate(dims):
            units = set(axis_units(dim.expr))
            # the index of a family is told apart even where it stays in place
            if not any(map(dim.moves, units)) and indices.isdisjoint(units):
                continue
            match dim.expr:
                case Prod(factors):
                    inner = [replace(dim, expr=f) for f in factors]
                    mine = torch.unflatten(tensor, at, [self._size(d) for d in inner])
                    theirs = anchor
                    if anchor is not None:
                        theirs = torch.unflatten(anchor, at, [self._anchor_size(d) for d in inner])
                    moved = self.move(mine, [*dims[:at], *inner, *dims[at + 1 :]], theirs)
                    return moved.flatten(at, at + len(factors) - 1)
                case Cat(parts):
                    inner = [replace(dim, expr=p) for p in parts]
                    pieces = torch.split_with_sizes(tensor, [self._size(d) for d in inner], at)
                    kept: tuple[torch.Tensor | None, ...] = (None,) * len(parts)
                    if anchor is not None:
                        kept = tuple(
                            torch.split_with_sizes(
                                anchor, [self._anchor_size(d) for d in inner], at
                            )
                        )
                    moved_pieces = [
                        self.move(piece, [*dims[:at], d, *dims[at + 1 :]], k)
                        for piece, d, k in zip(pieces, inner, kept, strict=True)
                    ]
                    return torch.cat(moved_pieces, at)
        return self._move_units(tensor, dims, anchor)

    def _move_units(
        self, tensor: torch.Tensor, dims: list[_Dim], anchor: torch.Tensor | None
    ) -> torch.Tensor:
        """Every dimension is one space or stays: apply the maps, then those of families."""
        spaces = [d.expr.space if isinstance(d.expr, Unit) else "" for d in dims]
        for at, (dim, space) in enumerate(zip(dims, spaces, strict=True)):
            if space in dim.maps:
                tensor = _apply(dim.maps[space], tensor, at, dim.consume)
        for at, (dim, space) in enumerate(zip(dims, spaces, strict=True)):
            if space in dim.families:
                index = spaces.index(self.graph.spaces[space].per or "")
                inner = at - (index < at)
                tensor = torch.stack(
                    [
                        _apply(map, tensor.select(index, unit), inner, dim.consume)
                        for unit, map in enumerate(dim.families[space])
                    ],
                    index,
                )
        for at, (dim, space) in enumerate(zip(dims, spaces, strict=True)):
            if space in dim.scales:
                factor = dim.scales[space].to(tensor)
                shape = [-1 if d == at else 1 for d in range(tensor.dim())]
                tensor = tensor * (1 / factor if dim.consume else factor).view(shape)
        for at, (dim, space) in enumerate(zip(dims, spaces, strict=True)):
            if space in dim.maps and (kept := dim.maps[space].kept) is not None:
                if anchor is None:
                    raise ValueError("a map that keeps anchor units needs the anchor's tensor")
                where = kept.to(tensor.device)
                tensor = tensor.index_copy(at, where, anchor.index_select(at, where))
        return tensor

    def _size(self, dim: _Dim) -> int:
        return axis_size(dim.expr, self.graph.sizes)

    def _anchor_size(self, dim: _Dim) -> int:
        theirs = {s: m.sizes[1] for s, m in dim.maps.items()}
        theirs |= {s: m[0].sizes[1] for s, m in dim.families.items() if m}
        return axis_size(dim.expr, {**self.graph.sizes, **self.theirs, **theirs})


def _apply(map: Map, tensor: torch.Tensor, dim: int, consume: bool) -> torch.Tensor:
    blank = None
    if map.kept is not None:  # filled in once every axis has the anchor's size
        shape = list(tensor.shape)
        shape[dim] = map.sizes[1]
        blank = tensor.new_zeros(shape)
    return map.consume(tensor, dim, blank) if consume else map.produce(tensor, dim, blank)
