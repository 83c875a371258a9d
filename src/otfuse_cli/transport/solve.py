"""Solvers: from a cost and two masses to a plan that was checked.

The only module that imports `ot`, inside its functions; assignments are those of `assignment`.
N source units, M anchor units; rows = source, columns = anchor. No names, no files.

Importing `ot` imports torch, and JAX, TensorFlow and CuPy where they are installed. Its
POT_BACKEND_DISABLE_* variables could spare the last three, but they act on the whole process for
good (a caller's own use of `ot` with JAX would break), so they are left to whoever starts it.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import SolveFailed, UsageError
from . import mass as masses
from .assignment import Tie, assign, part, quick_assign, reduce_offsets, scaled_to_one
from .plan import Plan
from .scaling import scale
from .ties import TIGHT, Array, NotOptimalError, has_cycle, has_ties, order_cost

__all__ = ["Solution", "Solver", "has_ties", "maximise", "solve"]

_EXACT = 1e-9  # marginals of an exact plan, L1
_DUST = 1e-13  # share of the mean mass that is no mass
_ENTROPIC = 1e-4  # marginals of a Sinkhorn plan, L1


class Solver(StrEnum):
    """How a transport problem is solved."""

    EXACT = "exact"
    SINKHORN = "sinkhorn"


@dataclass(frozen=True)
class Solution:
    """A checked plan.

    Attributes:
        plan: The transport plan.
        ot_cost: `<plan, cost>` with the cost as given, in float64.
        solver: What solved it: `assignment`, `emd` or `sinkhorn`.
        marginal_error: L1 distance of the plan's row or column sums from the masses, the larger.
    """

    plan: Plan
    ot_cost: float
    solver: str
    marginal_error: float


def solve(
    cost_NM: Tensor,
    mass_N: Tensor | None = None,
    mass_M: Tensor | None = None,
    *,
    solver: Solver = Solver.EXACT,
    epsilon: float = 0.05,
    absolute: bool = False,
    tie_NM: Tie | None = None,
) -> Solution:
    """Solve a discrete transport problem (the paper's section 3, Eq. 1), and check the result.

    Exact with equal sizes and uniform masses is a linear assignment and gives a hard plan; exact
    otherwise is the network simplex. Among equally cheap exact plans the one with the least tie
    cost is taken, then the one nearest to the identity.

    Args:
        cost_NM: Any floating dtype and device; solved in float64, exactly on the CPU.
        mass_N: Source masses, float, summing to 1; None = uniform.
        mass_M: Anchor masses, likewise.
        solver: Exact or Sinkhorn (log domain).
        epsilon: Entropy, in standard deviations of the cost with row and column means removed.
        absolute: In the cost's own units instead.
        tie_NM: Secondary cost, or a function that computes it, consulted only among exactly equal
            plans.

    Raises:
        SolveFailed: The cost is not finite, or the solver didn't converge or broke a marginal.
        UsageError: `epsilon` is not a positive number.
        ValueError: Empty or mismatched shapes, masses that are negative or don't sum to 1.
    """
    if solver is Solver.EXACT:
        cost_NM = cost_NM.cpu()
    _check_cost(cost_NM)
    n, m = cost_NM.shape
    _check_tie(tie_NM, cost_NM)
    a_N, b_M = _mass(mass_N, n), _mass(mass_M, m)
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise UsageError("--epsilon must be a positive number", where=f"--epsilon {epsilon}")
    if solver is not Solver.EXACT:
        plan, name = _entropic(cost_NM, a_N, b_M, epsilon, absolute), solver.value
    elif n == m and _is_uniform(a_N) and _is_uniform(b_M):
        plan, name = _assignment(cost_NM, tie_NM), "assignment"
    else:
        plan, name = _emd(scaled_to_one(cost_NM), a_N, b_M, tie_NM), "emd"
    error = max(
        float((plan.mass_N - a_N).abs().sum()),
        float((plan.mass_M - b_M).abs().sum()),
    )
    limit = _ENTROPIC if name == "sinkhorn" else _EXACT
    if not error < limit:
        _fail(cost_NM, f"its marginals are off by {error:.1e}, more than {limit:.0e}")
    return Solution(plan, plan.cost(cost_NM), name, error)


def maximise(similarity_NN: Tensor, *, tie_NN: Tie | None = None, proved: bool = True) -> Plan:
    """The hard plan of the largest total similarity, by linear assignment.

    Args:
        similarity_NN: Square, any floating dtype and device; solved in float64 on the CPU.
        tie_NN: Secondary cost (least wins) among equally good plans; then nearest to the identity.
        proved: False for a step on the way, in half the time: what the solver says is taken, also
            which of equally good plans.

    Raises:
        SolveFailed: The similarity is not finite.
        ValueError: Not square, or empty.
    """
    similarity_NN = similarity_NN.cpu()
    _check_cost(similarity_NN)
    if similarity_NN.shape[0] != similarity_NN.shape[1]:
        raise ValueError(f"an assignment is square, got {tuple(similarity_NN.shape)}")
    _check_tie(tie_NN, similarity_NN)
    if not proved:
        return quick_assign(scaled_to_one(similarity_NN, sign=-1.0))
    return _assignment(similarity_NN, tie_NN, sign=-1.0)


def _check_tie(tie_NM: Tie | None, cost_NM: Tensor) -> None:
    if not isinstance(tie_NM, Tensor):
        return
    if tie_NM.shape != cost_NM.shape:
        raise ValueError(f"tie cost {tuple(tie_NM.shape)} for a cost {tuple(cost_NM.shape)}")
    _check_cost(tie_NM)


def _check_cost(cost_NM: Tensor) -> None:
    if cost_NM.ndim != 2 or not cost_NM.is_floating_point() or not cost_NM.numel():
        raise ValueError(
            f"expected a non-empty floating matrix, got {tuple(cost_NM.shape)} {cost_NM.dtype}"
        )
    if not all(math.isfinite(bound.item()) for bound in torch.aminmax(cost_NM.detach())):
        _fail(
            cost_NM,
            "the cost holds NaN or infinity",
            fix="look for non-finite or overflowing weights or samples",
        )


def _fail(
    cost_NM: Tensor, why: str, fix: str = "use --solver exact", cause: Exception | None = None
) -> NoReturn:
    raise SolveFailed(
        "a transport problem was not solved",
        where=f"cost of {cost_NM.shape[0]} source x {cost_NM.shape[1]} anchor units",
        why=why,
        fix=fix,
    ) from cause


def _mass(mass: Tensor | None, size: int) -> Tensor:
    if mass is None:
        return masses.uniform(size)
    mass = mass.detach().to("cpu", torch.float64)
    if tuple(mass.shape) != (size,):
        raise ValueError(f"mass of shape {tuple(mass.shape)} for {size} units")
    # Float32 masses sum to 1 within 1e-6; what is left is removed, so that both sides agree.
    if not (mass.min() >= 0 and abs(float(mass.sum()) - 1) < 1e-5):
        raise ValueError("masses must be finite, not negative, and sum to 1")
    return mass / mass.sum()


def _is_uniform(mass: Tensor) -> bool:
    return bool((mass * mass.numel() - 1).abs().max() < 1e-6)


def _assignment(cost_NN: Tensor, tie_NN: Tie | None, sign: float = 1.0) -> Plan:
    try:
        return assign(scaled_to_one(cost_NN, sign=sign), tie_NN)
    except NotOptimalError as error:
        _fail(cost_NN, "the assignment found is not optimal", cause=error)


def _emd(cost: Array, a_N: Tensor, b_M: Tensor, tie_NM: Tie | None) -> Plan:
    """Network simplex; `cost` is scaled to 1 and used up.

    Units without mass are left out: they carry nothing and have no potentials.
    """
    n, m = cost.shape
    rows, cols = np.flatnonzero(a_N.numpy() > 0), np.flatnonzero(b_M.numpy() > 0)
    a, b = a_N.numpy()[rows], b_M.numpy()[cols]
    if len(rows) < n or len(cols) < m:
        cost = cost[np.ix_(rows, cols)]
    reduce_offsets(cost)
    flow, tight = _simplex(cost, a, b)
    for level in (tie_NM, None) if tie_NM is not None else (None,):
        if not has_cycle(tight):
            break
        cost = order_cost(rows, cols, (n, m)) if level is None else part(level, rows, cols)
        cost -= cost.min()
        # Dearer than any rerouting along N + M edges could save.
        cost[~tight] = (len(rows) + len(cols) + 1.0) * (float(cost.max()) or 1.0)
        chosen, still = _simplex(cost, a, b)
        if chosen[~tight].any():
            break
        flow, tight = chosen, tight & still
    row_E, col_E = np.nonzero(flow)
    at = torch.from_numpy(rows[row_E]), torch.from_numpy(cols[col_E])
    return Plan.from_entries(*at, torch.from_numpy(flow[row_E, col_E]), (n, m))


def _simplex(cost: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """An optimal flow and its tight edges."""
    import ot

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flow, log = ot.emd(a, b, cost, numItermax=10**9, log=True, center_dual=False)
    except Warning as warning:
        _fail(torch.from_numpy(cost), f"the network simplex stopped: {warning}", cause=warning)
    if log["warning"] is not None or log["result_code"] != 1 or not np.isfinite(flow).all():
        _fail(torch.from_numpy(cost), f"the network simplex stopped: {log['warning']}")
    flow[flow < _DUST / max(cost.shape)] = 0  # what rounding of the masses leaves on some edge
    gap = cost - log["u"][:, None] - log["v"]
    return flow, (gap <= 10 * TIGHT * max(1.0, float(cost.max()))) | (flow > 0)


def _entropic(cost_NM: Tensor, a_N: Tensor, b_M: Tensor, epsilon: float, absolute: bool) -> Plan:
    """The Sinkhorn plan, on the cost's device in float64."""
    rows, cols = a_N.nonzero().flatten(), b_M.nonzero().flatten()
    device = cost_NM.device
    peak = max(abs(bound.item()) for bound in torch.aminmax(cost_NM.detach())) or 1.0
    cost = cost_NM.detach()[rows.to(device)][:, cols.to(device)].to(torch.float64) / peak
    centred = cost - cost.mean(1, keepdim=True)
    centred -= centred.mean(0)
    # A cost without spread leaves nothing to blur; any epsilon gives its plan.
    spread = float(centred.square().mean().sqrt())
    blur = epsilon / peak if absolute else epsilon * (spread if spread > 1e-12 else 1.0)
    a, b = a_N[rows].to(device), b_M[cols].to(device)
    result = scale(centred, a, b, epsilon=blur)
    finite = bool(torch.isfinite(result.plan_NM.sum()))
    if not (finite and result.residual < _ENTROPIC):
        _fail(
            cost_NM,
            f"scaling left a residual of {result.residual:.1e} after {result.iterations} steps, "
            f"more than {_ENTROPIC:.0e}",
            fix=f"use a larger --epsilon (it was {epsilon:g}), or --solver exact",
        )
    plan_NM = torch.zeros(cost_NM.shape, dtype=torch.float64)
    plan_NM[rows[:, None], cols] = result.plan_NM.cpu()
    return Plan.from_dense(plan_NM)
