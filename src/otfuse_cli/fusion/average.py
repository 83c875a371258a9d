"""The weighted average of aligned models, one tensor at a time (docs/methods/average.md).

F = anchor + sum_k w_k (aligned_k - anchor) in float32 (float64 if any input is), so that equal
values stay equal. Integer and bool tensors are never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.finite import is_finite
from ..errors import SolveFailed
from ..matching.alignment import Alignment
from ..matching.apply import transport
from ..matching.models import Model
from ..matching.width_weights import effective
from .repair import Models, Repair, fused_variance, row_norms


@dataclass(frozen=True)
class Aligned:
    """A source with its maps and its share of the average."""

    model: Model
    alignment: Alignment
    weight: float


def average(
    name: str,
    anchor: Model,
    sources: Sequence[Aligned],
    *,
    dtype: torch.dtype,
    repair: Repair | None = None,
    feeding: Callable[[str], Sequence[Aligned]] | None = None,
    device: str = "cpu",
) -> torch.Tensor:
    """One tensor of the fused model, stored as `dtype`, on `device`.

    Sources of weight 0 must not be among `sources`; the anchor has what they leave. With the
    whole weight on one source its tensor is moved, not computed with, and nothing is repaired.
    `feeding` gives the sources in the average of a layer that feeds a BatchNorm, where their
    weights are others.

    Raises:
        SolveFailed: The result doesn't fit `dtype` (overflow).
    """
    anchor_tensor = anchor.stored(name)
    if not anchor_tensor.is_floating_point() and not anchor_tensor.is_complex():
        return _kept(name, anchor_tensor, sources).to(device)
    if not sources:
        return stored(name, anchor_tensor, dtype, device)
    if len(sources) == 1 and sources[0].weight == 1.0:
        return stored(name, _moved(name, sources[0], anchor_tensor, exact=True), dtype, device)
    base = anchor.read(name)
    feed = name if repair is None else repair.means.get(name, name)
    shares = shares_of(feed, anchor, sources)
    rest = 1.0 - sum(shares)
    norms = None if base.is_complex() else row_norms(repair, name)
    if norms is not None:
        norms.add(rest, base)
    wide = base.is_complex() or base.dtype == torch.float64
    total: torch.Tensor | None = None
    for source, share in zip(sources, shares, strict=True):
        moved = _moved(name, source, base, exact=False)
        if moved.dtype == torch.float64 and not wide:
            base, wide = base.double(), True
            total = None if total is None else total.double()
        if norms is not None:
            norms.add(share, moved)
        # Differences from the anchor: where all values are equal, they are zero to the last bit.
        term = (moved.to(base.dtype) - base).mul_(share)
        total = term if total is None else total.add_(term)
    assert total is not None
    total.add_(base)
    if norms is not None:
        total = norms.restore(total)
    if repair is not None and name in repair.feeds:

        def counting(weight: str) -> Models:
            before = sources if feeding is None else feeding(weight)
            shares = shares_of(weight, anchor, before)
            models: list[tuple[Model, Alignment | None, float]] = []
            models.append((anchor, None, 1.0 - sum(shares)))
            for source, share in zip(before, shares, strict=True):
                models.append((source.model, source.alignment, share))
            return models

        total = fused_variance(total, name, repair.feeds[name], counting, restored=repair.rows)
    return stored(name, total, dtype, device)


def shares_of(name: str, anchor: Model, sources: Sequence[Aligned]) -> list[float]:
    """How much each source counts in the average of one tensor; the anchor has what they leave."""
    return effective(name, anchor.graph, [(s.alignment, s.weight) for s in sources])


def _kept(name: str, anchor_tensor: torch.Tensor, sources: Sequence[Aligned]) -> torch.Tensor:
    """Counters take the maximum, other integers and flags are the anchor's."""
    if name.rpartition(".")[2] != "num_batches_tracked":
        return anchor_tensor
    for source in sources:
        anchor_tensor = torch.maximum(
            anchor_tensor, source.model.stored(name).to(anchor_tensor.dtype)
        )
    return anchor_tensor


def _moved(name: str, source: Aligned, anchor: torch.Tensor, *, exact: bool) -> torch.Tensor:
    """The source's tensor on the anchor's units; `exact` keeps the bits of a hard-mapped one."""
    keep_bits = exact and source.alignment.hard
    tensor = source.model.stored(name) if keep_bits else source.model.read(name)
    if tensor.is_floating_point() and not keep_bits:
        anchor = anchor.to(tensor.device, tensor.dtype)
    return transport(tensor, name, source.model.graph, source.alignment, anchor=anchor)


def stored(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """A fused tensor as it is written, in its dtype: on the CPU, unless it is to be run.

    Raises:
        SolveFailed: A value is larger than the dtype can hold.
    """
    written = tensor.to(device, dtype)
    if dtype != tensor.dtype and not is_finite(written):
        raise SolveFailed(
            "a fused tensor overflows",
            where=f"{name}, stored as {str(dtype).removeprefix('torch.')}",
            why="a value is larger than the dtype can hold",
            fix="use --dtype float32",
        )
    return written


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to promote from: 8-bit floats take part in no promotion."""
    return torch.float32 if dtype.itemsize == 1 else dtype
