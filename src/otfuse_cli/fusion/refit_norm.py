"""Closed-form refit of a BatchNorm that belongs to no layer: behind an activation, or on a sum.

Unit by unit a line through what it is given, toward what it should give. Its statistics become
those of what it is given; gain and shift are what is left, so that evaluation computes the line.

Legend: C units, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.analysis.fit_targets import NormFit
from .layer_looks import Aim
from .lockstep import Lockstep, Parent, Stop
from .ridge import UNTOUCHED


def fit_norm(
    fit: NormFit, lockstep: Lockstep, ridge: float, aim: Aim
) -> tuple[float, float] | None:
    """Fit a norm of the fused network, in place.

    Args:
        fit: Which.
        lockstep: The networks, standing before it.
        ridge: Pull toward the slope that it has.
        aim: What it should give.

    Returns:
        How far it missed the target before and after, relative to it; None where it was right.
    """
    fused = lockstep.fused
    assert isinstance(fused, dict)
    stored = {part: fused[name].double() for part, name in fit.norm.tensors.items()}
    slope_C = stored["weight"] * (stored["running_var"] + fit.norm.eps).rsqrt()
    shift_C = stored["bias"] - slope_C * stored["running_mean"]
    moments = _Moments()
    for seen in lockstep.each(_Look(fit, aim, slope_C, shift_C), [fit.target], fit.norm.node):
        moments.merge(seen)
    missed, target_square = float(moments.missed), float(moments.target)
    if missed <= UNTOUCHED**2 * target_square:
        return None
    mean_C, rest_C = moments.given_C / moments.rows, moments.rest_C / moments.rows
    power_C = moments.square_C / moments.rows
    variance_C = (power_C - mean_C.square()).clamp(min=0)
    pull_C = variance_C + ridge * power_C
    # A unit that says nothing (zero, or constant without a ridge) keeps its slope.
    together_C = moments.product_C / moments.rows - mean_C * rest_C
    step_C = torch.where(pull_C > 0, together_C / pull_C, 0.0)
    slope_C, shift_C = slope_C + step_C, shift_C + rest_C - step_C * mean_C
    for part, value_C in (
        ("running_mean", mean_C),
        ("running_var", variance_C),
        ("weight", slope_C * (variance_C + fit.norm.eps).sqrt()),
        ("bias", shift_C + slope_C * mean_C),
    ):
        name = fit.norm.tensors[part]
        fused[name] = value_C.to(fused[name])
    gone_C = rest_C.square() + 2 * step_C * together_C - step_C.square() * variance_C
    left = max(0.0, missed - moments.rows * float(gone_C.sum()))
    return (missed / target_square) ** 0.5, (left / target_square) ** 0.5


class _Moments:
    """Sums over rows, float64: of what is given, of what is missed, of their products."""

    def __init__(self) -> None:
        self.rows = 0
        self.target: Tensor | float = 0.0
        self.missed: Tensor | float = 0.0
        self.given_C = self.rest_C = self.square_C = self.product_C = torch.zeros(())

    def add(self, given_nC: Tensor, wanted_nC: Tensor, rest_nC: Tensor) -> None:
        self.rows += len(given_nC)
        self.target = self.target + wanted_nC.square().sum()
        self.missed = self.missed + rest_nC.square().sum()
        self.given_C = self.given_C.to(given_nC) + given_nC.sum(0)
        self.rest_C = self.rest_C.to(given_nC) + rest_nC.sum(0)
        self.square_C = self.square_C.to(given_nC) + given_nC.square().sum(0)
        self.product_C = self.product_C.to(given_nC) + (given_nC * rest_nC).sum(0)

    def merge(self, later: _Moments) -> None:
        """Take in those of a later batch."""
        self.rows += later.rows
        self.target = self.target + later.target
        self.missed = self.missed + later.missed
        self.given_C = self.given_C.to(later.given_C) + later.given_C
        self.rest_C = self.rest_C.to(later.given_C) + later.rest_C
        self.square_C = self.square_C.to(later.given_C) + later.square_C
        self.product_C = self.product_C.to(later.given_C) + later.product_C


@dataclass(frozen=True)
class _Look:
    """The moments of one batch.

    Attributes:
        fit: Of which norm.
        aim: Toward what.
        slope_C: What the norm does now.
        shift_C: What it adds now.
    """

    fit: NormFit
    aim: Aim
    slope_C: Tensor
    shift_C: Tensor

    def __call__(self, stop: Stop, parents: Sequence[Parent]) -> _Moments:
        """See `lockstep.Look`."""
        inputs = _rows(stop.cut(stop.fused[self.fit.norm.input]))
        wanted = _rows(stop.cut(self.aim(self.fit.target, parents, stop.parents)))
        moments = _Moments()
        moments.add(inputs, wanted, wanted - self.slope_C * inputs - self.shift_C)
        return moments


def _rows(value: Tensor) -> Tensor:
    """(samples, C, positions) as rows (n, C), float64."""
    return value.movedim(1, -1).reshape(-1, value.shape[1]).double()
