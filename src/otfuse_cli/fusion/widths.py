"""How many units a network gets that joint fusion makes wider or narrower than the anchor.

A space gets a multiple of what the anchor has, at most what all parents have together. Sizes only;
no tensors (docs/methods/joint.md, Wider).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..graph.analysis.named_units import amounts_by_name, names_of
from ..graph.model import LayerGraph


@dataclass(frozen=True)
class Width:
    """How wide a result is to be, relative to the anchor.

    Attributes:
        factor: For every space that has none of its own.
        layers: Factors by space, module or tensor.
        multiple: Numbers of units are multiples of it.
        parents: How many there are; a factor of as many means all their units.
    """

    factor: float
    parents: int
    layers: Mapping[str, float] = field(default_factory=dict)
    multiple: int = 1

    @property
    def whole(self) -> bool:
        """Whether all units of all parents stay."""
        return all(f >= self.parents for f in (self.factor, *self.layers.values()))


@dataclass(frozen=True)
class SpaceWidth:
    """Units of a space: the anchor's, all parents', and how many the result gets.

    `capped`: more were asked for than there are.
    """

    space: str
    anchor: int
    union: int
    units: int
    capped: bool = False


def space_widths(
    anchor: LayerGraph, parents: Sequence[LayerGraph], width: Width
) -> tuple[SpaceWidth, ...]:
    """Units of every free space in the result, in processing order.

    Heads and groups count as wholes; what is inside them stays as it is.

    Args:
        anchor: Its graph, whose sizes factors are of.
        parents: Graphs of all that have a share, the anchor among them if it has one.
        width: What is asked for.

    Raises:
        UsageError: A name in `layers` that fits nothing, or that means units that stay in place.
    """
    free = [space for space in anchor.free() if space.per is None]
    names = {s.id: names_of(anchor, s.id) for s in free if anchor.producers(s.id)}
    factors = amounts_by_name(anchor, width.layers, names, action="widened")
    widths: list[SpaceWidth] = []
    for space in free:
        union = sum(graph.spaces[space.id].size for graph in parents)
        most = union - union % width.multiple or union
        factor, units = factors.get(space.id, width.factor), most
        if factor < width.parents:
            units = _rounded(factor * space.size, width.multiple)
        widths.append(
            SpaceWidth(space.id, space.size, union, min(units, most), capped=units > most)
        )
    return tuple(widths)


def _rounded(units: float, multiple: int) -> int:
    """The nearest multiple, at least one of them; halves go to the even one."""
    return multiple * max(1, round(units / multiple))
