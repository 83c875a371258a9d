"""Part of a checkpoint, seen as one: some tensors only, of some the first rows only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from .open import Checkpoint


class View(Checkpoint):
    """The tensors `names` of a checkpoint, in its order, cut to `rows` on axis 0 where given.

    Hashes and reports like the checkpoint.
    """

    def __init__(self, whole: Checkpoint, names: set[str], rows: Mapping[str, int]) -> None:
        infos = {n: info for n, info in whole.infos.items() if n in names}
        super().__init__(
            contents=whole.contents,
            label=whole.label,
            container=whole.container,
            entries={n: whole.entries[n] for n in infos},
            aliases={n: others for n, others in whole.aliases.items() if n in infos},
        )
        self._whole = whole
        self._rows = rows
        self.infos = MappingProxyType(
            {
                n: replace(info, shape=(rows[n], *info.shape[1:])) if n in rows else info
                for n, info in infos.items()
            }
        )

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
