"""Closed-form refit: each layer of the average, on its own inputs, toward the parents' mean.

Layer by layer in execution order, parents and fused network in lock step (docs/methods/refit.md).
No labels, no gradients; weights stay near the average where inputs say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..graph.analysis.batch_norms import Norm
from ..graph.analysis.fit_targets import Fit, NormFit, fits, norm_fits, scores
from ..graph.trace.program import Program
from ..running.samples import Samples
from ..runtime import Runtime
from .counted_rows import Counted
from .far_lockstep import open_lockstep
from .layer_looks import (
    Aim,
    Changing,
    Counting,
    FirstMean,
    RawRows,
    Shape,
    fit_target,
    row_counts,
)
from .lockstep import Lockstep, Parent, Tensors
from .output_ridge import OutputRidge, affordable
from .patches import Rows, along_outputs, rows_of
from .rectified import behind_relu
from .refit_norm import fit_norm
from .ridge import Ridge, RidgeFit
from .target import mean_target

# From a fit and its number of rows: how often each position counts (None: all once), the ridge.
Stress = Callable[[Fit, int], tuple[Tensor | None, float]]

# Rows of a layer: this many for each of its inputs, and never fewer than these in all; where there
# are more, positions are drawn (docs/methods/refit.md).
_ROWS_EACH, _ROWS_LEAST = 24, 120_000
# Bytes of a number, and copies of the rows of a batch while they are counted.
_FLOAT, _ROW_COPIES = 4, 4


@dataclass(frozen=True)
class Refitted:
    """How a layer's miss of its target has changed, relative to the target."""

    layer: str
    before: float
    after: float


def refit(
    parents: Sequence[Parent],
    program: Program,
    fused: dict[str, Tensor],
    samples: Samples,
    *,
    ridge: float,
    left: frozenset[str] = frozenset(),
    runtime: Runtime,
    most_bytes: int,
    aim: Aim | None = None,
    stress: Stress | None = None,
    rows: float = 1.0,
    fresh: Tensors | None = None,
) -> tuple[list[Refitted], tuple[str, ...]]:
    """Fit every layer of `fused`, and every BatchNorm that belongs to none, in place.

    Args:
        parents: The anchor first; their weights sum to 1.
        program: The fused network's.
        fused: The average after repair, float32 by name on the device; changed.
        samples: Unlabelled inputs.
        ridge: Pull toward the average, in mean squares of the inputs.
        left: Tensors that stay as they are.
        runtime: Device, seed, progress.
        most_bytes: Memory for what stopped passes hold.
        aim: What a value should be, from the parents'; None for their mean (`target`).
        stress: What counts more in a layer's fit, and its ridge; None for all alike, and `ridge`.
        rows: Share of the rows that a fit takes where there are many.
        fresh: By weight, which outputs of a layer have no weights to begin with.

    Returns:
        What was fitted, and tensors that were left alone because they are used twice or tied.

    Raises:
        SolveFailed: A singular fit.
    """
    layers, shared = fits(program)
    every: list[Fit | NormFit] = [*layers, *norm_fits(program)]
    plan = [fit for fit in every if left.isdisjoint(fit.tensors)]
    plan.sort(key=lambda fit: program.position[_place(fit)])
    keep = frozenset(fit.target for fit in plan)
    lockstep = open_lockstep(
        parents, program, fused, samples, runtime=runtime, keep=keep, most_bytes=most_bytes
    )
    done: list[Refitted] = []
    weigh = stress or (lambda fit, rows: (None, ridge))
    for at, fit in enumerate(plan):
        runtime.progress("refit", at, len(plan))
        toward = mean_target(lockstep, fit.target, _place(fit)) if aim is None else aim
        # A salt for each layer: its rows do not depend on what was fitted before.
        draw = runtime.generator(7_000_000 + at)
        if isinstance(fit, NormFit):
            refitted = _fit_norm(fit, lockstep, ridge, toward)
        else:
            refitted = _fit(
                fit, lockstep, weigh, draw, toward, rows, (fresh or {}).get(fit.layer.weight)
            )
        if refitted is not None:
            done.append(refitted)
    runtime.progress("refit", len(plan), len(plan))
    return done, shared


def _fit(
    fit: Fit,
    lockstep: Lockstep,
    stress: Stress,
    generator: torch.Generator,
    aim: Aim,
    share: float,
    fresh_O: Tensor | None,
) -> Refitted | None:
    system: _System | None = None
    relu = behind_relu(lockstep.program, fit.target)
    if lockstep.away:
        system = _count_away(fit, lockstep, stress, generator, share, aim, again=relu)
    else:
        for stop in lockstep.stops([fit.target], fit.layer.node, again=relu):
            target = fit_target(fit, lockstep.parents, stop, aim)
            if system is None:
                shape = tuple(target.shape[1:])
                system = _begin(fit, lockstep, stress, generator, share, shape)
            system.add(stop.cut(stop.fused[fit.layer.input]), target)
    assert system is not None
    solution = system.solved(fresh_O, changes=relu)
    if solution is None:
        lockstep.release([fit.target])
        return None
    if relu:
        solution = _through_relu(system, solution, lockstep, aim)
    system.prior.write(system.rows, solution)
    return Refitted(fit.name, solution.before, solution.after)


def _through_relu(system: _System, solution: RidgeFit, lockstep: Lockstep, aim: Aim) -> RidgeFit:
    """The fit to what a ReLU behind the layer hands on (`rectified`)."""
    fit, sums = system.fit, system.sums
    if isinstance(sums, OutputRidge):  # scores are not cut off
        lockstep.release([fit.target])
        return solution
    look = Changing(system.counting(aim), solution)
    for change in lockstep.each(look, [fit.target], fit.layer.node, memory=system.memory):
        sums.take_change(*change)
    return sums.solve_changed(solution)


def _count_away(
    fit: Fit,
    lockstep: Lockstep,
    stress: Stress,
    generator: torch.Generator,
    share: float,
    aim: Aim,
    *,
    again: bool,
) -> _System:
    """The fit of a layer with all its rows, which are counted in other processes.

    The first batch tells the shape of the target, and what all take from their inputs.
    """
    where = [fit.target], fit.layer.node
    shape = next(iter(lockstep.each(Shape(fit, aim), *where, again=True, most=1)))
    system = _begin(fit, lockstep, stress, generator, share, shape)
    look = system.counting(aim)
    if look.prior is not None and not look.prior.dual:
        mean = next(iter(lockstep.each(FirstMean(look), *where, again=True, most=1)))
        look = replace(look, prior=replace(look.prior, shift_gD=mean))
    for part in lockstep.each(look, *where, again=again, memory=system.memory):
        system.take(part)
    return system


def _begin(
    fit: Fit,
    lockstep: Lockstep,
    stress: Stress,
    generator: torch.Generator,
    share: float,
    shape: tuple[int, ...],
) -> _System:
    """The fit of a layer before its first rows; `shape` is that of its target for a sample."""
    fused, samples = lockstep.fused, lockstep.samples.count
    assert isinstance(fused, dict)
    weight = fused[fit.layer.weight]
    most = int(share * max(_ROWS_LEAST, _ROWS_EACH * weight[0].numel())) // samples
    rows = rows_of(fit.layer, weight, shape, most=max(1, most), generator=generator)
    # Places of one sample: everything but its channels, unless fewer were drawn.
    channels = shape[0 if fit.layer.window is not None else -1]
    places = max(1, torch.Size(shape).numel() // max(1, channels))
    if rows.places is not None:
        places = len(rows.places)
    count = samples * places
    counts_P, ridge = stress(fit, count)
    if counts_P is not None and rows.places is not None:
        counts_P = counts_P[rows.places]
    prior = _Folded(fit, fused)
    flat = rows.flat_weight(prior.weight)
    bias = None if prior.bias is None else prior.bias.view(rows.groups, -1)
    scored = fit.norm is None and fit.target == scores(lockstep.program)
    apart = scored and rows.groups == 1 and affordable(count, flat.shape[2], flat.shape[1])
    sums = OutputRidge(flat, bias) if apart else Ridge(flat, bias, rows=count)
    of_batch = -(-count // lockstep.batches)
    inputs = flat[:, 0].numel()
    memory = _FLOAT * inputs * (_ROW_COPIES * of_batch + 2 * flat.shape[2])
    return _System(fit, prior, rows, sums, counts_P, ridge, memory)


@dataclass(frozen=True)
class _System:
    """The fit of one layer, while its rows are collected.

    Attributes:
        fit: What is fitted.
        prior: The layer as it is.
        rows: Which of its rows count.
        sums: Of those so far.
        counts_P: How often each place of a sample counts; None for all once.
        ridge: The pull toward the prior.
        memory: Bytes that counting a batch takes.
    """

    fit: Fit
    prior: _Folded
    rows: Rows
    sums: Ridge | OutputRidge
    counts_P: Tensor | None
    ridge: float
    memory: int

    def add(self, values: Tensor, target: Tensor) -> None:
        """Count what the layer reads in one batch, and what it should give."""
        wanted = self.rows.outputs(target)
        self.sums.add(self.rows.inputs(values), wanted, row_counts(self.counts_P, wanted))

    def counting(self, aim: Aim) -> Counting:
        """The same as a look at a batch, whose rows are then taken."""
        prior = self.sums.prior if isinstance(self.sums, Ridge) else None
        return Counting(self.fit, aim, self.rows, prior, self.counts_P)

    def take(self, part: Counted | RawRows) -> None:
        """Count what was counted apart."""
        if isinstance(part, Counted):
            assert isinstance(self.sums, Ridge)
            self.sums.take(part)
        else:
            self.sums.add(*part)

    def solved(self, fresh_O: Tensor | None, *, changes: bool) -> RidgeFit | None:
        """The solution; None where the layer is right already."""
        fresh_gO = None
        if fresh_O is not None:
            outputs = self.rows.flat_weight(self.prior.weight).shape[1]
            fresh_gO = fresh_O.to(self.prior.weight.device).view(self.rows.groups, -1)
            fresh_gO = fresh_gO.expand(-1, outputs)
        return self.sums.solve(self.ridge, where=self.fit.name, changes=changes, fresh_gO=fresh_gO)


def _fit_norm(fit: NormFit, lockstep: Lockstep, ridge: float, aim: Aim) -> Refitted | None:
    misses = fit_norm(fit, lockstep, ridge, aim)
    return None if misses is None else Refitted(fit.name, *misses)


def _place(fit: Fit | NormFit) -> str:
    """The value before which the fused network stops."""
    return fit.norm.node if isinstance(fit, NormFit) else fit.layer.node


class _Folded:
    """A layer with the BatchNorm that follows it folded in: the prior, and the way back."""

    def __init__(self, fit: Fit, fused: dict[str, Tensor]) -> None:
        self.fit, self.fused = fit, fused
        self.stored = fused[fit.layer.weight]
        weight = self.stored
        bias = None if fit.layer.bias is None else fused[fit.layer.bias]
        if fit.norm is not None:
            gain, shift = self._gain_and_shift(fit.norm)
            weight = weight * along_outputs(gain, weight, fit.layer)
            bias = shift if bias is None else shift + gain * bias
        self.weight, self.bias = weight, bias

    def _gain_and_shift(self, norm: Norm) -> tuple[Tensor, Tensor]:
        mean, var, gain, shift = (
            self.fused[norm.tensors[part]]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        gain = gain * (var + norm.eps).rsqrt()
        return gain, shift - gain * mean

    def write(self, rows: Rows, solution: RidgeFit) -> None:
        """Store a solution; a BatchNorm gets the statistics that its units now have."""
        layer, norm = self.fit.layer, self.fit.norm
        flat = solution.weight_gOD
        bias = None if solution.bias_gO is None else solution.bias_gO.flatten()
        if norm is not None:
            assert bias is not None
            flat = self._unfold(rows, solution, flat, bias)
        elif layer.bias is not None:
            assert bias is not None
            self.fused[layer.bias] = bias.to(self.fused[layer.bias])
        self.fused[layer.weight] = rows.full_weight(flat, self.stored).to(self.stored)

    def _unfold(self, rows: Rows, solution: RidgeFit, flat: Tensor, bias: Tensor) -> Tensor:
        """Split a folded solution: rows as long as the average's, statistics as they are.

        With c the factor that brings a row back to that length, mean m and variance v of its
        outputs: running mean c m, running variance c^2 v, gain sqrt(c^2 v + eps) / c, shift
        bias + m. What evaluation computes is `H W^T + bias`, and what training would normalise by
        are the stored statistics.
        """
        norm = self.fit.norm
        assert norm is not None
        average = rows.flat_weight(self.stored).double()
        length, wanted = flat.norm(dim=2), average.norm(dim=2)
        factor = torch.where((length > 0) & (wanted > 0), wanted / length, 1.0)
        mean = (factor * solution.mean_gO).flatten()
        variance = (factor.square() * solution.variance_gO).flatten()
        stored = {part: self.fused[name] for part, name in norm.tensors.items()}
        layer_bias = (
            0.0 if self.fit.layer.bias is None else self.fused[self.fit.layer.bias].double()
        )
        gain = (variance + norm.eps).sqrt() / factor.flatten()
        shift = bias + solution.mean_gO.flatten()
        for part, value in (
            ("running_mean", mean + layer_bias),
            ("running_var", variance),
            ("weight", gain),
            ("bias", shift),
        ):
            self.fused[norm.tensors[part]] = value.to(stored[part])
        return flat * factor[..., None]
