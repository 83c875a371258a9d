"""A fused tensor by blocks of rows: what can be averaged without having all of it at once.

Where every source moves by indices alone, rows of the average come from the same rows of the anchor
and from picked rows of the sources. Blocks are small enough to stay in the processor's cache, and
the same for a tensor of a given shape, so that its bits depend on nothing else.

Legend: R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..matching.apply import row_indices
from ..matching.models import Model
from .average import Aligned, shares_of, stored, wide
from .repair import Repair, RowNorms, length_scale

Note = Callable[[float, torch.Tensor], None]

# Numbers in a block: in float32 a MiB, less than what the allocator maps anew each time
# (runtime.py).
_BLOCK = 1 << 18
# Stored sources up to this size (all of a tensor together) are read at once, larger ones row by
# row; a run of rows that stay together is one read.
_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class _Part:
    """One source of the average of a tensor, its share there, and the indices that move it."""

    source: Aligned
    share: float
    indices: tuple[torch.Tensor | None, ...]
    whole: torch.Tensor | None

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Aligned rows, in the dtype of the file."""
        order = self.indices[0]
        model = self.source.model
        if order is None:
            rows = model.stored_rows(name, first, last)
        elif self.whole is not None:
            rows = self.whole.index_select(0, order[first:last])
        else:
            runs = _runs(order[first:last].tolist())
            rows = torch.cat([model.stored_rows(name, a, b) for a, b in runs])
        for dim, index in enumerate(self.indices[1:], 1):
            if index is not None:
                rows = rows.index_select(dim, index)
        return rows


class RowAverage:
    """The average of one tensor, block by block."""

    def __init__(
        self,
        name: str,
        anchor: Model,
        parts: Sequence[_Part],
        repair: Repair | None,
    ) -> None:
        self._name, self._anchor, self._parts = name, anchor, parts
        self._shape = anchor.checkpoint.infos[name].shape
        self._rest = 1.0 - sum(part.share for part in parts)
        self._kept = not parts
        self._copied = len(parts) == 1 and parts[0].source.weight == 1.0
        averaged = not (self._kept or self._copied)
        self._by_row = averaged and repair is not None and name in repair.rows
        self._by_tensor = averaged and repair is not None and name in repair.outputs

    def whole(self, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """All blocks together."""
        tensor = torch.empty(self._shape, dtype=dtype, device=device)
        for first, rows in self.blocks(dtype, device):
            tensor[first : first + len(rows)] = rows
        return tensor

    def blocks(self, dtype: torch.dtype, device: str = "cpu") -> Iterator[tuple[int, torch.Tensor]]:
        """First row and values of each block, stored as `dtype`, on `device`.

        Raises:
            SolveFailed: The result doesn't fit `dtype` (overflow).
        """
        scale = self._tensor_scale() if self._by_tensor else 1.0
        for first, last in self._bounds():
            if self._kept:
                rows = self._anchor.stored_rows(self._name, first, last)
            elif self._copied:
                rows = self._parts[0].rows(self._name, first, last)
            elif self._by_row:
                norms = RowNorms(0)
                rows = norms.restore(self._average(first, last, norms.add))
            else:
                rows = self._average(first, last)
                rows = rows if scale == 1.0 else rows.mul_(scale)
            yield first, stored(self._name, rows, dtype, device)

    def _tensor_scale(self) -> float:
        """One factor for an output layer; its blocks are averaged twice for it."""
        squares: dict[str, torch.Tensor] = {}
        shares: list[float] = []

        def note(weight: float, tensor: torch.Tensor) -> None:
            shares.append(weight)
            add(f"model {len(shares)}", tensor)

        def add(whose: str, tensor: torch.Tensor) -> None:
            square = torch.linalg.vector_norm(tensor, dtype=torch.float64).square_()
            squares[whose] = squares[whose] + square if whose in squares else square

        for first, last in self._bounds():
            shares.clear()
            add("fused", self._average(first, last, note))
        fused_length = squares.pop("fused").sqrt()
        lengths: list[torch.Tensor] = []
        for square, share in zip(squares.values(), shares, strict=True):
            lengths.append(square.sqrt() * share)
        return float(length_scale(torch.stack(lengths).sum(), fused_length))

    def _bounds(self) -> Iterator[tuple[int, int]]:
        count = self._shape[0]
        width = max(1, torch.Size(self._shape[1:]).numel())
        step = max(1, _BLOCK // width)
        for first in range(0, count, step):
            yield first, min(first + step, count)

    def _average(self, first: int, last: int, note: Note | None = None) -> torch.Tensor:
        """Average of some rows; `note` sees the share and the aligned rows of every model."""
        base = self._wide(self._anchor.stored_rows(self._name, first, last))
        if note is not None:
            note(self._rest, base)
        total: torch.Tensor | None = None
        for part in self._parts:
            moved = self._wide(part.rows(self._name, first, last))
            if moved.dtype == torch.float64 and base.dtype != torch.float64:
                base = base.double()
                total = None if total is None else total.double()
            if note is not None:
                note(part.share, moved)
            term = (moved.to(base.dtype) - base).mul_(part.share)
            total = term if total is None else total.add_(term)
        assert total is not None
        return total.add_(base)

    def _wide(self, rows: torch.Tensor) -> torch.Tensor:
        """As `Model.read`: for computing, on the device."""
        return rows.to(self._anchor.device, torch.promote_types(torch.float32, wide(rows.dtype)))


def by_rows(
    name: str, anchor: Model, sources: Sequence[Aligned], repair: Repair | None
) -> RowAverage | None:
    """The average of a tensor by rows; None for one that has to be had as a whole.

    That are those without rows, those that no average is taken of (integers) or another one
    (BatchNorm variances), those that soft maps mix, and those of a part of the anchor's rows.
    """
    info = anchor.checkpoint.infos[name]
    if not info.numel or not info.shape or not info.dtype.is_floating_point:
        return None
    if repair is not None and (name in repair.feeds or repair.rows.get(name, 0) != 0):
        return None
    parts = []
    feed = name if repair is None else repair.means.get(name, name)
    for source, share in zip(sources, shares_of(feed, anchor, sources), strict=True):
        model = source.model
        source_info = model.checkpoint.infos[name]
        indices = row_indices(name, model.graph, source.alignment)
        if (
            indices is None
            or source_info.shape != info.shape
            or not source_info.dtype.is_floating_point
        ):
            return None
        small = source_info.nbytes * len(sources) <= _AT_ONCE
        whole = model.stored(name) if indices[0] is not None and small else None
        parts.append(_Part(source, share, indices, whole))
    return RowAverage(name, anchor, parts, repair)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows in order as ranges of those that follow one another."""
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[first], rows[at - 1] + 1
            first = at
