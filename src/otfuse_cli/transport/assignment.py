"""Linear assignment: the cheapest permutation, proved to be so, one answer among equals.

The only module that imports `lap` (the extra `fast`) or `scipy.optimize`, inside its functions.
Both find the same cost, lapx two to four times faster; whichever it was, dual potentials prove its
answer, and ties are decided after it (but for `quick_assign`). N units on both sides; numpy,
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from .plan import Plan
from .ties import TIGHT, Array, NotOptimalError, potentials, tidy_assignment, undecided

# Rows that temporaries hold: matrices are large, and one copy of them is enough.
_ROWS = 256


# A secondary cost, or what computes it where it is needed.
Tie = Tensor | Callable[[], Tensor]


def assign(cost: Array, tie_NN: Tie | None) -> Plan:
    """The cheapest hard plan. The tie cost, then the index, choose among what the cost left open.

    Args:
        cost: From `scaled`; used up.
        tie_NN: Secondary cost.

    Raises:
        NotOptimalError: No solver found a cheapest one.
    """
    n = len(cost)
    reduce_offsets(cost)
    rows = cols = np.arange(n)  # the part of the problem that is still open
    cols_N = np.empty(n, dtype=np.int64)
    tight = np.ones((0, 0), dtype=bool)
    for level in (None, tie_NN) if tie_NN is not None else (None,):
        if level is not None:
            cost = part(level, rows, cols)
            cost[~tight] = np.inf
            cost -= cost.min(1, keepdims=True)
            cost -= cost.min(0)
        matched, tight = _match(cost)
        cols_N[rows] = cols[matched]
        left = undecided(tight, matched)
        taken = np.sort(matched[left])
        rows, cols, tight = rows[left], cols[taken], tight[np.ix_(left, taken)]
        if not len(rows):
            break
    else:
        matched = np.searchsorted(cols, cols_N[rows])
        cols_N[rows] = cols[tidy_assignment(tight, matched, np.array_equal(rows, cols))]
    return _hard(cols_N)


def quick_assign(cost: Array) -> Plan:
    """What a solver says is the cheapest hard plan; `cost` is used up, nothing is proved."""
    reduce_offsets(cost)
    try:
        return _hard(_solvers()[0](cost))
    except NotOptimalError:  # lapx gave up; SciPy doesn't
        return _hard(_scipy(cost))


def _hard(cols_N: Array) -> Plan:
    index_M = np.empty_like(cols_N)
    index_M[cols_N] = np.arange(len(cols_N))
    return Plan.from_index(torch.from_numpy(index_M))


def scaled_to_one(cost_NM: Tensor, sign: float = 1.0) -> Array:
    """A float64 copy with entries up to 1: the power of two changes no digit."""
    peak = max(abs(bound.item()) for bound in torch.aminmax(cost_NM.detach()))
    cost = cost_NM.detach().to("cpu", torch.float64, copy=True)
    exponent = math.frexp(peak)[1]
    if exponent < -1000:  # 2^1000 and more: in two steps, each of them finite
        cost, exponent = cost.mul_(2.0**1000), exponent + 1000
    return np.asarray(cost.mul_(sign * 2.0**-exponent).numpy())


def part(tie_NM: Tie, rows: Array, cols: Array) -> Array:
    """Rows and columns of a tie cost that are still open, scaled to 1."""
    tie_NM = tie_NM if isinstance(tie_NM, Tensor) else tie_NM()
    return scaled_to_one(tie_NM.detach().cpu()[torch.from_numpy(rows)][:, torch.from_numpy(cols)])


def reduce_offsets(cost: Array) -> None:
    """Remove row and column offsets in place, which changes no optimal plan.

    Spares the assignment solver, which has no initialisation of its own, up to 30 times its work,
    and keeps digits when a small spread sits on a large offset.
    """
    cost -= cost.mean(1, keepdims=True)
    cost -= cost.mean(0)
    cost -= cost.min(1, keepdims=True)
    cost -= cost.min(0)


def _match(cost: Array) -> tuple[Array, Array]:
    """Cheapest assignment (a column for each row), proved so, and the tight edges.

    Raises:
        NotOptimalError: What the solvers found is not proved.
    """
    peak = float(cost.max())
    if math.isinf(peak):
        peak = float(cost[np.isfinite(cost)].max())
    slack = TIGHT * max(1.0, peak)
    for solver in _solvers():
        try:
            matched = solver(cost)
            u, v = potentials(cost, matched, slack / 8)
        except NotOptimalError:
            if solver is _scipy:
                raise
        else:
            break
    tight = np.empty(cost.shape, dtype=bool)
    for rows in _blocks(len(cost)):
        tight[rows] = cost[rows] <= u[rows, None] + v + slack
    return matched, tight


def _solvers() -> tuple[Callable[[Array], Array], ...]:
    """The faster one first, where it is installed."""
    return (_lapx, _scipy) if find_spec("lap") is not None else (_scipy,)


def _lapx(cost: Array) -> Array:
    """Jonker-Volgenant.

    Raises:
        NotOptimalError: It gave up.
    """
    import lap

    try:
        return np.asarray(lap.lapjvr(cost, return_cost=False)[1], dtype=np.int64)
    except (ValueError, RuntimeError) as error:
        raise NotOptimalError from error


def _scipy(cost: Array) -> Array:
    """Shortest augmenting paths.

    Rows that lose most by their second choice go first: among many equal rows (dead units) the
    solver otherwise searches nearly everything for each of them.
    """
    from scipy.optimize import linear_sum_assignment

    n = len(cost)
    regret = np.zeros(n)
    if n > 1:
        for rows in _blocks(n):
            regret[rows] = np.partition(cost[rows], 1, axis=1)[:, 1]
    order = np.argsort(-regret, kind="stable")
    matched = np.empty(n, dtype=np.int64)
    _reorder(cost, order)
    try:
        matched[order] = linear_sum_assignment(cost)[1]
    finally:
        _reorder(cost, np.argsort(order))
    return matched


def _reorder(cost: Array, order: Array) -> None:
    """`cost[:] = cost[order]`, one row at a time: a copy of it would be the largest there is."""
    done = order == np.arange(len(order))
    for start in range(len(order)):
        if done[start]:
            continue
        first, at = cost[start].copy(), start
        while (source := int(order[at])) != start:
            cost[at] = cost[source]
            done[at] = True
            at = source
        cost[at] = first
        done[at] = True


def _blocks(rows: int) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, rows, _ROWS)]
