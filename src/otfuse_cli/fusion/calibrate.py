"""Statistics of the fused network brought to where they belong, on unlabelled inputs.

`bn`: running mean and variance of every BatchNorm are those of what it is given. `repair`: every
layer's outputs get the parents' mean and deviation, unit by unit (Jordan et al., REPAIR: the goal
is the weighted mean of the parents' means and of their deviations). Both go layer by layer, with
what was corrected before in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.analysis.batch_norms import Norm
from ..graph.analysis.fit_targets import Fit, NormFit, fits, norm_fits
from ..graph.trace.program import Program
from ..matching.apply import transport_value
from ..running.samples import Samples
from ..runtime import Runtime
from .far_lockstep import open_lockstep
from .lockstep import Parent, Stop
from .patches import along_outputs

_SMALL = 1e-12  # a deviation of a unit that says the same on every input: it has no scale


def re_estimate(
    program: Program,
    fused: dict[str, Tensor],
    samples: Samples,
    *,
    left: frozenset[str] = frozenset(),
    runtime: Runtime,
    most_bytes: int,
) -> bool:
    """Set every BatchNorm's running statistics, in place; False where there is none."""
    plan: list[Norm] = []
    every: list[Fit | NormFit] = [*fits(program)[0], *norm_fits(program)]
    for fit in every:
        if fit.norm is not None and left.isdisjoint(fit.norm.tensors.values()):
            plan.append(fit.norm)
    # In execution order: each norm is given what the corrected ones before it make.
    plan.sort(key=lambda norm: program.position[norm.node])
    lockstep = open_lockstep((), program, fused, samples, runtime=runtime, most_bytes=most_bytes)
    for at, norm in enumerate(plan):
        runtime.progress("calibrate", at, len(plan))
        moments = _Moments()
        for seen in lockstep.each(_Given(norm.input), (), norm.node):
            moments.merge(seen)
        for part, value in (("running_mean", moments.mean), ("running_var", moments.variance)):
            name = norm.tensors[part]
            fused[name] = value.to(fused[name])
    return bool(plan)


def rescale(
    parents: Sequence[Parent],
    program: Program,
    fused: dict[str, Tensor],
    samples: Samples,
    *,
    left: frozenset[str] = frozenset(),
    runtime: Runtime,
    most_bytes: int,
) -> bool:
    """Give every layer's outputs the parents' mean and deviation, in place.

    Layers without a bias are scaled only. The output layer is left alone.

    Args:
        parents: The anchor first.
        program: The fused network's.
        fused: Its tensors; changed.
        samples: Unlabelled inputs.
        left: Tensors that stay as they are.
        runtime: Device and progress.
        most_bytes: Memory for what stopped passes hold.
    """
    every: list[Fit | NormFit] = [*fits(program)[0], *norm_fits(program)]
    plan: list[Fit | NormFit] = []
    for fit in every:
        if _value(fit) not in program.outputs and left.isdisjoint(fit.tensors):
            plan.append(fit)
    plan.sort(key=lambda fit: program.position[_value(fit)])
    keep = frozenset(_value(fit) for fit in plan)
    lockstep = open_lockstep(
        parents, program, fused, samples, runtime=runtime, keep=keep, most_bytes=most_bytes
    )
    for at, fit in enumerate(plan):
        runtime.progress("calibrate", at, len(plan))
        value_name = _value(fit)
        fused_moments = _Moments()
        parent_moments = [_Moments() for _ in parents]
        first = fit.norm.node if isinstance(fit, NormFit) else fit.layer.node
        look = _Made(value_name, _channel(fit))
        for of_fused, of_parents in lockstep.each(look, [value_name], first):
            fused_moments.merge(of_fused)
            for moments, seen in zip(parent_moments, of_parents, strict=True):
                moments.merge(seen)
        goal = _goal(parents, parent_moments, value_name, _channel(fit))
        gain, shift = _correct(fit, fused, fused_moments, *goal)
        lockstep.adjust(value_name, gain, shift, channel=_channel(fit))
    return bool(plan)


@dataclass
class _Moments:
    """Sums over rows, float64."""

    count: int = 0
    total: Tensor | float = 0.0
    square: Tensor | float = 0.0

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        self.count += len(rows)
        self.total = self.total + rows.sum(0)
        self.square = self.square + rows.square().sum(0)

    def merge(self, later: _Moments) -> None:
        """Take in those of a later batch."""
        self.count += later.count
        self.total = self.total + later.total
        self.square = self.square + later.square

    @property
    def mean(self) -> Tensor:
        return torch.as_tensor(self.total / self.count)

    @property
    def variance(self) -> Tensor:
        return (torch.as_tensor(self.square / self.count) - self.mean.square()).clamp(min=0)


def _moments(value: Tensor, channel: int) -> _Moments:
    moments = _Moments()
    moments.add(_rows(value, channel))
    return moments


@dataclass(frozen=True)
class _Given:
    """Moments of what a norm of the fused network is given, in one batch."""

    name: str

    def __call__(self, stop: Stop, parents: Sequence[Parent]) -> _Moments:
        """See `lockstep.Look`."""
        return _moments(stop.cut(stop.fused[self.name]), 1)


@dataclass(frozen=True)
class _Made:
    """Moments of what all networks make somewhere, the fused one first, in one batch."""

    name: str
    channel: int

    def __call__(self, stop: Stop, parents: Sequence[Parent]) -> tuple[_Moments, list[_Moments]]:
        """See `lockstep.Look`."""
        of_fused = _moments(stop.cut(stop.fused.to(self.name)), self.channel)
        own = [_moments(stop.cut(walk[self.name]), self.channel) for walk in stop.parents]
        return of_fused, own


def _value(fit: Fit | NormFit) -> str:
    return fit.norm.node if fit.norm is not None else fit.layer.node


def _channel(fit: Fit | NormFit) -> int:
    return 1 if isinstance(fit, NormFit) or fit.layer.window is not None else -1


def _rows(value: Tensor, channel: int) -> Tensor:
    value = value.movedim(channel, -1)
    return value.reshape(-1, value.shape[-1])


def _goal(
    parents: Sequence[Parent], parent_moments: Sequence[_Moments], value_name: str, at: int
) -> tuple[Tensor, Tensor]:
    """Weighted mean of the parents' means and deviations, on the anchor's units."""
    mean = torch.zeros_like(parent_moments[0].mean)
    deviation = torch.zeros_like(mean)
    for parent, moments in zip(parents, parent_moments, strict=True):
        statistics = [moments.mean, moments.variance.sqrt()]
        if parent.alignment is not None:
            axis = (parent.program.axes[value_name][at],)
            kept = [parent_moments[0].mean, parent_moments[0].variance.sqrt()]
            for at_part, anchor in enumerate(kept):
                statistics[at_part] = transport_value(
                    statistics[at_part], axis, parent.graph, parent.alignment, anchor=anchor
                )
        mean = mean + parent.weight * statistics[0]
        deviation = deviation + parent.weight * statistics[1]
    return mean, deviation


def _correct(
    fit: Fit | NormFit, fused: dict[str, Tensor], moments: _Moments, mean: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale and shift the layer (or the norm after it); what that does to its outputs."""
    present = moments.variance.sqrt()
    gain = torch.where(present > _SMALL, deviation / present.clamp(min=_SMALL), 1.0)
    if fit.norm is not None:
        weight, bias = fit.norm.tensors["weight"], fit.norm.tensors["bias"]
        fused[weight] = (fused[weight].double() * gain).to(fused[weight])
    else:
        weight, layer_bias = fit.layer.weight, fit.layer.bias
        rows = along_outputs(gain, fused[weight], fit.layer)
        fused[weight] = (fused[weight].double() * rows).to(fused[weight])
        if layer_bias is None:
            return gain, torch.zeros_like(gain)
        bias = layer_bias
    shift = mean - gain * moments.mean
    fused[bias] = (gain * fused[bias].double() + shift).to(fused[bias])
    return gain, shift
