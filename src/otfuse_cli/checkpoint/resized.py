"""A checkpoint with tensors of other shapes, which hold nothing: what a result is written like."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .contents import Entry, LazyTensor
from .derived import DerivedCheckpoint
from .open import Checkpoint


class Blank(LazyTensor):
    """A tensor of one number everywhere; takes no memory until it is read."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, value: int = 0) -> None:
        self.shape, self.dtype, self.value = shape, dtype, value

    def read(self) -> torch.Tensor:
        """The tensor."""
        return torch.full(self.shape, self.value, dtype=self.dtype)


class Resized(DerivedCheckpoint):
    """The checkpoint `whole` with other shapes: tensors that change theirs are blank."""

    def __init__(
        self,
        whole: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        ones: frozenset[str] = frozenset(),
    ) -> None:
        """Take the shapes by name; what has none keeps its own. `ones` are blank with ones."""
        entries: dict[str, Entry] = {}
        for name, info in whole.infos.items():
            shape = shapes.get(name, info.shape)
            blank = Blank(shape, info.dtype, int(name in ones))
            entries[name] = whole.entries[name] if shape == info.shape else blank
        super().__init__(whole, entries=entries)
