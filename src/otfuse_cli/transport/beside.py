"""A map that puts the units of one parent beside those of others: nothing is merged or dropped.

Legend: N units of this parent, M units of all.
"""

from __future__ import annotations

from torch import Tensor, nn


class Beside:
    """Units in order, with room for those of other parents before and behind (a `Map`)."""

    hard = False
    kept = None

    def __init__(self, count: int, first: int, of: int) -> None:
        """Take N, the place of the first unit, and M."""
        self.sizes = count, of
        self._before, self._behind = first, of - first - count

    def produce(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """Slices of the parent's units, zeros for all others."""
        around = [0, 0] * (tensor.dim() - 1 - dim % tensor.dim())
        padded: Tensor = nn.functional.pad(tensor, [*around, self._before, self._behind])
        return padded

    def consume(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """The same: what reads other parents' units reads nothing of them."""
        return self.produce(tensor, dim)
