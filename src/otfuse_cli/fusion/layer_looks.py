"""What a fit of a layer wants to know of a batch: looks that can be taken in any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..graph.analysis.fit_targets import Fit
from ..running.execute import Walk
from .counted_rows import Counted, Prior
from .lockstep import Parent, Stop
from .patches import Rows
from .rectified import target_change
from .ridge import RidgeFit

# What a value of the fused network should be, from the parents' values of that name.
Aim = Callable[[str, Sequence[Parent], Sequence[Walk]], Tensor]
# Inputs, targets, and how often each row counts, as a fit takes them.
RawRows = tuple[Tensor, Tensor, Tensor | None]


def fit_target(fit: Fit, parents: Sequence[Parent], stop: Stop, aim: Aim) -> Tensor:
    """What the fused network should have behind a layer in a batch, less `minus`."""
    wanted = aim(fit.target, parents, stop.parents)
    if fit.minus is not None:
        wanted = wanted - stop.fused[fit.minus]
    return stop.cut(wanted)


def row_counts(counts_P: Tensor | None, wanted_gnO: Tensor) -> Tensor | None:
    """How often each row of a batch counts; None for all once."""
    if counts_P is None:
        return None
    return counts_P.repeat(wanted_gnO.shape[1] // len(counts_P))


@dataclass(frozen=True)
class Shape:
    """Of the target of one sample."""

    fit: Fit
    aim: Aim

    def __call__(self, stop: Stop, parents: Sequence[Parent]) -> tuple[int, ...]:
        """See `Look`."""
        return tuple(fit_target(self.fit, parents, stop, self.aim).shape[1:])


@dataclass(frozen=True)
class Counting:
    """Counts the rows of a layer.

    Attributes:
        fit: Of which layer.
        aim: Toward what.
        rows: Which of its rows count.
        prior: Where the fit begins; None for one that takes rows as they are.
        counts_P: How often each place of a sample counts; None for all once.
    """

    fit: Fit
    aim: Aim
    rows: Rows
    prior: Prior | None
    counts_P: Tensor | None

    def __call__(self, stop: Stop, parents: Sequence[Parent]) -> Counted | RawRows:
        """See `Look`."""
        inputs, wanted = self.of(stop, parents)
        counts_n = row_counts(self.counts_P, wanted)
        if self.prior is None:
            return inputs, wanted, counts_n
        counted = self.prior.counted(inputs, wanted, counts_n)
        return counted if self.prior.dual else counted.multiplied()

    def of(self, stop: Stop, parents: Sequence[Parent]) -> tuple[Tensor, Tensor]:
        """Rows of inputs and of targets."""
        target = fit_target(self.fit, parents, stop, self.aim)
        inputs = self.rows.inputs(stop.cut(stop.fused[self.fit.layer.input]))
        return inputs, self.rows.outputs(target)


@dataclass(frozen=True)
class FirstMean:
    """What is subtracted from all inputs, if those of this batch come first."""

    counting: Counting

    def __call__(self, stop: Stop, parents: Sequence[Parent]) -> Tensor:
        """See `Look`."""
        prior, fit = self.counting.prior, self.counting.fit
        assert prior is not None
        return prior.mean(self.counting.rows.inputs(stop.cut(stop.fused[fit.layer.input])))


@dataclass(frozen=True)
class Changing:
    """How far targets move where a ReLU cuts them off (`rectified`)."""

    counting: Counting
    solution: RidgeFit

    def __call__(self, stop: Stop, parents: Sequence[Parent]) -> tuple[Tensor, Tensor]:
        """See `Look`."""
        rows, prior, minus = self.counting.rows, self.counting.prior, self.counting.fit.minus
        assert prior is not None
        inputs, wanted = self.counting.of(stop, parents)
        zero = 0.0 if minus is None else rows.outputs(stop.cut(-stop.fused[minus]))
        change = target_change(inputs, wanted, zero, self.solution)
        return prior.changed(inputs, change, row_counts(self.counting.counts_P, wanted))
