"""The maps of one source onto the anchor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..graph.model import LayerGraph
from ..transport.maps import Map, Permutation

Maps = Mapping[str, Map]
Families = Mapping[str, tuple[Map, ...]]


@dataclass(frozen=True)
class Alignment:
    """How one source moves: a map per free space.

    Attributes:
        maps: By space; a space that is absent stays in place.
        families: For a space with an index (`v@h`): one map per *anchor* unit of the index space.
        overrides: Maps that hold on one axis of one tensor only (`--residual average`).
        scales: Positive factors by space, one per anchor unit: what makes the unit is multiplied,
            what reads it divided (`balance`).
        shares: By space of different widths: what the source's weight in the average is
            multiplied by on its axes (`shares`).
    """

    maps: Maps
    families: Families = field(default_factory=dict)
    overrides: Mapping[tuple[str, int], Maps] = field(default_factory=dict)
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)

    def on(self, tensor: str, dim: int) -> Maps:
        """The maps that hold on one axis."""
        return self.overrides.get((tensor, dim), self.maps)

    @property
    def hard(self) -> bool:
        """Whether every map is a permutation, one everywhere, and nothing is scaled."""
        inner = (m for maps in self.families.values() for m in maps)
        return not (self.overrides or self.scales) and all(
            m.hard for m in (*self.maps.values(), *inner)
        )


def stay(size: int) -> Permutation:
    """The map that leaves every unit in its place."""
    return Permutation(torch.arange(size))


def in_place(graph: LayerGraph) -> Alignment:
    """Every unit of every free space where it is."""
    maps = {s.id: stay(s.size) for s in graph.free() if s.per is None}
    families = {
        s.id: (stay(s.size),) * graph.spaces[s.per].size for s in graph.free() if s.per is not None
    }
    return Alignment(maps, families)


def pairs_of_maps(one: Alignment, other: Alignment) -> Iterator[tuple[Map, Map]]:
    """The maps of two alignments of the same spaces, side by side."""
    for space, map in one.maps.items():
        yield map, other.maps[space]
    for space, inner in one.families.items():
        yield from zip(inner, other.families[space], strict=True)
