"""The fused model, one tensor at a time: what is averaged, with which weights, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..graph.derived_tensors import POWER
from ..graph.model import Derived
from ..matching.models import Model
from .average import Aligned, average, stored
from .recompute import renewed
from .relations import computed
from .repair import Repair
from .row_blocks import RowAverage, by_rows
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
    _renewed: dict[tuple[str, torch.dtype], torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def _derived(self) -> dict[str, Derived]:
        by_name: dict[str, Derived] = {}
        for derived in self.anchor.graph.derived:
            by_name.update(dict.fromkeys(derived.tensors, derived))
        return by_name

    def tensor(self, name: str, *, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """One tensor, stored as `dtype`, on `device`.

        Raises:
            SolveFailed: It doesn't fit `dtype` (overflow).
        """
        if name in self._derived:
            return self._recomputed(name, dtype).to(device)
        if name in self.better:  # fitted or calibrated: the average is only where that began
            return stored(name, self.better[name], dtype, device)
        blocks = self._by_rows(name)
        if blocks is not None:
            return blocks.whole(dtype, device)
        sources = self.selection.of(name, self.sources)
        if not sources:
            return average(name, self.whole, (), dtype=dtype, device=device)
        fused = average(
            name,
            self.anchor,
            sources,
            dtype=dtype,
            repair=self.repair,
            feeding=lambda weight: self.selection.of(weight, self.sources),
            device=device,
        )
        whole = self.whole.checkpoint.infos[name].shape
        if tuple(fused.shape) == whole:
            return fused
        # Only the rows that all models have were averaged (--vocab common).
        kept = average(name, self.whole, (), dtype=dtype, device=device)
        return torch.cat([fused, kept[len(fused) :]])

    def blocks(self, name: str, *, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]] | None:
        """The same by blocks of rows, each with its first row, where that needs no more memory.

        None for tensors that have to be had as a whole.
        """
        if name in self.better or name in self._derived:
            return None
        row_average = self._by_rows(name)
        return None if row_average is None else row_average.blocks(dtype)

    def can_be_sent(self, name: str) -> bool:
        """Whether a tensor is made of files alone, so that another process can make it."""
        return name not in self.better and not (self.better and name in self._derived)

    def _recomputed(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that is a function of a fused one: of that as it is stored.

        Where the fused weight is one model's own, so is what belongs to it, converged or not.
        """
        derived = self._derived[name]
        sources = self.selection.of(derived.source, self.sources)
        infos = self.whole.checkpoint.infos
        keep = dtype == infos[name].dtype
        values: dict[str, torch.Tensor] = {}
        for source in derived.sources:
            as_stored = keep or not infos[source].dtype.is_floating_point
            values[source] = self.tensor(source, dtype=infos[source].dtype if as_stored else dtype)
        if self.better.keys().isdisjoint(values):
            if len(sources) == 1 and sources[0].weight == 1.0:
                return average(name, self.anchor, sources, dtype=dtype)
            # What belongs to the anchor's weight fits it better than anything computed here.
            if all(torch.equal(t, self._own(n, t.dtype)) for n, t in values.items()):
                return self._own(name, dtype)
        if derived.kind != POWER:
            value = computed(derived, {n: t.double() for n, t in values.items()})
            return stored(name, value, dtype)
        if (name, dtype) not in self._renewed:
            parts = {part: self.whole.read(n) for part, n in derived.parts.items()}
            for n, tensor in renewed(derived, values[derived.source], parts).items():
                self._renewed[n, dtype] = stored(n, tensor, dtype)
        return self._renewed.pop((name, dtype))

    def _own(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return average(name, self.whole, (), dtype=dtype)

    def _by_rows(self, name: str) -> RowAverage | None:
        sources = self.selection.of(name, self.sources)
        anchor = self.anchor if sources else self.whole
        if anchor.checkpoint.infos[name].shape != self.whole.checkpoint.infos[name].shape:
            return None
        return by_rows(name, anchor, sources, self.repair)
