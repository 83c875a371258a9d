"""Semi-relaxed transport: the mass of the source is given, that of the anchor's units is free.

N units, M of them kept; rows = all units, columns = kept units. Without a column constraint the
optimal plan sends every unit to the nearest kept one, and which units to keep is a facility
location problem, solved greedily here. In many dimensions a few kept units are nearest to most
others; a bound on what a column takes keeps them from collecting everything. No names, no files.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from .plan import Plan
from .solve import solve


def nearest_plan(cost_NM: Tensor, mass_N: Tensor, kept_M: Tensor) -> Plan:
    """All mass of a unit to the kept unit that is nearest; kept units stay themselves.

    Args:
        cost_NM: Finite. Ties go to the lowest column.
        mass_N: Positive, float64, sums to 1.
        kept_M: The unit that each column is; distinct.

    Raises:
        ValueError: Shapes that don't fit, units kept twice, or a mass that is not positive.
    """
    kept_M = _checked(cost_NM, mass_N, kept_M)
    n, m = cost_NM.shape
    target_N = cost_NM.argmin(1).to("cpu")
    target_N[kept_M] = torch.arange(m)
    return Plan.from_entries(torch.arange(n), target_N, mass_N, (n, m))


def bounded_plan(cost_NM: Tensor, mass_N: Tensor, kept_M: Tensor, bound: float) -> Plan:
    """Kept units stay themselves; the others' mass goes where it is cheap, nowhere too much of it.

    Shares of units are sent at least cost so that no kept unit receives more than `bound` times
    the number of other units over M: 1 gives balanced columns, infinity `nearest_plan`. Solved
    exactly, with one more row at no cost for what the columns leave free. A share carries its
    part of the unit's mass.

    Args:
        cost_NM: Finite.
        mass_N: Positive, float64, sums to 1.
        kept_M: The unit that each column is; distinct.
        bound: At least 1.

    Raises:
        ValueError: As `nearest_plan`, or a bound under 1.
        SolveFailed: The solver failed.
    """
    kept_M = _checked(cost_NM, mass_N, kept_M)
    if not bound >= 1:
        raise ValueError(f"the bound is at least 1, got {bound}")
    n, m = cost_NM.shape
    rest_N = torch.ones(n, dtype=torch.bool)
    rest_N[kept_M] = False
    other_R = rest_N.nonzero().flatten()
    rows, cols, values = [kept_M], [torch.arange(m)], [mass_N[kept_M]]
    count = len(other_R)
    if count:
        cost_RM = cost_NM.to("cpu", torch.float64)[other_R]
        share_R = torch.full((count,), 1.0 / count, dtype=torch.float64)
        if bound > 1:
            cost_RM = torch.cat([cost_RM, torch.zeros(1, m, dtype=torch.float64)])
            share_R = torch.cat([share_R, torch.tensor([bound - 1.0], dtype=torch.float64)])
        rows_E, cols_E, values_E = solve(cost_RM, share_R / bound).plan.entries()
        moved = rows_E < count
        unit_E = other_R[rows_E[moved]]
        rows.append(unit_E)
        cols.append(cols_E[moved])
        values.append(values_E[moved] * (bound * count) * mass_N[unit_E])
    return Plan.from_entries(torch.cat(rows), torch.cat(cols), torch.cat(values), (n, m))


def choose_support(cost_NN: Tensor, mass_N: Tensor, keep: int) -> Tensor:
    """The units to keep so that moving all mass onto them costs little.

    Greedy facility location: the unit whose choice lowers the semi-relaxed transport cost most,
    again and again (within 1 - 1/e of the best reduction). Gains only shrink as the set grows, so
    that most of them need no second look.

    Args:
        cost_NN: Cost of replacing unit n (row) by unit m (column), symmetric or not.
        mass_N: float64, sums to 1.
        keep: How many, 1 to N.

    Returns:
        index_M, int64, ascending. Ties go to the lowest index.

    Raises:
        ValueError: Not a square cost, or nothing or too much to keep.
    """
    n = cost_NN.shape[0]
    if cost_NN.shape != (n, n) or mass_N.shape != (n,) or not 1 <= keep <= n:
        raise ValueError(f"cost {tuple(cost_NN.shape)}, mass {tuple(mass_N.shape)}, keep {keep}")
    cost_NN = cost_NN.to("cpu", torch.float64)
    nearest_N = torch.full((n,), float(cost_NN.max()), dtype=torch.float64)

    def gain(unit: int) -> float:
        return float((nearest_N - cost_NN[:, unit]).clamp_(min=0) @ mass_N)

    queue = [(-gain(unit), unit) for unit in range(n)]
    heapq.heapify(queue)
    chosen: list[int] = []
    while len(chosen) < keep:
        _, unit = heapq.heappop(queue)
        fresh = (-gain(unit), unit)
        if queue and fresh > queue[0]:
            heapq.heappush(queue, fresh)
            continue
        chosen.append(unit)
        nearest_N = torch.minimum(nearest_N, cost_NN[:, unit])
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def _checked(cost_NM: Tensor, mass_N: Tensor, kept_M: Tensor) -> Tensor:
    n, m = cost_NM.shape
    kept_M = kept_M.to("cpu", torch.int64)
    if mass_N.shape != (n,) or kept_M.shape != (m,) or len(set(kept_M.tolist())) != m:
        raise ValueError(f"{m} columns, {tuple(kept_M.shape)} kept units, {n} rows")
    if not bool((mass_N > 0).all()):
        raise ValueError("every unit needs a positive mass")
    return kept_M
