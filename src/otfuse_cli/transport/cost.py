"""Ground metrics: what moving one unit onto another costs.

N source units, M anchor units, K features; rows = source, columns = anchor. No names, no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

# Gram distances lose what the two squared norms share; below this share of them an entry is redone.
_REPAIR_BELOW = 1e-3
# A mean whose square is less than this share of the rows' stays: what the products lose to it is a
# fraction of a bit, and rows without it would be copies.
_SMALL_MEAN = 0.25
# Elements of any one temporary: the blocks bound memory, whatever the sizes.
_BLOCK = 1 << 22
# The same where rows go through several operations, so that they stay in the cache between them.
_CACHED = 1 << 17
# Elements of anchor rows that are prepared at a time.
_PREPARED = 1 << 22


class Metric(StrEnum):
    """Ground metric between two feature rows."""

    EUCLIDEAN = "euclidean"
    SQEUCLIDEAN = "sqeuclidean"
    COSINE = "cosine"


def cost_matrix(
    source_NK: Tensor,
    anchor_MK: Tensor,
    *,
    metric: Metric = Metric.EUCLIDEAN,
    dead_cost: float | None = None,
) -> Tensor:
    """Cost of every source unit to every anchor unit.

    Gram form: the joint mean is removed where it is large (not for cosine), the product is one
    matrix multiplication in the working dtype, and near-duplicates, where it cancels, are
    recomputed in float64 from the rows as given. Rows are taken in blocks; no N x M x K temporary
    exists.

    Args:
        source_NK: Source features, floating. Half types are computed in float32.
        anchor_MK: Anchor features, same K and device.
        metric: Cosine is `1 - cos`, and 1 where a row is zero.
        dead_cost: If given, the cost wherever the source row or the anchor row is all zeros.

    Returns:
        cost_NM, >= 0, on the same device; float32, or float64 if either input is.

    Raises:
        ValueError: Not two floating matrices of equal K >= 1 on one device.
    """
    source_NK, anchor_MK = _working(source_NK, anchor_MK)
    n, m = source_NK.shape[0], anchor_MK.shape[0]
    cost_NM = source_NK.new_empty((n, m))
    if not n or not m:
        return cost_NM
    norms_N, norms_M = (torch.linalg.vector_norm(f, dim=1) for f in (source_NK, anchor_MK))
    dead_N, dead_M = _dead(source_NK, norms_N), _dead(anchor_MK, norms_M)
    if metric is Metric.COSINE and dead_cost is None:
        dead_cost = 1.0
    repair = _Repair(source_NK, anchor_MK, metric)
    norms = torch.cat([norms_N, norms_M])
    mean_K, unit = _centre(source_NK, anchor_MK, float(norms.max()))
    whole = float(norms.square().mean())
    small = float(mean_K.square().sum()) < _SMALL_MEAN * whole < math.inf and unit == 1.0
    as_given = small and metric is not Metric.COSINE
    finish = _Finish(metric, unit, dead_N, dead_M, dead_cost, repair)
    if as_given:
        # One product, into its place: what is made of it is done by blocks that stay in the cache.
        torch.mm(source_NK, anchor_MK.T, out=cost_NM)
        squares_M = norms_M.square()
        for rows in _blocks(n, m, _CACHED):
            finish(cost_NM[rows], norms_N[rows].square(), squares_M, rows.start, 0)
    else:
        for columns in _blocks(m, anchor_MK.shape[1], _PREPARED):
            anchor_rows = _prepare(anchor_MK[columns], metric, mean_K, unit)
            squares_M = _squares(anchor_rows)
            for rows in _blocks(n, max(m, source_NK.shape[1])):
                source_rows = _prepare(source_NK[rows], metric, mean_K, unit)
                block = torch.mm(source_rows, anchor_rows.T)
                finish(block, _squares(source_rows), squares_M, rows.start, columns.start)
                cost_NM[rows, columns] = block
                del source_rows, block  # before the next ones are made
            del anchor_rows
    if dead_cost is not None:
        cost_NM[dead_N] = dead_cost
        cost_NM[:, dead_M] = dead_cost
    return cost_NM


def paired_cost(
    source_NK: Tensor,
    anchor_NK: Tensor,
    *,
    metric: Metric = Metric.EUCLIDEAN,
    dead_cost: float | None = None,
) -> Tensor:
    """Cost of row i to row i: the diagonal of `cost_matrix`, by direct float64 differences, O(N K).

    Returns:
        cost_N, in the dtype and on the device of `cost_matrix`.

    Raises:
        ValueError: Not two floating matrices of one shape on one device.
    """
    source_NK, anchor_NK = _working(source_NK, anchor_NK)
    if source_NK.shape != anchor_NK.shape:
        raise ValueError(f"rows don't pair: {tuple(source_NK.shape)}, {tuple(anchor_NK.shape)}")
    cost_N = _direct(source_NK, anchor_NK, None, None, metric).to(source_NK.dtype)
    if metric is Metric.COSINE and dead_cost is None:
        dead_cost = 1.0
    if dead_cost is not None:
        cost_N[dead_rows(source_NK) | dead_rows(anchor_NK)] = dead_cost
    return cost_N


def unit_rows(features_NK: Tensor, *, in_place: bool = False) -> Tensor:
    """Rows scaled to unit Euclidean norm; a zero row stays zero.

    With `in_place`, features of float32 or float64 are overwritten and returned.

    Computed in float64 and rounded once, so that rows which are multiples of each other become
    equal. Returns float32, or float64 for float64 input.
    """
    if features_NK.ndim != 2 or not features_NK.is_floating_point():
        raise ValueError(f"expected a floating matrix, got {_describe(features_NK)}")
    dtype = torch.promote_types(features_NK.dtype, torch.float32)
    if in_place and features_NK.dtype == dtype:
        unit_NK = features_NK
    else:
        unit_NK = torch.empty(features_NK.shape, dtype=dtype, device=features_NK.device)
    # Squares of float64 can leave its range; those of narrower types can't.
    unit = _unit if dtype == torch.float64 else _unit_in_range
    for rows in _blocks(len(features_NK), features_NK.shape[1], _CACHED):
        unit_NK[rows] = unit(features_NK[rows].to(torch.float64, copy=True))
    return unit_NK


def dead_rows(features_NK: Tensor) -> Tensor:
    """Rows that are entirely zero; a row with NaN is not."""
    return _dead(features_NK, torch.linalg.vector_norm(features_NK, dim=1))


def _dead(features_NK: Tensor, norms_N: Tensor) -> Tensor:
    dead_N: Tensor = norms_N == 0
    rows = dead_N.nonzero().flatten()  # or so small that the squares vanish
    if len(rows):
        dead_N[rows] = _peaks(features_NK[rows]) == 0
    return dead_N


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")


def _working(source_NK: Tensor, anchor_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Both inputs in one dtype, float32 or float64, detached."""
    matrices = source_NK.ndim == anchor_MK.ndim == 2
    columns = matrices and source_NK.shape[1] == anchor_MK.shape[1] > 0
    floating = source_NK.is_floating_point() and anchor_MK.is_floating_point()
    if not columns or not floating or source_NK.device != anchor_MK.device:
        raise ValueError(
            "expected two floating matrices with equally many columns on one device, got "
            f"{_describe(source_NK)} and {_describe(anchor_MK)}"
        )
    double = torch.float64 in (source_NK.dtype, anchor_MK.dtype)
    dtype = torch.float64 if double else torch.float32
    return source_NK.detach().to(dtype), anchor_MK.detach().to(dtype)


def _blocks(rows: int, columns: int, most: int = _BLOCK) -> Iterator[slice]:
    step = max(1, most // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _peaks(features_NK: Tensor) -> Tensor:
    """Largest magnitude of each row; NaN where a row has it."""
    peak_N = features_NK.new_zeros(features_NK.shape[0])
    if features_NK.shape[1]:
        for rows in _blocks(len(features_NK), features_NK.shape[1], _CACHED):
            torch.amax(features_NK[rows].abs(), 1, out=peak_N[rows])
    return peak_N


def _centre(source_NK: Tensor, anchor_MK: Tensor, longest: float) -> tuple[Tensor, float]:
    """Mean of all rows, and a power of two near their largest entry, 1 where that is moderate.

    Dividing by the latter is exact, and keeps squares of very small or large weights in range.
    `longest` is the largest norm of a row.
    """
    count = source_NK.shape[0] + anchor_MK.shape[0]
    total_K = _column_sums(source_NK) + _column_sums(anchor_MK)
    mean_K = (total_K / count).to(source_NK.dtype)
    if 2.0**-20 < longest / source_NK.shape[1] ** 0.5 <= longest < 2.0**20:
        return mean_K, 1.0
    peak = 0.0
    for features in (source_NK, anchor_MK):
        if features.numel():
            for rows in _blocks(len(features), features.shape[1], _CACHED):
                low, high = torch.aminmax(features[rows])
                peak = max(peak, abs(low.item()), abs(high.item()))
    unit = 2.0 ** (math.frexp(peak)[1] - 1) if 0 < peak < math.inf else 1.0
    if unit < torch.finfo(source_NK.dtype).tiny or 2.0**-20 < unit < 2.0**20:
        unit = 1.0
    return mean_K, unit


def _column_sums(features_NK: Tensor) -> Tensor:
    """In float64; in the features' dtype where that is enough: any point near the mean will do."""
    near_K = features_NK.sum(0)
    if bool(torch.isfinite(near_K).all()):
        return near_K.double()
    total_K = features_NK.new_zeros(features_NK.shape[1], dtype=torch.float64)
    for rows in _blocks(len(features_NK), features_NK.shape[1], _CACHED):
        total_K += features_NK[rows].double().sum(0)
    return total_K


def _prepare(features_NK: Tensor, metric: Metric, mean_K: Tensor, unit: float) -> Tensor:
    if metric is Metric.COSINE:
        return unit_rows(features_NK)
    centred_NK = features_NK - mean_K
    return centred_NK if unit == 1.0 else centred_NK.div_(unit)


def _squares(rows_PK: Tensor) -> Tensor:
    """Squared norms of rows."""
    squares_P: Tensor = torch.linalg.vector_norm(rows_PK, dim=1).square()
    return squares_P


def _unit(rows_PK: Tensor) -> Tensor:
    """Float64 rows at unit norm; the largest entry goes first, so that no square overflows."""
    peak_P = _peaks(rows_PK)[:, None]
    return _unit_in_range(rows_PK / peak_P.masked_fill(peak_P == 0, 1))


def _unit_in_range(rows_PK: Tensor) -> Tensor:
    """Float64 rows whose squares are in range at unit norm, in place."""
    norm_P = torch.linalg.vector_norm(rows_PK, dim=1, keepdim=True)
    return rows_PK.mul_(norm_P.masked_fill_(norm_P == 0, 1).reciprocal_())  # division is slow


def _direct(
    source_NK: Tensor,
    anchor_MK: Tensor,
    rows_P: Tensor | None,
    cols_P: Tensor | None,
    metric: Metric,
) -> Tensor:
    """Float64 cost of P chosen pairs (None: all rows in order) by differences of rows as given."""
    count = source_NK.shape[0] if rows_P is None else rows_P.shape[0]
    cost_P = torch.empty(count, dtype=torch.float64, device=source_NK.device)
    for part in _blocks(count, source_NK.shape[1], _CACHED):
        left = source_NK[part if rows_P is None else rows_P[part]].to(torch.float64, copy=True)
        right = anchor_MK[part if cols_P is None else cols_P[part]].double()
        if metric is Metric.COSINE:
            left, right = _unit(left), _unit(right)
        cost_P[part] = torch.linalg.vector_norm(left.sub_(right), dim=1)
    if metric is Metric.EUCLIDEAN:
        return cost_P
    return cost_P.square_().mul_(0.5 if metric is Metric.COSINE else 1.0)


@dataclass(frozen=True)
class _Finish:
    """Makes costs of products of rows, in place."""

    metric: Metric
    unit: float
    dead_N: Tensor
    dead_M: Tensor
    dead_cost: float | None
    repair: _Repair

    def __call__(
        self, block: Tensor, squares_P: Tensor, squares_Q: Tensor, first_row: int, first_col: int
    ) -> None:
        """Of products P x Q, and squared norms of their rows; `first_*`: which rows these are."""
        squares = squares_P[:, None]
        block.mul_(-2).add_(squares).add_(squares_Q)
        suspect = block <= (squares + squares_Q).mul_(_REPAIR_BELOW)
        dead_P1 = self.dead_N[first_row : first_row + block.shape[0], None]
        dead_Q = self.dead_M[first_col : first_col + block.shape[1]]
        dead = dead_P1 & dead_Q
        if self.dead_cost is not None:
            suspect &= ~dead_P1
            suspect &= ~dead_Q
        else:
            suspect &= ~dead
        block.clamp_(min=0)
        if self.metric is Metric.EUCLIDEAN:
            block.sqrt_()
        if self.metric is Metric.COSINE:
            block.mul_(0.5)
        elif self.unit != 1.0:
            block.mul_(self.unit if self.metric is Metric.EUCLIDEAN else self.unit**2)
        block.masked_fill_(dead, 0)
        self.repair(block, suspect, first_row, first_col)


class _Repair:
    """Recomputes the entries that the Gram form cannot resolve.

    Usually there are about N of them. When a block has many (masked units, copied layers), rows
    that are equal are recognised once and every distinct pair is computed once.
    """

    def __init__(self, source_NK: Tensor, anchor_MK: Tensor, metric: Metric) -> None:
        self._source_NK = source_NK
        self._anchor_MK = anchor_MK
        self._metric = metric
        self._classes: Tensor | None = None

    def __call__(self, block: Tensor, suspect: Tensor, first_row: int, first_col: int) -> None:
        rows_P, cols_P = suspect.nonzero(as_tuple=True)
        if not rows_P.numel():
            return
        if rows_P.numel() <= 4 * sum(block.shape):
            cost_P = self._pairs(rows_P + first_row, cols_P + first_col)
        else:
            cost_P = self._distinct(rows_P + first_row, cols_P + first_col)
        block[rows_P, cols_P] = cost_P.to(block.dtype)

    def _pairs(self, rows_P: Tensor, cols_P: Tensor) -> Tensor:
        return _direct(self._source_NK, self._anchor_MK, rows_P, cols_P, self._metric)

    def _distinct(self, rows_P: Tensor, cols_P: Tensor) -> Tensor:
        n = self._source_NK.shape[0]
        if self._classes is None:
            both = torch.cat([self._source_NK, self._anchor_MK])
            self._classes = torch.unique(both, dim=0, return_inverse=True)[1]
        classes = self._classes
        count = int(classes.max()) + 1
        code_P = classes[rows_P] * count + classes[n + cols_P]
        code_Q, slot_P = torch.unique(code_P, return_inverse=True)
        # Any pair of a code serves as its example: which one doesn't matter, its rows are equal.
        example_Q = torch.empty_like(code_Q)
        example_Q[slot_P] = torch.arange(code_P.numel(), device=code_P.device)
        return self._pairs(rows_P[example_Q], cols_P[example_Q])[slot_P]
