"""Ridge regression toward a prior, from sums over batches of rows.

    minimise ||H W^T + b - Z||^2 / n + lam * mean(diag(H^T H / n)) * ||W - W0||^2

Legend: g groups (independent problems), n rows, D inputs, O outputs. Rows come in float32 and are
summed in float64. Memory: one D x D matrix for each group (primal), or the n x D rows where n < D
(dual form).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SolveFailed

# Products of rows with themselves are taken in panels of so many columns, below the diagonal only:
# wide enough for full speed, narrow enough that little is computed twice.
_PANEL = 512

# A layer that misses its target by less than this, relative to it, is left untouched.
UNTOUCHED = 1e-6


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
        inputs, target = inputs_gnD.double(), target_gnO.double()
        rest = target - torch.einsum("gnd,god->gno", inputs, self.prior_gOD)
        if self.bias_gO is not None:
            rest -= self.bias_gO[:, None]
        root_n1 = inputs.new_ones(inputs.shape[1], 1)
        if weights_n is None:
            self.rows += inputs.shape[1]
            self.sum_gD += inputs.sum(1)
            self.rest_gO += rest.sum(1)
        else:
            many = weights_n.to(inputs)
            self.rows += float(many.sum())
            self.sum_gD += torch.einsum("n,gnd->gd", many, inputs)
            self.rest_gO += torch.einsum("n,gno->go", many, rest)
            root_n1 = many[:, None].sqrt()
            inputs, target, rest = inputs * root_n1, target * root_n1, rest * root_n1
            inputs_gnD = inputs
        self.target += float(target.square().sum())
        self.missed += float(rest.square().sum())
        if self.dual:
            self._inputs.append(inputs)
            self._rests.append(rest)
            self._roots.append(root_n1)
            return
        # As long as the prior is right nothing will have to be solved: the product can wait.
        self._waiting.append((inputs_gnD, rest))
        if self.residual >= UNTOUCHED:
            self._count()

    def _count(self) -> None:
        for inputs, rest in self._waiting:
            turned = inputs.double().transpose(1, 2)
            _add_products(self.gram_gDD, turned)
            self.cross_gDO.baddbmm_(turned, rest)
        self._waiting.clear()

    @property
    def residual(self) -> float:
        """Relative residual of the prior."""
        if self.target == 0:
            return 0.0 if self.missed == 0 else float("inf")
        return float((self.missed / self.target) ** 0.5)

    def solve(self, ridge: float, *, where: str) -> RidgeFit | None:
        """The fit; None where the prior is right already.

        Args:
            ridge: lam.
            where: The layer, for messages.

        Raises:
            SolveFailed: The matrix is singular (`ridge` zero, dependent inputs).
        """
        if self.residual < UNTOUCHED:
            return None
        if self.dual:
            return self._dual(ridge, where)
        self._count()
        return self._primal(ridge, where)

    def _primal(self, ridge: float, where: str) -> RidgeFit:
        n = self.rows
        mean_gD, rest_gO = self.sum_gD / n, self.rest_gO / n
        power = _or_one(self.gram_gDD.diagonal(dim1=1, dim2=2).mean(1) / n)
        centred = _mirrored(self.gram_gDD).div_(n)
        cross = self.cross_gDO / n
        if self.bias_gO is not None:
            _centre(centred, mean_gD)
            cross = cross - torch.einsum("gd,go->gdo", mean_gD, rest_gO)
        system = centred.clone()
        system.diagonal(dim1=1, dim2=2).add_(ridge * power[:, None])
        step_gDO = _solve(system, cross, where)
        weight = self.prior_gOD + step_gDO.transpose(1, 2)
        # ||R - H D||^2 / n from the sums alone: |R|^2 - 2 <D, H^T R> + <D, H^T H D>.
        gone = torch.einsum("gdo,gdo->", step_gDO, cross)
        left = (step_gDO * (centred @ step_gDO)).sum()
        start = self.missed / n
        if self.bias_gO is not None:
            start -= float(rest_gO.square().sum())
        else:
            _centre(centred, mean_gD)
        variance = ((weight @ centred) * weight).sum(2)
        return self._solution(weight, variance, start - 2 * float(gone) + float(left))

    def _dual(self, ridge: float, where: str) -> RidgeFit:
        inputs, rest = torch.cat(self._inputs, 1), torch.cat(self._rests, 1)
        root_n1 = torch.cat(self._roots)
        self._inputs.clear()
        self._rests.clear()
        n = self.rows
        power = _or_one(inputs.square().sum(1).mean(1) / n)
        # With weights w rows are scaled by their roots, and so is the mean that is taken away.
        centred, rest_c = inputs, rest
        mean_gD = (self.sum_gD / n)[:, None]
        if self.bias_gO is not None:
            centred = inputs - mean_gD * root_n1
            rest_c = rest - (self.rest_gO / n)[:, None] * root_n1
        system = centred.new_zeros(len(centred), centred.shape[1], centred.shape[1])
        _add_products(system, centred)
        system = _mirrored(system).div_(n)
        system.diagonal(dim1=1, dim2=2).add_(ridge * power[:, None])
        step_gOD = _solve(system, rest_c, where).transpose(1, 2) @ centred / n
        weight = self.prior_gOD + step_gOD
        spread = (inputs - mean_gD * root_n1) @ weight.transpose(1, 2)
        left = rest_c - centred @ step_gOD.transpose(1, 2)
        spread_gO = spread.square().sum(1) / n
        return self._solution(weight, spread_gO, float(left.square().sum()) / n)

    def _solution(self, weight: Tensor, variance: Tensor, left: float) -> RidgeFit:
        mean_gD = self.sum_gD / self.rows
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


def _add_products(sums_gRR: Tensor, rows_gRn: Tensor) -> None:
    """Add `rows @ rows^T` to the lower triangle, in panels: about half the work of the whole."""
    size = rows_gRn.shape[1]
    for start in range(0, size, _PANEL):
        panel = rows_gRn[:, start : start + _PANEL].transpose(1, 2)
        sums_gRR[:, start:, start : start + _PANEL].baddbmm_(rows_gRn[:, start:], panel)


def _centre(moments_gDD: Tensor, mean_gD: Tensor) -> None:
    """Second moments about the mean, in place."""
    moments_gDD.baddbmm_(mean_gD[:, :, None], mean_gD[:, None], alpha=-1)


def _mirrored(sums_gRR: Tensor) -> Tensor:
    """The symmetric matrix of which `_add_products` filled one half, in place."""
    for start in range(_PANEL, sums_gRR.shape[1], _PANEL):
        panel = sums_gRR[:, start:, start - _PANEL : start]
        sums_gRR[:, start - _PANEL : start, start:] = panel.transpose(1, 2)
    return sums_gRR


def _solve(system: Tensor, right: Tensor, where: str) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(system)
    if bool((info != 0).any()) or not bool(factor.isfinite().all()):
        raise SolveFailed(
            "the fit of a layer is singular",
            where=where,
            why="its inputs are linearly dependent, and nothing else decides",
            fix="use a larger --ridge, or more samples",
        )
    solution: Tensor = torch.cholesky_solve(right, factor)
    return solution
