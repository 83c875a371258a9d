"""Part of a checkpoint, seen as one: some tensors only, of some the first rows only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from .derived import DerivedCheckpoint
from .open import Checkpoint


class View(DerivedCheckpoint):
    """The tensors `names` of a checkpoint, in its order, cut to `rows` on axis 0 where given."""

    def __init__(self, whole: Checkpoint, names: set[str], rows: Mapping[str, int]) -> None:
        super().__init__(
            whole,
            entries={name: whole.entries[name] for name in whole.infos if name in names},
            aliases={name: same for name, same in whole.aliases.items() if name in names},
        )
        self._whole = whole
        self._rows = rows
        infos = {name: whole.infos[name] for name in self.entries}
        for name in infos.keys() & rows.keys():
            infos[name] = replace(infos[name], shape=(rows[name], *infos[name].shape[1:]))
        self.infos = MappingProxyType(infos)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, or its first rows: on the CPU, in its stored dtype, contiguous."""
        if name not in self.infos:
            raise KeyError(name)
        tensor = self._whole.read(name)
        return tensor[: self._rows[name]].clone() if name in self._rows else tensor

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """See `Checkpoint`: rows beyond the cut don't exist."""
        if name not in self.infos:
            raise KeyError(name)
        return self._whole.read_rows(name, first, min(last, self._rows.get(name, last)))
