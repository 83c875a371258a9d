"""A choice: each unit of the result is one unit of one parent; the others are read through it.

Legend: N units of this parent, M units of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .maps import Map


class Choice:
    """One parent's share in a choice among the units of several (a `Map`).

    `produce` gives each result unit the slice of the unit that it is, zero where another parent
    has it, so that the sum over parents is the whole. `consume` hands a unit's outgoing weights to
    the result units that reconstruct it.
    """

    hard = False
    kept = None

    def __init__(self, index_M: Tensor, own_M: Tensor, read_NM: Tensor) -> None:
        """Take what was chosen.

        Args:
            index_M: For each result unit, which unit of its parent it is.
            own_M: Whether its parent is this one.
            read_NM: What each unit of this parent is, as a combination of result units.
        """
        self.index_M, self.own_M, self.read_NM = index_M, own_M, read_NM

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, M)."""
        return self.read_NM.shape[0], self.read_NM.shape[1]

    def produce(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """Slices of the units that this parent gives; zero elsewhere."""
        index = torch.where(self.own_M, self.index_M, 0).to(tensor.device)
        picked = tensor.index_select(dim, index)
        shape = [1] * tensor.dim()
        shape[dim] = -1
        return picked.mul_(self.own_M.to(tensor).view(shape))

    def consume(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """Outgoing weights, of every unit, handed to what reconstructs it."""
        moved: Tensor = torch.tensordot(tensor, self.read_NM.to(tensor), dims=([dim], [0]))
        return moved.movedim(-1, dim)


class PartlyFixed(Choice):
    """Some result units are certain units of the source, the others what a map says (a `Map`)."""

    def __init__(self, base: Map, source_S: Tensor, anchor_S: Tensor) -> None:
        """Take the map, and pairs of units that are one.

        Args:
            base: For all other units.
            source_S: Places in the source.
            anchor_S: Places in the result.
        """
        self.base, self.source_S, self.anchor_S = base, source_S, anchor_S

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, M)."""
        return self.base.sizes

    def produce(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """Slices of the units held, the map's elsewhere."""
        made = self.base.produce(tensor, dim, anchor)
        held = tensor.index_select(dim, self.source_S.to(tensor.device)).to(made)
        return made.index_copy(dim, self.anchor_S.to(made.device), held)

    def consume(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """The map's."""
        return self.base.consume(tensor, dim, anchor)
