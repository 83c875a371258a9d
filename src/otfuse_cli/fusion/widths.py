"""How many units a network gets that joint fusion makes wider or narrower than the anchor.

A space gets a multiple of what the anchor has, at most what all parents have together. Sizes only;
no tensors (docs/methods/joint.md, Wider).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..graph.analysis.named_units import amounts_by_name, names_of
from ..graph.model import LayerGraph, Role


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

    Heads and groups count as wholes; what is inside them stays as it is. A stream that is as wide
    as all heads of every layer together stays so: what builds such a network knows one of the two.

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
    by_space: dict[str, SpaceWidth] = {}
    for space in free:
        union = sum(graph.spaces[space.id].size for graph in parents)
        multiple = 1 if space.id in anchor.indices else width.multiple
        most = union - union % multiple or union
        factor, units = factors.get(space.id, width.factor), most
        if factor < width.parents:
            units = _rounded(factor * space.size, multiple)
        by_space[space.id] = SpaceWidth(
            space.id, space.size, union, min(units, most), capped=units > most
        )
    for id in sorted(by_space.keys() - factors.keys() - anchor.indices):
        stream = _as_heads(anchor, by_space, id)
        if stream is not None:
            by_space[id] = replace(by_space[id], units=min(stream, by_space[id].union))
    return tuple(by_space.values())


def _as_heads(graph: LayerGraph, widths: Mapping[str, SpaceWidth], space: str) -> int | None:
    """Units of a space that has as many as the heads of every layer together; None for others."""
    wanted: set[int] = set()
    for name, index in _reads_of_heads(graph):
        axis = graph.tensors[name].dims(index, Role.CONSUME)[0]
        length, heads = graph.tensors[name].shape[axis], graph.spaces[index].size
        if length != graph.spaces[space].size:
            return None
        wanted.add(length // heads * widths[index].units)
    return wanted.pop() if len(wanted) == 1 else None


def _reads_of_heads(graph: LayerGraph) -> Iterator[tuple[str, str]]:
    """Tensors that read what heads put out, and the space of those heads."""
    for index in sorted(graph.indices):
        for name in graph.consumers(index):
            yield name, index


def _rounded(units: float, multiple: int) -> int:
    """The nearest multiple, at least one of them; halves go to the even one."""
    return multiple * max(1, round(units / multiple))
