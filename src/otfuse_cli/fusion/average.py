"""The weighted average of aligned models, one tensor at a time (docs/methods/average.md).

F = anchor + sum_k w_k (aligned_k - anchor) in float32 (float64 if any input is), so that equal
values stay equal. Integer and bool tensors are never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.open import is_finite
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
) -> torch.Tensor:
    """One tensor of the fused model, stored as `dtype`, on the CPU.

    Sources of weight 0 must not be among `sources`; the anchor has what they leave. With the
    whole weight on one source its tensor is moved, not computed with, and nothing is repaired.
    `feeding` gives the sources in the average of a layer that feeds a BatchNorm, where their
    weights are others.

    Raises:
        SolveFailed: The result doesn't fit `dtype` (overflow).
    """
    own = anchor.stored(name)
    if not own.is_floating_point() and not own.is_complex():
        return _kept(name, own, sources)
    if not sources:
        return stored(name, own, dtype)
    if len(sources) == 1 and sources[0].weight == 1.0:
        return stored(name, _moved(name, sources[0], own, exact=True), dtype)
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
        term = (moved.to(base.dtype) - base).mul_(share)
        total = term if total is None else total.add_(term)
    assert total is not None
    total.add_(base)
    if norms is not None:
        total = norms.restore(total)
    if repair is not None and name in repair.feeds:

        def models(weight: str) -> Models:
            before = sources if feeding is None else feeding(weight)
            shares = shares_of(weight, anchor, before)
            moving = [(s.model, s.alignment, w) for s, w in zip(before, shares, strict=True)]
            return [(anchor, None, 1.0 - sum(shares)), *moving]

        total = fused_variance(total, name, repair.feeds[name], models, restored=repair.rows)
    return stored(name, total, dtype)


def shares_of(name: str, anchor: Model, sources: Sequence[Aligned]) -> list[float]:
    """How much each source counts in the average of one tensor; the anchor has what they leave."""
    return effective(name, anchor.graph, [(s.alignment, s.weight) for s in sources])


def _kept(name: str, own: torch.Tensor, sources: Sequence[Aligned]) -> torch.Tensor:
    """Counters take the maximum, other integers and flags are the anchor's."""
    if name.rpartition(".")[2] != "num_batches_tracked":
        return own
    for source in sources:
        own = torch.maximum(own, source.model.stored(name).to(own.dtype))
    return own


def _moved(name: str, source: Aligned, anchor: torch.Tensor, *, exact: bool) -> torch.Tensor:
    """The source's tensor on the anchor's units; `exact` keeps the bits of a hard-mapped one."""
    keep_bits = exact and source.alignment.hard
    tensor = source.model.stored(name) if keep_bits else source.model.read(name)
    if tensor.is_floating_point() and not keep_bits:
        anchor = anchor.to(tensor.device, tensor.dtype)
    return transport(tensor, name, source.model.graph, source.alignment, anchor=anchor)


def stored(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fused tensor as it is written: on the CPU, in its dtype.

    Raises:
        SolveFailed: A value is larger than the dtype can hold.
    """
    found = tensor.to("cpu", dtype)
    if dtype != tensor.dtype and not is_finite(found):
        raise SolveFailed(
            "a fused tensor overflows",
            where=f"{name}, stored as {str(dtype).removeprefix('torch.')}",
            why="a value is larger than the dtype can hold",
            fix="use --dtype float32",
        )
    return found


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to promote from: 8-bit floats take part in no promotion."""
    return torch.float32 if dtype.itemsize == 1 else dtype
