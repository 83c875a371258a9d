"""The maps of one source onto the anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..transport.maps import Map

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
