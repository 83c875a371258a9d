"""Equal costs: where an optimal plan is not the only one, and which of them is taken.

An optimal plan moves mass along tight edges only: those whose cost equals the sum of the dual
potentials of its ends. Any plan along tight edges is optimal, so a second cost may choose among
them without touching the first: an exact lexicographic order, with no perturbation to scale.

N source units, M anchor units; rows = source, columns = anchor; numpy, float64. No solver here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

# Costs closer than this share of the largest count as equal. Float32 resolves 6e-8, so only
# true ties pass; rounding of the float64 potentials stays well below.
TIGHT = 1e-13
_ROWS = 64


class NotOptimalError(Exception):
    """The assignment handed to `potentials` is not the cheapest one."""


def has_ties(cost_NM: Tensor) -> bool:
    """Whether ties are likely, so that a caller computes a secondary cost only when it matters.

    True when the least cost of some row or column is met twice, or two rows or two columns are
    equal: dead, duplicated or parallel units. O(N M), in blocks.
    """
    if min(cost_NM.shape) < 1 or max(cost_NM.shape) < 2:
        return False
    cost = cost_NM.detach()
    slack = TIGHT * float(torch.linalg.vector_norm(cost.flatten(), ord=float("inf")))
    for matrix in (cost, cost.T):
        if matrix.shape[1] > 1:
            least = matrix.amin(1, keepdim=True)
            if int(torch.count_nonzero(matrix <= least + slack)) > matrix.shape[0]:
                return True
        # Equal rows have equal sums: the order of summation is the same for each of them.
        sums, order = matrix.contiguous().sum(1).sort()
        for k in (sums[1:] == sums[:-1]).nonzero().flatten().tolist():
            if torch.equal(matrix[order[k]], matrix[order[k + 1]]):
                return True
    return False


def potentials(cost_NN: Array, cols_N: Array, slack: float) -> tuple[Array, Array]:
    """Dual potentials u_N, v_N of an optimal assignment: `cost >= u + v`, equal where matched.

    Shortest paths in the residual graph (Bellman-Ford from the columns that changed last), a few
    passes over the matrix in practice. Their existence proves the assignment optimal.

    Args:
        cost_NN: Cost, in which `inf` forbids an edge.
        cols_N: Column matched to each row.
        slack: Rounding to be ignored.

    Raises:
        NotOptimalError: No potentials exist: a cheaper assignment does.
    """
    n = len(cols_N)
    row_of = np.empty(n, dtype=np.int64)
    row_of[cols_N] = np.arange(n)
    matched_N = cost_NN[np.arange(n), cols_N]
    v = np.zeros(n)
    changed = np.arange(n)
    for _ in range(n + 1):
        shift = v[cols_N[changed]] - matched_N[changed]
        shortest = np.full(n, np.inf)
        for k in range(0, len(changed), _ROWS):
            paths = cost_NN[changed[k : k + _ROWS]] + shift[k : k + _ROWS, None]
            np.minimum(shortest, paths.min(0), out=shortest)
        shorter = shortest < v - slack
        if not shorter.any():
            return matched_N - v[cols_N], v
        v[shorter] = shortest[shorter]
        changed = np.sort(row_of[shorter])
    raise NotOptimalError


def undecided(tight_NN: Array, cols_N: Array) -> Array:
    """Rows whose partner is not forced by the tight edges alone, ascending.

    A row or a column with one tight edge left must take it; taking it away can leave others with
    one. What remains after that has a choice (or looks as if it had: harmless).
    """
    n = len(cols_N)
    if np.count_nonzero(tight_NN) == n:
        return np.arange(0)
    rows_left = tight_NN.sum(1)
    cols_left = tight_NN.sum(0)
    open_N = np.ones(n, dtype=bool)
    while True:
        forced = open_N & ((rows_left <= 1) | (cols_left[cols_N] <= 1))
        rows = np.flatnonzero(forced)
        if not len(rows):
            return np.flatnonzero(open_N)
        open_N[rows] = False
        cols_left = cols_left - tight_NN[rows].sum(0)
        rows_left = rows_left - tight_NN[:, cols_N[rows]].sum(1)


def has_cycle(tight_NM: Array) -> bool:
    """Whether the tight edges hold a cycle; without one, masses have a single plan along them."""
    rows_open = np.ones(tight_NM.shape[0], dtype=bool)
    cols_open = np.ones(tight_NM.shape[1], dtype=bool)
    rows_left, cols_left = tight_NM.sum(1), tight_NM.sum(0)
    while True:
        rows = np.flatnonzero(rows_open & (rows_left <= 1))
        rows_open[rows] = False
        cols_left = cols_left - tight_NM[rows].sum(0)
        cols = np.flatnonzero(cols_open & (cols_left <= 1))
        cols_open[cols] = False
        rows_left = rows_left - tight_NM[:, cols].sum(1)
        if not len(rows) and not len(cols):
            return bool(rows_open.any())


def tidy_assignment(tight_NN: Array, cols_N: Array, same_units: bool) -> Array:
    """The optimal assignment to keep when nothing else decides: columns for the rows, ascending.

    The identity, if it is among them; otherwise rows (columns) that are equal in what they may
    take keep their order. (A second assignment by index distance would say the same, but is the
    classic worst case of the solver: seconds for a thousand dead units.)

    Args:
        tight_NN: Tight edges of the open part, units ascending.
        cols_N: An assignment along them.
        same_units: Whether row k and column k are the same unit, for all k.
    """
    if same_units and tight_NN.diagonal().all():
        return np.arange(len(cols_N))
    groups = [_groups(tight_NN), _groups(np.ascontiguousarray(tight_NN.T))]
    matched = cols_N.copy()
    while True:
        before = matched.copy()
        for side in groups:
            for group in side:
                matched[group] = np.sort(matched[group])
            matched = np.argsort(matched)  # now columns to rows, and back
        if np.array_equal(before, matched):
            return matched


def _groups(tight: Array) -> list[Array]:
    """Sets of two and more equal rows."""
    members: dict[bytes, list[int]] = {}
    for k, row in enumerate(np.packbits(tight, axis=1)):
        members.setdefault(row.tobytes(), []).append(k)
    return [np.array(group) for group in members.values() if len(group) > 1]


def order_cost(rows: Array, cols: Array, shape: tuple[int, int]) -> Array:
    """Squared distance of relative positions: decides among equals when sizes or masses differ."""
    difference = (rows[:, None] + 0.5) / shape[0] - (cols + 0.5) / shape[1]
    return np.asarray(difference * difference)
