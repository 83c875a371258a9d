"""Ridge regression toward a prior, from sums over batches of rows.

    minimise ||H W^T + b - Z||^2 / n + lam * mean(diag(H^T H / n)) * ||W - W0||^2

The solution is linear in Z: when some of it changes afterwards, the same factor solves for that.

Legend: g groups (independent problems), n rows, D inputs, O outputs. Products of a batch are taken
in the dtype of its rows (float32), about the mean of the first batch so that no digits are lost to
a large mean, and summed in float64. Memory: one D x D matrix for each group (primal), or the n x D
rows where n < D (dual form).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import SolveFailed
from .counted_rows import Counted, Prior
from .half_products import add_products, mirrored

# A layer that misses its target by less than this, relative to it, is left untouched.
UNTOUCHED = 1e-6
# Of the ridge, what outputs get whose prior is no prior: little, so that they are least squares.
_FRESH = 0.1


@dataclass(frozen=True)
class RidgeFit:
    """What a fit gives.

    Attributes:
        weight_gOD: The fitted weight, float64.
        bias_gO: The fitted bias; None where none is fitted.
        mean_gO: Mean of `H W^T` over the rows.
        variance_gO: Its variance.
        before: Relative residual of the prior: ||H W0^T + b0 - Z|| / ||Z||.
        after: That of the solution.
    """

    weight_gOD: Tensor
    bias_gO: Tensor | None
    mean_gO: Tensor
    variance_gO: Tensor
    before: float
    after: float


@dataclass(frozen=True)
class _Factor:
    """A system under its pull toward the prior, by Cholesky.

    Attributes:
        pulled: All of the pull.
        loose: A fraction of it; None where every output has a prior.
        fresh_gO: Outputs that are solved for with that.
    """

    pulled: Tensor
    loose: Tensor | None = None
    fresh_gO: Tensor | None = None

    def solve(self, right: Tensor) -> Tensor:
        """The solution for right sides, one of each output."""
        solution: Tensor = torch.cholesky_solve(right, self.pulled)
        if self.loose is None or self.fresh_gO is None:
            return solution
        return torch.where(
            self.fresh_gO[:, None], torch.cholesky_solve(right, self.loose), solution
        )


@dataclass(frozen=True)
class _Solved:
    """What a solution leaves for changes of the target; rows only in the dual form.

    Attributes:
        factor: Of the system, by Cholesky.
        inner: Primal: moments of the inputs, g x D x D. Dual: the inputs, g x n x D.
        wanted: Primal: products of inputs and rest, g x D x O. Dual: the rest, g x n x O.
        start: Mean square of the rest.
    """

    factor: _Factor
    inner: Tensor
    wanted: Tensor
    start: float


class Ridge:
    """Collects rows, then solves."""

    def __init__(self, weight_gOD: Tensor, bias_gO: Tensor | None, *, rows: int) -> None:
        """Begin at a prior.

        Args:
            weight_gOD: W0.
            bias_gO: b0; None if no bias is to be fitted.
            rows: How many will come; decides between primal and dual form.
        """
        self.prior_gOD = weight_gOD.double()
        self.bias_gO = None if bias_gO is None else bias_gO.double()
        g, o, d = weight_gOD.shape
        like = self.prior_gOD
        self.dual = rows < d  # the smaller of the two systems is solved
        self.rows = 0.0
        self.shift_gD = like.new_zeros(g, d)
        self.sum_gD = like.new_zeros(g, d)
        self.rest_gO = like.new_zeros(g, o)
        self.target = self.missed = 0.0
        self._inputs: list[Tensor] = []
        self._roots: list[Tensor] = []
        self._rests: list[Tensor] = []
        self._waiting: list[Counted] = []
        self._solved: _Solved | None = None
        self._changes: list[Tensor] = []
        self.change_gO = like.new_zeros(g, o)
        if not self.dual:
            self.gram_gDD = like.new_zeros(g, d, d)
            self.cross_gDO = like.new_zeros(g, d, o)

    @property
    def prior(self) -> Prior:
        """How rows are counted from here on."""
        known = self.dual or self.rows > 0
        shift_gD = self.shift_gD if known else None
        return Prior(self.prior_gOD, self.bias_gO, self.dual, shift_gD)

    def add(self, inputs_gnD: Tensor, target_gnO: Tensor, weights_n: Tensor | None = None) -> None:
        """Count rows of inputs and of what they should give; with `weights_n`, so often each."""
        self.take(self.prior.counted(inputs_gnD, target_gnO, weights_n))

    def take(self, part: Counted) -> None:
        """Count what was counted apart, with the shift of those before."""
        if not self.dual:
            self.shift_gD = part.shift_gD
        self.rows += part.rows
        self.sum_gD += part.sum_gD
        self.rest_gO += part.rest_gO
        self.target += part.target
        self.missed += part.missed
        if self.dual:
            assert part.inputs is not None
            assert part.rest is not None
            self._inputs.append(part.inputs)
            self._rests.append(part.rest)
            self._roots.append(part.root_n1)
            return
        # As long as the prior is right nothing will have to be solved: the product can wait.
        self._waiting.append(part)
        if self.residual >= UNTOUCHED:
            self._count()

    def _count(self) -> None:
        for part in self._waiting:
            part.add_to(self.gram_gDD, self.cross_gDO)
        self._waiting.clear()

    @property
    def residual(self) -> float:
        """Relative residual of the prior."""
        if self.target == 0:
            return 0.0 if self.missed == 0 else float("inf")
        return float((self.missed / self.target) ** 0.5)

    def change(
        self, inputs_gnD: Tensor, change_gnO: Tensor, weights_n: Tensor | None = None
    ) -> None:
        """Change the targets of rows that were solved for, in the order in which they came."""
        self.take_change(*self.prior.changed(inputs_gnD, change_gnO, weights_n))

    def take_change(self, total_gO: Tensor, change: Tensor) -> None:
        """The same for what `Prior.changed` has counted apart."""
        self.change_gO += total_gO
        self._changes.append(change)

    def solve_changed(self, fit: RidgeFit) -> RidgeFit:
        """The fit to the changed targets; how far it misses is measured at those of before.

        Args:
            fit: What `solve` gave, told that targets would change.
        """
        assert self._solved is not None
        solved, n = self._solved, self.rows
        mean_gD, change_gO = self._mean(), self.change_gO / n
        if self.dual:
            # What all rows share goes into the bias; the inputs, centred, are blind to it.
            change = torch.cat(self._changes, 1).double()
            more_gOD = solved.factor.solve(change).transpose(1, 2) @ solved.inner / n
        else:
            cross = torch.stack([c.double() for c in self._changes]).sum(0) / n
            about_gD = self.shift_gD - mean_gD if self.bias_gO is not None else self.shift_gD
            cross += about_gD[:, :, None] * change_gO[:, None]
            more_gOD = solved.factor.solve(cross).transpose(1, 2)
        weight = fit.weight_gOD + more_gOD
        left, variance = self._left(solved, weight)
        solution = self._solution(weight, variance, left)
        if self.bias_gO is None:
            return solution
        assert solution.bias_gO is not None
        missed = (left + float(change_gO.square().sum())) * n / self.target
        return replace(solution, bias_gO=solution.bias_gO + change_gO, after=missed**0.5)

    def solve(
        self,
        ridge: float,
        *,
        where: str,
        changes: bool = False,
        fresh_gO: Tensor | None = None,
    ) -> RidgeFit | None:
        """The fit; None where the prior is right already.

        Args:
            ridge: lam.
            where: The layer, for messages.
            changes: Whether some of the target will change, and what that takes has to be kept.
            fresh_gO: Outputs whose prior is no prior: they are pulled less.

        Raises:
            SolveFailed: The matrix is singular (`ridge` zero, dependent inputs).
        """
        if self.residual < UNTOUCHED:
            return None
        if self.dual:
            solved = self._dual(ridge, where, fresh_gO)
            step_gOD = solved.factor.solve(solved.wanted).transpose(1, 2)
            step_gOD = step_gOD @ solved.inner / self.rows
        else:
            self._count()
            solved = self._primal(ridge, where, fresh_gO)
            step_gOD = solved.factor.solve(solved.wanted).transpose(1, 2)
        self._solved = solved if changes else None
        weight = self.prior_gOD + step_gOD
        left, variance = self._left(solved, weight)
        return self._solution(weight, variance, left)

    def _mean(self) -> Tensor:
        """Of the inputs, g x D."""
        return self.shift_gD + self.sum_gD / self.rows

    def _primal(self, ridge: float, where: str, fresh_gO: Tensor | None) -> _Solved:
        n = self.rows
        off_gD, mean_gD, rest_gO = self.sum_gD / n, self._mean(), self.rest_gO / n
        # Sums are about the shift: what that is off by makes them moments about the mean.
        moments = mirrored(self.gram_gDD).div_(n)
        moments.baddbmm_(off_gD[:, :, None], off_gD[:, None], alpha=-1)
        power = _or_one((moments.diagonal(dim1=1, dim2=2) + mean_gD.square()).mean(1))
        cross, about_gD, start = self.cross_gDO / n, -off_gD, self.missed / n
        if self.bias_gO is not None:
            start -= float(rest_gO.square().sum())
        else:  # the mean is fitted by the weight as well
            moments.baddbmm_(mean_gD[:, :, None], mean_gD[:, None])
            about_gD = self.shift_gD
        cross += about_gD[:, :, None] * rest_gO[:, None]
        factor = _factor(moments.clone(), ridge * power, where, fresh_gO)
        return _Solved(factor, moments, cross, start)

    def _dual(self, ridge: float, where: str, fresh_gO: Tensor | None) -> _Solved:
        inputs, rest = (torch.cat(rows, 1).double() for rows in (self._inputs, self._rests))
        root_n1 = torch.cat(self._roots).double()
        self._inputs.clear()
        self._rests.clear()
        n = self.rows
        power = _or_one(inputs.square().sum(1).mean(1) / n)
        # With weights w rows are scaled by their roots, and so is the mean that is taken away.
        if self.bias_gO is not None:
            inputs -= self._mean()[:, None] * root_n1
            rest -= (self.rest_gO / n)[:, None] * root_n1
        system = inputs.new_zeros(len(inputs), inputs.shape[1], inputs.shape[1])
        add_products(system, inputs)
        factor = _factor(mirrored(system).div_(n), ridge * power, where, fresh_gO)
        return _Solved(factor, inputs, rest, 0.0)

    def _left(self, solved: _Solved, weight: Tensor) -> tuple[float, Tensor]:
        """Mean square of what a weight misses, with the best bias, and variances of its outputs."""
        step_gDO = (weight - self.prior_gOD).transpose(1, 2)
        mean_gO = torch.einsum("god,gd->go", weight, self._mean())
        if self.dual:
            left = solved.wanted - solved.inner @ step_gDO
            spread = solved.inner @ weight.transpose(1, 2)
            variance, missed = spread.square().sum(1) / self.rows, left.square().sum() / self.rows
        else:
            # ||R - H D||^2 / n from the sums alone: |R|^2 - 2 <D, H^T R> + <D, H^T H D>.
            gone = (step_gDO * solved.wanted).sum()
            missed = solved.start - 2 * gone + (step_gDO * (solved.inner @ step_gDO)).sum()
            variance = ((weight @ solved.inner) * weight).sum(2)
        if self.bias_gO is None:
            variance -= mean_gO.square()
        return float(missed), variance

    def _solution(self, weight: Tensor, variance: Tensor, left: float) -> RidgeFit:
        mean_gD = self._mean()
        bias = None
        if self.bias_gO is not None:
            step = weight - self.prior_gOD
            bias = (
                self.bias_gO + self.rest_gO / self.rows - torch.einsum("god,gd->go", step, mean_gD)
            )
        return RidgeFit(
            weight,
            bias,
            torch.einsum("god,gd->go", weight, mean_gD),
            variance.clamp(min=0),
            self.residual,
            (max(left, 0.0) * self.rows / self.target) ** 0.5 if self.target else 0.0,
        )


def _or_one(power_g: Tensor) -> Tensor:
    """A group whose inputs are all zero (a dead channel, depthwise) keeps its prior."""
    return torch.where(power_g > 0, power_g, 1.0)


def _factor(system: Tensor, pull_g: Tensor, where: str, fresh_gO: Tensor | None) -> _Factor:
    """A system under its pull, and where outputs are fresh, under a fraction of it; overwritten."""
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal.add_(pull_g[:, None])
    pulled = _cholesky(system, where)
    if fresh_gO is None or not bool(fresh_gO.any()):
        return _Factor(pulled)
    diagonal.add_((_FRESH - 1) * pull_g[:, None])
    return _Factor(pulled, _cholesky(system, where), fresh_gO)


def _cholesky(system: Tensor, where: str) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(system)
    if not bool((info == 0).all() & factor.isfinite().all()):
        raise SolveFailed(
            "the fit of a layer is singular",
            where=where,
            why="its inputs are linearly dependent, and nothing else decides",
            fix="use a larger --ridge, or more samples",
        )
    lower: Tensor = factor
    return lower
