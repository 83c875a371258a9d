"""Benefits of spaces as they were last computed, brought up to date where little has changed.

The benefit of a space depends on the maps of its neighbours, the spaces on the other axes of its
tensors. While these are the same objects, so is the benefit; where a permutation of one has changed
in a few units, only the products along those units are taken anew.

Legend: c changed units, N source units, M anchor units of the space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ..graph.axes import Unit, axis_units
from ..graph.model import LayerGraph
from ..transport.maps import Map, Permutation
from .alignment import Alignment

# An update takes as much work for a changed unit as the whole takes for two.
_MOST_CHANGED = 0.4
# Updates of float32 sums, each with its rounding, before they are computed anew.
_MOST_UPDATES = 16

Places = tuple[tuple[str, int], ...]
# Tensor, dimension of the space, dimension of its neighbour.
Meeting = tuple[str, int, int]


@dataclass
class Sides:
    """Products of unfoldings of one space, those of axes that make its units and that read them.

    Attributes:
        made: N x M (H x N x M for a family); None where no axis makes them.
        read: Likewise.
    """

    made: torch.Tensor | None = None
    read: torch.Tensor | None = None

    def add(self, part: torch.Tensor, *, reads: bool) -> None:
        """Add a product, in place; the first one is kept as it is."""
        if reads:
            self.read = part if self.read is None else self.read.add_(part)
        else:
            self.made = part if self.made is None else self.made.add_(part)

    def copied(self) -> Sides:
        """For a caller that changes them."""
        made, read = (None if side is None else side.clone() for side in (self.made, self.read))
        return Sides(made, read)


@dataclass(frozen=True)
class MovedUnits:
    """Some units of a space have other source units than before.

    Attributes:
        units: Anchor units, c.
        before: Their source units then.
        after: Their source units now.
        alignment: The maps of the other spaces; the space itself stays in place.
    """

    units: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    alignment: Alignment


@dataclass
class _Kept:
    sides: Sides
    maps: dict[str, Map | tuple[Map, ...] | None]
    updates: int = 0


class KeptBenefits:
    """The last benefit of every space."""

    def __init__(
        self,
        graph: LayerGraph,
        places: Mapping[str, Places],
        whole: Callable[[str, Alignment], Sides],
        update: Callable[[Sides, tuple[Meeting, ...], str, MovedUnits], None],
    ) -> None:
        """Begin with none.

        Args:
            graph: The anchor's.
            places: Space to every (tensor, dimension) that is compared.
            whole: Computes the sides of a space.
            update: Adds what a change of a neighbour changes where the two meet.
        """
        self._graph, self._places = graph, places
        self._whole, self._update = whole, update
        self._kept: dict[str, _Kept] = {}

    def sides(self, space: str, alignment: Alignment) -> Sides:
        """The sides of a space under these maps; they stay this module's."""
        near = neighbours(self._graph, self._places[space], space)
        maps = {u: _map_of(u, alignment) for u in sorted(near)}
        kept = self._kept.get(space)
        if kept is None or not self._brought_up(space, kept, maps, alignment):
            kept = self._kept[space] = _Kept(self._whole(space, alignment), maps)
        return kept.sides

    def _brought_up(
        self,
        space: str,
        kept: _Kept,
        maps: dict[str, Map | tuple[Map, ...] | None],
        alignment: Alignment,
    ) -> bool:
        changed = [u for u, map in maps.items() if map is not kept.maps[u]]
        if kept.updates + len(changed) > _MOST_UPDATES:
            return False
        present, steps = dict(alignment.maps), []
        for other in changed:
            before, after = kept.maps[other], maps[other]
            places = self._meetings(space, other)
            if not (isinstance(before, Permutation) and isinstance(after, Permutation)):
                return False
            units = (before.index_M != after.index_M).nonzero().flatten()
            if places is None or len(units) > _MOST_CHANGED * len(before.index_M):
                return False
            present[other] = before
            steps.append((other, units, before.index_M[units], after.index_M[units], places))
        for other, units, old, new, places in steps:
            rest = {s: map for s, map in present.items() if s != other}
            if len(units):
                change = MovedUnits(units, old, new, replace(alignment, maps=rest))
                self._update(kept.sides, places, space, change)
            present[other] = alignment.maps[other]
        kept.maps, kept.updates = maps, kept.updates + len(changed)
        return True

    def _meetings(self, space: str, other: str) -> tuple[Meeting, ...] | None:
        """Where the two meet: tensor, dimension of either; None where more than units meet."""
        meetings = []
        for name, dim in self._places[space]:
            dims = []
            for at, axis in enumerate(self._graph.tensors[name].axes):
                if other not in axis_units(axis.expr) or (at == dim and other == space):
                    continue
                if at == dim or not isinstance(axis.expr, Unit):
                    return None
                dims.append(at)
            if len(dims) > 1:
                return None
            meetings += [(name, dim, at) for at in dims]
        return tuple(meetings)


def neighbours(graph: LayerGraph, places: Places, space: str) -> frozenset[str]:
    """Spaces on the other axes of a space's tensors; itself, where it is on two of one tensor."""
    others: set[str] = set()
    for name, dim in places:
        for at, axis in enumerate(graph.tensors[name].axes):
            others.update(u for u in axis_units(axis.expr) if at != dim or u != space)
    return frozenset(others)


def _map_of(space: str, alignment: Alignment) -> Map | tuple[Map, ...] | None:
    if space in alignment.families:
        return alignment.families[space]
    return alignment.maps.get(space)
