"""A checkpoint whose tensors have been changed, in memory, under its own names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .open import Checkpoint


class Replaced(Checkpoint):
    """The checkpoint `whole` with other values.

    Hashes, reports and stores like it: `infos` tells how a tensor is stored, `read` gives it in the
    dtype that it was computed in.
    """

    def __init__(self, whole: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(
            contents=whole.contents,
            label=whole.label,
            container=whole.container,
            entries={n: whole.entries[n] for n in whole.infos},
            aliases=whole.aliases,
        )
        self._tensors = tensors

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own."""
        return self._tensors[name].clone()

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """`read(name)[first:last]`."""
        return self._tensors[name][first:last].clone()
