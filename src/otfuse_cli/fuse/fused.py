"""The fused model, one tensor at a time: what is averaged, with which weights, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..align.models import Model
from .average import Aligned, average, stored
from .repair import Repair
from .rows import RowAverage, by_rows
from .selection import Selection


@dataclass(frozen=True)
class Fused:
    """All that decides the tensors of the output.

    Attributes:
        whole: The anchor, whose tensors the output has.
        anchor: The part of it that all models have; `whole` itself where that is all of it.
        sources: The other models, aligned.
        selection: Which tensors are averaged, and how.
        repair: What is restored after averaging.
        better: Tensors that are no longer the average's (refit, calibration).
    """

    whole: Model
    anchor: Model
    sources: Sequence[Aligned]
    selection: Selection
    repair: Repair | None = None
    better: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, name: str, *, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, stored as `dtype`, on the CPU.

        Raises:
            SolveFailed: It doesn't fit `dtype` (overflow).
        """
        if name in self.better:
            return stored(name, self.better[name], dtype)
        blocks = self._by_rows(name)
        if blocks is not None:
            return blocks.whole(dtype)
        sources = self.selection.of(name, self.sources)
        if not sources:
            return average(name, self.whole, (), dtype=dtype)
        fused = average(
            name,
            self.anchor,
            sources,
            dtype=dtype,
            repair=self.repair,
            feeding=lambda weight: self.selection.of(weight, self.sources),
        )
        whole = self.whole.checkpoint.infos[name].shape
        if tuple(fused.shape) == whole:
            return fused
        # Only the rows that all models have were averaged (--vocab common).
        kept = average(name, self.whole, (), dtype=dtype)
        return torch.cat([fused, kept[len(fused) :]])

    def blocks(self, name: str, *, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]] | None:
        """The same by blocks of rows, each with its first row, where that needs no more memory.

        None for tensors that have to be had as a whole.
        """
        if name in self.better:
            return None
        found = self._by_rows(name)
        return None if found is None else found.blocks(dtype)

    def _by_rows(self, name: str) -> RowAverage | None:
        sources = self.selection.of(name, self.sources)
        anchor = self.anchor if sources else self.whole
        if anchor.checkpoint.infos[name].shape != self.whole.checkpoint.infos[name].shape:
            return None
        return by_rows(name, anchor, sources, self.repair)
