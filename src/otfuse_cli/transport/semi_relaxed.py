"""Semi-relaxed transport: the mass of the source is given, that of the anchor's units is free.

N units, M of them kept; rows = all units, columns = kept units. Without a column constraint the
optimal plan sends every unit to the nearest kept one, and which units to keep is a facility
location problem, solved greedily here. No names, no files.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from .plan import Plan


def nearest_plan(cost_NM: Tensor, mass_N: Tensor, kept_M: Tensor) -> Plan:
    """All mass of a unit to the kept unit that is nearest; kept units stay themselves.

    Args:
        cost_NM: Finite. Ties go to the lowest column.
        mass_N: Positive, float64, sums to 1.
        kept_M: The unit that each column is; distinct.

    Raises:
        ValueError: Shapes that don't fit, units kept twice, or a mass that is not positive.
    """
    n, m = cost_NM.shape
    kept_M = kept_M.to("cpu", torch.int64)
    if mass_N.shape != (n,) or kept_M.shape != (m,) or len(set(kept_M.tolist())) != m:
        raise ValueError(f"{m} columns, {tuple(kept_M.shape)} kept units, {n} rows")
    if not bool((mass_N > 0).all()):
        raise ValueError("every unit needs a positive mass")
    target_N = cost_NM.argmin(1).to("cpu")
    target_N[kept_M] = torch.arange(m)
    return Plan.from_entries(torch.arange(n), target_N, mass_N, (n, m))


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
