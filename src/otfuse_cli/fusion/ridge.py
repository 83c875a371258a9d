"""Ridge regression toward a prior, from sums over batches of rows.

    minimise ||H W^T + b - Z||^2 / n + lam * mean(diag(H^T H / n)) * ||W - W0||^2

Legend: g groups (independent problems), n rows, D inputs, O outputs. Products of a batch are taken
in the dtype of its rows (float32), about the mean of the first batch so that no digits are lost to
a large mean, and summed in float64. Memory: one D x D matrix for each group (primal), or the n x D
rows where n < D (dual form).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SolveFailed
from .half_products import add_products, mirrored

# A layer that misses its target by less than this, relative to it, is left untouched.
UNTOUCHED = 1e-6
# Of the ridge, what outputs get whose prior is no prior: little, so that they are least squares.
_FRESH = 0.1
# A smaller miss is found in float64: float32 products err by up to some 1e-6 of the target.
_IN_DOUBLE = 1e-4


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
        self._waiting: list[tuple[Tensor, Tensor]] = []
        if not self.dual:
            self.gram_gDD = like.new_zeros(g, d, d)
            self.cross_gDO = like.new_zeros(g, d, o)

    def add(self, inputs_gnD: Tensor, target_gnO: Tensor, weights_n: Tensor | None = None) -> None:
        """Count rows of inputs and of what they should give; with `weights_n`, so often each."""
        if not (self.dual or self.rows):
            # Exactly what is subtracted below: the nearest number of the dtype of the rows.
            self.shift_gD = inputs_gnD.mean(1).double()
        target, rest = target_gnO, self._missed(inputs_gnD, target_gnO)
        missed, wanted = _squares(rest, target)
        if missed < _IN_DOUBLE**2 * wanted:
            rest = self._missed(inputs_gnD.double(), target.double())
            missed, wanted = _squares(rest, target)
        inputs = inputs_gnD - self.shift_gD.to(inputs_gnD)[:, None]
        if weights_n is None:
            many_n = inputs.new_ones(inputs.shape[1])
            self.rows += len(many_n)
        else:
            # Counted as they are weighted: rounded to the dtype of the rows, wherever they lie.
            weights_n = weights_n.to(inputs.dtype)
            many_n = weights_n.to(inputs)
            self.rows += float(weights_n.sum(dtype=torch.float64))
        # Products, even with ones: the same as sums, in a fifth of the time.
        self.sum_gD += many_n @ inputs
        self.rest_gO += many_n.to(rest) @ rest
        root_n1 = many_n[:, None].sqrt()
        if weights_n is not None:
            inputs, target, rest = inputs * root_n1, target * root_n1, rest * root_n1
            missed, wanted = _squares(rest, target)
        self.target += wanted
        self.missed += missed
        if self.dual:
            self._inputs.append(inputs)
            self._rests.append(rest)
            self._roots.append(root_n1)
            return
        # As long as the prior is right nothing will have to be solved: the product can wait.
        self._waiting.append((inputs, rest))
        if self.residual >= UNTOUCHED:
            self._count()

    def _missed(self, inputs_gnD: Tensor, target_gnO: Tensor) -> Tensor:
        """What the prior misses, in the dtype of the rows."""
        prior_gDO = self.prior_gOD.to(inputs_gnD).transpose(1, 2)
        rest = target_gnO.to(inputs_gnD) - inputs_gnD @ prior_gDO
        if self.bias_gO is not None:
            rest -= self.bias_gO.to(rest)[:, None]
        return rest

    def _count(self) -> None:
        for inputs, rest in self._waiting:
            turned = inputs.transpose(1, 2)
            add_products(self.gram_gDD, turned)
            self.cross_gDO += turned @ rest.to(turned)
        self._waiting.clear()

    @property
    def residual(self) -> float:
        """Relative residual of the prior."""
        if self.target == 0:
            return 0.0 if self.missed == 0 else float("inf")
        return float((self.missed / self.target) ** 0.5)

    def solve(self, ridge: float, *, where: str, fresh_gO: Tensor | None = None) -> RidgeFit | None:
        """The fit; None where the prior is right already.

        Args:
            ridge: lam.
            where: The layer, for messages.
            fresh_gO: Outputs whose prior is no prior: they are pulled less.

        Raises:
            SolveFailed: The matrix is singular (`ridge` zero, dependent inputs).
        """
        if self.residual < UNTOUCHED:
            return None
        if self.dual:
            return self._dual(ridge, where, fresh_gO)
        self._count()
        return self._primal(ridge, where, fresh_gO)

    def _mean(self) -> Tensor:
        """Of the inputs, g x D."""
        return self.shift_gD + self.sum_gD / self.rows

    def _primal(self, ridge: float, where: str, fresh_gO: Tensor | None) -> RidgeFit:
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
        step_gDO = _solve_pulled(moments.clone(), cross, ridge * power, where, fresh_gO)
        weight = self.prior_gOD + step_gDO.transpose(1, 2)
        # ||R - H D||^2 / n from the sums alone: |R|^2 - 2 <D, H^T R> + <D, H^T H D>.
        gone = float((step_gDO * cross).sum())
        left = float((step_gDO * (moments @ step_gDO)).sum())
        variance = ((weight @ moments) * weight).sum(2)
        if self.bias_gO is None:
            variance -= torch.einsum("god,gd->go", weight, mean_gD).square()
        return self._solution(weight, variance, start - 2 * gone + left)

    def _dual(self, ridge: float, where: str, fresh_gO: Tensor | None) -> RidgeFit:
        inputs, rest = (torch.cat(rows, 1).double() for rows in (self._inputs, self._rests))
        root_n1 = torch.cat(self._roots).double()
        self._inputs.clear()
        self._rests.clear()
        n = self.rows
        power = _or_one(inputs.square().sum(1).mean(1) / n)
        # With weights w rows are scaled by their roots, and so is the mean that is taken away.
        centred, rest_c = inputs, rest
        mean_gD = self._mean()[:, None]
        if self.bias_gO is not None:
            centred = inputs - mean_gD * root_n1
            rest_c = rest - (self.rest_gO / n)[:, None] * root_n1
        system = centred.new_zeros(len(centred), centred.shape[1], centred.shape[1])
        add_products(system, centred)
        system = mirrored(system).div_(n)
        solved = _solve_pulled(system, rest_c, ridge * power, where, fresh_gO)
        step_gOD = solved.transpose(1, 2) @ centred / n
        weight = self.prior_gOD + step_gOD
        spread = (inputs - mean_gD * root_n1) @ weight.transpose(1, 2)
        left = rest_c - centred @ step_gOD.transpose(1, 2)
        spread_gO = spread.square().sum(1) / n
        return self._solution(weight, spread_gO, float(left.square().sum()) / n)

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


def _squares(*several: Tensor) -> list[float]:
    """Sums of squares, those of rows in float64; a device is waited for once."""
    # Each row in its own dtype: converting as it is summed takes fifteen times as long.
    norms = (torch.linalg.vector_norm(rows, dim=-1) for rows in several)
    sums: list[float] = torch.stack([norm.double().square().sum() for norm in norms]).tolist()
    return sums


def _or_one(power_g: Tensor) -> Tensor:
    """A group whose inputs are all zero (a dead channel, depthwise) keeps its prior."""
    return torch.where(power_g > 0, power_g, 1.0)


def _solve_pulled(
    system: Tensor, right: Tensor, pull_g: Tensor, where: str, fresh_gO: Tensor | None
) -> Tensor:
    """The solution of a system under its pull; of fresh outputs, under a fraction of it."""
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal.add_(pull_g[:, None])
    solution = _solve(system, right, where)
    if fresh_gO is None or not bool(fresh_gO.any()):
        return solution
    diagonal.add_((_FRESH - 1) * pull_g[:, None])
    return torch.where(fresh_gO[:, None], _solve(system, right, where), solution)


def _solve(system: Tensor, right: Tensor, where: str) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(system)
    if not bool((info == 0).all() & factor.isfinite().all()):
        raise SolveFailed(
            "the fit of a layer is singular",
            where=where,
            why="its inputs are linearly dependent, and nothing else decides",
            fix="use a larger --ridge, or more samples",
        )
    solution: Tensor = torch.cholesky_solve(right, factor)
    return solution
