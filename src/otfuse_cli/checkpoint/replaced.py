"""A checkpoint whose tensors have been changed, in memory, under its own names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .derived import DerivedCheckpoint
from .open import Checkpoint


class Replaced(DerivedCheckpoint):
    """The checkpoint `whole` with other values.

    It is stored like the whole: `infos` tells how a tensor is stored, `read` gives it in the
    dtype that it was computed in.
    """

    def __init__(self, whole: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(whole)
        self._tensors = tensors

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own."""
        return self._tensors[name].clone()

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """`read(name)[first:last]`."""
        return self._tensors[name][first:last].clone()
