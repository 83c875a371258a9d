"""A basis: each unit of the result is a combination of the units of all parents.

Legend: N units of this parent, M units of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Basis:
    """One parent's share in a joint basis (a `Map`).

    `produce` takes what the parent has into the basis; the sum over parents is the whole.
    `consume` lets a layer of the parent read its own units off the basis.
    """

    hard = False
    kept = None

    def __init__(self, made_MN: Tensor, read_NM: Tensor) -> None:
        """Take both sides; `read_NM` says what each unit of the parent is in the basis."""
        self.made_MN, self.read_NM = made_MN, read_NM

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, M)."""
        return self.read_NM.shape[0], self.read_NM.shape[1]

    def produce(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """The parent's part of the basis along `dim`."""
        moved: Tensor = torch.tensordot(tensor, self.made_MN.to(tensor), dims=([dim], [1]))
        return moved.movedim(-1, dim)

    def consume(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """Weights that read the basis in place of the parent's units."""
        moved: Tensor = torch.tensordot(tensor, self.read_NM.to(tensor), dims=([dim], [0]))
        return moved.movedim(-1, dim)
