"""What a refit aims at: the parents' mean of a value, as far as the anchor's units can express it.

A permutation moves unit onto unit, and the mean of the two is between them. Where widths differ
(or a plan is soft) an anchor's unit stands beside a mean of several units of the source. Of k
unrelated units the mean has another place and another scale than any of them, and hardly
anything to do with the anchor's: aimed at in full it replaces what the unit was for by a blur that
nothing can make (docs/methods/refit.md, Soft maps). So it is brought to the mean and deviation that
the anchor's unit has, and counts by the share of it that the anchor's unit expresses, the square of
their correlation, and by how many units stand for one (`matching/width_weights.py`). What both
compute alike is averaged, the rest is the anchor's; outputs are no such units and count in full.

Legend: values keep their axes; moments have size 1 along all but those of the units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..graph.axes import axis_units, units_of
from ..matching.apply import transport_value
from ..running.execute import Walk
from .lockstep import Lockstep, Parent, Stop

# Samples from which correlations are taken: more say nothing new, and may cost another pass.
_ENOUGH = 500


@dataclass(frozen=True)
class _Beside:
    """How one source's value enters the target: `weight * (factor * value + shift - anchor)`."""

    weight: Tensor
    factor: Tensor
    shift: Tensor


def mean_target(lockstep: Lockstep, name: str, before: str) -> MeanTarget:
    """What to aim at, for a value that is looked at first where sources' units are blurred.

    An anchor without a share has nothing to express: then the source is aimed at in full.

    Args:
        lockstep: Its parents, the anchor first.
        name: The value.
        before: Where the fused network stands while it is looked at.
    """
    parents = lockstep.parents
    sums: dict[int, _Moments] = {}
    if parents[0].weight > 0:
        for at, parent in enumerate(parents[1:], start=1):
            blurred = _blurred(parent, name)
            if blurred:
                sums[at] = _Moments(blurred)
    if not sums:
        return MeanTarget({})
    look = _Compared(name, {at: moments.dims for at, moments in sums.items()})
    for seen in lockstep.each(look, [name], before, again=True, most=_ENOUGH):
        for at, moments in seen.items():
            sums[at].merge(moments)
    beside: dict[int, _Beside] = {}
    for at, moments in sums.items():
        beside[at] = moments.beside(parents[at].weight * _share(parents[at], name))
    return MeanTarget(beside)


@dataclass(frozen=True)
class _Compared:
    """Moments of sources beside the anchor's, of one batch.

    Attributes:
        name: Of the value.
        dims: Dimensions of the units, by source.
    """

    name: str
    dims: Mapping[int, tuple[int, ...]]

    def __call__(self, stop: Stop, parents: Sequence[Parent]) -> dict[int, _Moments]:
        """See `Look`."""
        value = stop.parents[0][self.name]
        anchor = stop.cut(value)
        seen: dict[int, _Moments] = {}
        for at, dims in self.dims.items():
            seen[at] = _Moments(dims)
            moved = _moved(parents[at], stop.parents[at], self.name, value)
            seen[at].add(anchor, stop.cut(moved))
        return seen


@dataclass(frozen=True)
class MeanTarget:
    """Weighted mean over the parents, each on the anchor's units; the anchor first.

    Attributes:
        beside: How sources enter whose units are blurred, by their place.
    """

    beside: Mapping[int, _Beside]

    def __call__(self, name: str, parents: Sequence[Parent], walks: Sequence[Walk]) -> Tensor:
        """What the fused network should have there."""
        anchor: Tensor = walks[0][name]
        mean = anchor
        for at, (parent, walk) in enumerate(zip(parents[1:], walks[1:], strict=True), start=1):
            value = _moved(parent, walk, name, anchor)
            beside = self.beside.get(at)
            if beside is None:
                mean = mean + parent.weight * (value - anchor)
            else:
                mean = mean + beside.weight * (beside.factor * value + beside.shift - anchor)
        return mean


def _moved(parent: Parent, walk: Walk, name: str, anchor: Tensor) -> Tensor:
    value: Tensor = walk[name]
    if parent.alignment is None:
        return value
    axes = parent.program.axes[name]
    return transport_value(value, axes, parent.graph, parent.alignment, anchor=anchor)


def _blurred(parent: Parent, name: str) -> tuple[int, ...]:
    """Dimensions of a value along which one unit is put together from several."""
    if parent.alignment is None:
        return ()
    maps, families = parent.alignment.maps, parent.alignment.families
    soft = {space for space, map in maps.items() if not map.hard}
    soft |= {space for space, inner in families.items() if not all(m.hard for m in inner)}
    dims: list[int] = []
    for dim, axis in enumerate(parent.program.axes[name]):
        if axis is not None and not soft.isdisjoint(axis_units(axis)):
            dims.append(dim)
    return tuple(dims)


def _share(parent: Parent, name: str) -> float:
    """How much a source counts by the units that stand for one; never more than in full."""
    assert parent.alignment is not None
    shares = parent.alignment.shares
    spaces = set(units_of(axis for axis in parent.program.axes[name] if axis is not None))
    return min(1.0, prod(shares.get(space, 1.0) for space in spaces))


class _Moments:
    """Sums over everything but the units, float64: of the anchor (a), of a source (b)."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims, self.count = dims, 0
        self.a = self.b = self.aa = self.bb = self.ab = torch.zeros(())

    def add(self, a: Tensor, b: Tensor) -> None:
        over = [d for d in range(a.dim()) if d not in self.dims]
        a, b = a.double(), b.double()
        self.count += prod(a.shape[d] for d in over)
        self.a = self.a.to(a) + a.sum(over, keepdim=True)
        self.b = self.b.to(a) + b.sum(over, keepdim=True)
        self.aa = self.aa.to(a) + a.square().sum(over, keepdim=True)
        self.bb = self.bb.to(a) + b.square().sum(over, keepdim=True)
        self.ab = self.ab.to(a) + (a * b).sum(over, keepdim=True)

    def merge(self, later: _Moments) -> None:
        """Take in those of a later batch."""
        self.count += later.count
        self.a, self.b = self.a.to(later.a) + later.a, self.b.to(later.a) + later.b
        self.aa, self.bb = self.aa.to(later.a) + later.aa, self.bb.to(later.a) + later.bb
        self.ab = self.ab.to(later.a) + later.ab

    def beside(self, weight: float) -> _Beside:
        """The source at the anchor's mean and deviation, by the square of the correlation."""
        a, b = self.a / self.count, self.b / self.count
        var_a = (self.aa / self.count - a.square()).clamp(min=0)
        var_b = (self.bb / self.count - b.square()).clamp(min=0)
        # Units that vary against each other have nothing in common to be averaged.
        together = (self.ab / self.count - a * b).clamp(min=0)
        moving = var_a * var_b > 0
        explained = torch.where(moving, together.square() / (var_a * var_b), 0.0).clamp(max=1)
        factor = torch.where(moving, (var_a / var_b).sqrt(), 0.0)
        values = (weight * explained, factor, a - factor * b)
        return _Beside(*(v.float() for v in values))
