"""Solvers against scipy, POT and brute force; ties; refusals."""

import itertools
import warnings

import numpy as np
import ot
import pytest
import scipy.optimize
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from otfuse_cli.errors import SolveFailed, UsageError
from otfuse_cli.transport import assignment, mass, scaling, ties
from otfuse_cli.transport.cost import cost_matrix, unit_rows
from otfuse_cli.transport.solve import Solver, has_ties, maximise, solve


def rows(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def neurons(kind: str, n: int, m: int) -> torch.Tensor:
    """Costs as they occur between layers."""
    source, anchor = rows(n, 48, 1), rows(m, 48, 2)
    order = torch.randperm(max(n, m), generator=torch.Generator().manual_seed(3))
    match kind:
        case "noisy":
            anchor = source[order % n][:m] + 0.3 * anchor
        case "heavy":
            source, anchor = source * rows(n, 1, 4).exp(), anchor * rows(m, 1, 5).exp()
        case "dead":
            source[::2] = 0
            anchor[order[: m // 2] % m] = 0
            return cost_matrix(unit_rows(source), unit_rows(anchor), dead_cost=1.0)
        case "duplicates":
            source = source[: n // 4].repeat(5, 1)[:n]
            anchor = anchor[: m // 4].repeat(5, 1)[:m]
        case "offset":  # a spread of 1e-5 on 1, in float32
            return 1 + 1e-5 * torch.rand(n, m, generator=torch.Generator().manual_seed(6))
        case "integer":
            return torch.randint(0, 4, (n, m), generator=torch.Generator().manual_seed(7)).float()
    return cost_matrix(source, anchor)


KINDS = ["gaussian", "noisy", "heavy", "dead", "duplicates", "offset", "integer"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 37, 128])
def test_assignment_costs_what_scipy_finds(kind: str, n: int) -> None:
    cost = neurons(kind, n, n) if n > 3 or kind != "duplicates" else rows(n, n).abs()
    solution = solve(cost)
    raw = cost.double().numpy()
    wanted = raw[linear_sum_assignment(raw)].mean()
    assert solution.solver == "assignment"
    assert solution.plan.hard
    assert solution.marginal_error < 1e-12
    assert solution.ot_cost == pytest.approx(wanted, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (48, 24), (1, 5), (5, 1)])
def test_simplex_costs_what_pot_finds(kind: str, shape: tuple[int, int]) -> None:
    cost = neurons(kind, *shape) if min(shape) > 3 else rows(*shape).abs()
    solution = solve(cost)
    wanted = ot.emd2([], [], cost.double().numpy())
    assert solution.solver == "emd"
    assert solution.plan.sparse
    assert len(solution.plan.entries()[0]) <= sum(shape) - 1
    assert solution.marginal_error < 1e-12
    assert solution.ot_cost == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_masses(kind: str) -> None:
    cost = neurons(kind, 40, 40)
    a, b = mass.from_norms(rows(40, 1, 8).abs()[:, 0]), mass.from_norms(rows(40, 1, 9).abs()[:, 0])
    solution = solve(cost, a, b)
    wanted = ot.emd2(a.numpy(), b.numpy(), cost.double().numpy())
    assert solution.solver == "emd"
    assert solution.ot_cost == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(solution.plan.mass_N, a, atol=1e-12, rtol=0)
    torch.testing.assert_close(solution.plan.mass_M, b, atol=1e-12, rtol=0)


def test_units_without_mass_are_left_out() -> None:
    a, b = torch.tensor([0.5, 0.0, 0.5]), torch.tensor([0.25, 0.75, 0.0, 0.0])
    for solver in Solver:
        plan = solve(rows(3, 4).abs(), a, b, solver=solver).plan.dense()
        assert (plan[1] == 0).all()
        assert (plan[:, 2:] == 0).all()
        assert torch.isfinite(plan).all()


def test_uniform_masses_given_as_float32_are_an_assignment() -> None:
    a = torch.full((7,), 1 / 7)
    assert solve(rows(7, 7), a, a).solver == "assignment"


def test_offsets_are_removed_before_the_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(cost: np.ndarray) -> object:
        seen.append((cost.min(0).max(), cost.min(1).max(), cost.max()))
        return linear_sum_assignment(cost)

    monkeypatch.setattr(assignment, "find_spec", lambda name: None)
    monkeypatch.setattr(scipy.optimize, "linear_sum_assignment", watched)
    cost = neurons("heavy", 30, 30) + 1e3 * rows(30, 1).abs()
    solve(cost)
    assert len(seen) == 1
    assert seen[0][:2] == (0, 0)
    assert seen[0][2] < 0.1


@pytest.mark.parametrize("factor", [1e-310, 1e-300, 1e300])
def test_extreme_scales(factor: float) -> None:
    cost = rows(9, 9).double().abs()
    assert torch.equal(solve(cost * factor).plan.dense(), solve(cost).plan.dense())
    torch.testing.assert_close(solve(cost[:6] * factor).plan.dense(), solve(cost[:6]).plan.dense())


# Ties


def test_a_constant_cost_is_the_identity() -> None:
    for value in (0.0, 0.1, -3.0, 1e-30, 1e30):
        for n in (1, 2, 33):
            plan = solve(torch.full((n, n), value)).plan
            assert plan.index_M is not None
            assert plan.index_M.tolist() == list(range(n))
    offsets = rows(9, 1, 1).double() + rows(1, 9, 2).double()
    assert solve(offsets).plan.moved_fraction == 0


def test_the_identity_is_preferred_among_equals() -> None:
    cost = neurons("integer", 30, 30)
    index = maximise(-cost).index_M
    assert index is not None
    # Relabelled so that the identity is optimal, it is taken, whatever else is.
    assert solve(cost[index]).plan.moved_fraction == 0


def test_equal_units_keep_their_order() -> None:
    cost = torch.rand(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cost[[1, 4, 6]] = cost[1].clone()
    index = solve(cost).plan.index_M
    assert index is not None
    anchor_of = torch.argsort(index)[[1, 4, 6]]
    assert anchor_of.tolist() == sorted(anchor_of.tolist())
    columns = solve(cost.T).plan.index_M
    assert columns is not None
    assert columns[[1, 4, 6]].tolist() == sorted(columns[[1, 4, 6]].tolist())


def test_the_second_cost_decides_among_ties_only() -> None:
    source, anchor = rows(24, 8, 1), rows(24, 8, 2)
    source[:12] = 0
    anchor[6:18] = 0
    scale = torch.arange(1.0, 25)[:, None]  # parallel to others, of other norms
    source[12:16] = source[12] * scale[:4]
    anchor[:4] = source[12] * scale[:4].flip(0)
    cost = cost_matrix(unit_rows(source), unit_rows(anchor), dead_cost=1.0)
    tie = cost_matrix(source, anchor)
    assert has_ties(cost)
    plain, decided = solve(cost), solve(cost, tie_NM=tie)
    assert decided.ot_cost == pytest.approx(plain.ot_cost, rel=1e-12)
    assert decided.plan.cost(tie) < plain.plan.cost(tie)
    index = decided.plan.index_M
    assert index is not None
    assert index[:4].tolist() == [15, 14, 13, 12]
    # A tie cost that contradicts a cost without ties changes nothing.
    clear = cost_matrix(rows(24, 8, 3), rows(24, 8, 4))
    assert torch.equal(
        solve(clear).plan.dense(), solve(clear, tie_NM=1e6 * torch.rand(24, 24)).plan.dense()
    )


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_the_second_cost_needs_no_scale(scale: float) -> None:
    cost = torch.zeros(6, 6)
    cost[3:] = 5
    tie = rows(6, 6).abs()
    wanted = linear_sum_assignment(tie.double().numpy())[1]
    index = solve(cost, tie_NM=tie * scale).plan.index_M
    assert index is not None
    assert torch.argsort(index).tolist() == wanted.tolist()


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), st.integers(0, 2**31))
def test_property_lexicographic_optimum(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cost = torch.randint(0, 3, (n, n), generator=generator).double()
    tie = torch.randint(0, 3, (n, n), generator=generator).double()
    plan = solve(cost, tie_NM=tie).plan
    found = round(plan.cost(cost) * n), round(plan.cost(tie) * n)
    every = [
        (sum(int(c[i, p[i]]) for i in range(n)), sum(int(t[i, p[i]]) for i in range(n)))
        for c, t in [(cost, tie)]
        for p in itertools.permutations(range(n))
    ]
    assert found == min(every)


def test_ties_with_unequal_sizes() -> None:
    cost = torch.zeros(6, 3)
    tie = rows(6, 3).abs()
    plan = solve(cost, tie_NM=tie).plan
    assert plan.cost(tie) == pytest.approx(ot.emd2([], [], tie.double().numpy()), rel=1e-9)
    in_order = solve(cost).plan.dense()
    assert (in_order > 0).int().tolist() == torch.eye(3).repeat_interleave(2, 0).int().tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.integers(2, 7), st.integers(2, 7), st.integers(0, 2**31))
@example(7, 6, 346)  # rounding of the masses leaves 3e-17 on an edge that is not tight
def test_property_lexicographic_optimum_with_masses(n: int, m: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cost = torch.randint(0, 3, (n, m), generator=generator).double()
    tie = torch.rand(n, m, generator=generator, dtype=torch.float64)
    a = mass.from_norms(torch.randint(1, 4, (n,), generator=generator).float())
    plan = solve(cost, a, tie_NM=tie).plan
    b = mass.uniform(m)
    nudged = torch.from_numpy(ot.emd(a.numpy(), b.numpy(), (cost + 1e-6 * tie).numpy()))
    assert plan.cost(cost) == pytest.approx(float((nudged * cost).sum()), abs=1e-9)
    assert plan.cost(tie) == pytest.approx(float((nudged * tie).sum()), abs=1e-9)


def test_has_ties() -> None:
    clear = cost_matrix(rows(20, 8, 1), rows(20, 8, 2))
    assert not has_ties(clear)
    assert not has_ties(torch.zeros(1, 1))
    assert has_ties(torch.zeros(1, 2))
    twice = clear.clone()
    twice[3, 5] = twice[3, 7] = twice[3].min()
    assert has_ties(twice)
    assert has_ties(twice.T)
    rows_equal = torch.tensor([[5.0, 6, 9], [5, 6, 9], [1, 1.5, 2]])
    assert has_ties(rows_equal)
    assert has_ties(rows_equal.T)


def test_a_wrong_assignment_has_no_potentials() -> None:
    cost = np.array([[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(ties.NotOptimalError):
        ties.potentials(cost, np.array([1, 0]), 1e-13)
    u, v = ties.potentials(cost, np.array([0, 1]), 1e-13)
    assert (u[:, None] + v <= cost).all()


# Properties


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**31))
def test_property_never_dearer_than_any_other_plan(n: int, m: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(n, m, generator=generator)
    solution = solve(cost)
    torch.testing.assert_close(solution.plan.mass_N, mass.uniform(n), atol=1e-9, rtol=0)
    torch.testing.assert_close(solution.plan.mass_M, mass.uniform(m), atol=1e-9, rtol=0)
    assert solution.ot_cost <= float(cost.double().mean()) + 1e-12
    if n == m:
        order = torch.randperm(n, generator=generator)
        assert solution.ot_cost <= float(cost.double().diagonal().mean()) + 1e-12
        assert solution.ot_cost <= float(cost.double()[torch.arange(n), order].mean()) + 1e-12


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 10), st.integers(2, 10), st.integers(0, 2**31))
def test_property_relabelling_and_scaling(n: int, m: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(n, m, generator=generator, dtype=torch.float64)
    a = mass.from_norms(torch.rand(n, generator=generator))
    order = torch.randperm(n, generator=generator)
    plan = solve(cost, a).plan.dense()
    torch.testing.assert_close(solve(cost[order], a[order]).plan.dense(), plan[order])
    for factor in (1e-12, 3.0, 1e12):
        torch.testing.assert_close(solve(cost * factor, a).plan.dense(), plan)


def test_deterministic() -> None:
    for solver in Solver:
        cost = neurons("dead", 30, 20)
        first, second = solve(cost, solver=solver), solve(cost.clone(), solver=solver)
        assert torch.equal(first.plan.dense(), second.plan.dense())
        assert first.ot_cost == second.ot_cost


def test_the_cost_is_not_changed() -> None:
    cost = rows(6, 6).double()
    before = cost.clone()
    for solver in Solver:
        solve(cost, solver=solver)
    maximise(cost)
    assert torch.equal(cost, before)


def test_maximise() -> None:
    similarity = rows(40, 40)
    index = maximise(similarity).index_M
    assert index is not None
    wanted = linear_sum_assignment(similarity.double().numpy(), maximize=True)[1]
    assert torch.argsort(index).tolist() == wanted.tolist()
    assert maximise(torch.ones(5, 5)).moved_fraction == 0
    with pytest.raises(ValueError, match="square"):
        maximise(torch.zeros(2, 3))


# Entropic


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(48, 48), (40, 30)])
def test_sinkhorn_converges_at_any_scale(kind: str, shape: tuple[int, int], scale: float) -> None:
    cost = neurons(kind, *shape)
    solution = solve(cost * scale, solver=Solver.SINKHORN)
    exact = solve(cost * scale).ot_cost
    assert solution.solver == "sinkhorn"
    assert solution.marginal_error < 1e-4
    assert exact - 1e-4 * abs(exact) <= solution.ot_cost
    spread = float(cost.double().std()) * scale
    assert solution.ot_cost <= exact + 0.5 * spread + 1e-4 * abs(exact)


def test_sinkhorn_is_what_pot_finds() -> None:
    cost = rows(12, 9).double().abs()
    a = mass.from_norms(rows(12, 1, 5).abs()[:, 0])
    centred = cost - cost.mean(1, keepdim=True) - cost.mean(0) + cost.mean()
    blur = 0.2 * float(centred.square().mean().sqrt())
    wanted = ot.sinkhorn(
        a.numpy(), np.full(9, 1 / 9), cost.numpy(), blur, numItermax=10**5, stopThr=1e-12
    )
    found = solve(cost, a, solver=Solver.SINKHORN, epsilon=0.2).plan.dense()
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    absolute = solve(cost, a, solver=Solver.SINKHORN, epsilon=blur, absolute=True).plan.dense()
    np.testing.assert_allclose(absolute, wanted, atol=1e-6)
    tenfold = solve(10 * cost, a, solver=Solver.SINKHORN, epsilon=10 * blur, absolute=True)
    np.testing.assert_allclose(tenfold.plan.dense(), wanted, atol=1e-6)


def test_scaling_is_accelerated() -> None:
    # Without annealing 1,240 steps; without over-relaxation 2,610.
    cost = neurons("gaussian", 48, 48).double()
    cost /= cost.max()
    a, spread = mass.uniform(48), float(cost.std())
    assert scaling.scale(cost, a, a, epsilon=0.05 * spread).iterations <= 400


def test_sinkhorn_that_does_not_converge_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "_LIMIT", 20)
    with pytest.raises(SolveFailed) as failure:
        solve(neurons("dead", 40, 40), solver=Solver.SINKHORN)
    assert failure.value.exit_code == 5
    assert "larger --epsilon" in str(failure.value)
    assert "40 source x 40 anchor" in str(failure.value)


# Refusals


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(4, 4), (4, 3)])
@pytest.mark.parametrize("solver", list(Solver))
def test_refuses_a_non_finite_cost(value: float, shape: tuple[int, int], solver: Solver) -> None:
    cost = rows(*shape)
    cost[1, 2] = value
    with pytest.raises(SolveFailed, match="NaN or infinity"):
        solve(cost, solver=solver)
    with pytest.raises(SolveFailed, match="NaN or infinity"):
        solve(rows(*shape), tie_NM=cost)


def test_a_warning_of_pot_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    emd = ot.emd

    def hurried(*args: object, **options: object) -> object:
        return emd(*args, **{**options, "numItermax": 1})

    monkeypatch.setattr(ot, "emd", hurried)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(SolveFailed, match="network simplex stopped"):
            solve(rows(30, 20).abs())
    assert not caught


def test_a_status_of_pot_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = np.zeros((3, 2))
    log = {"warning": None, "result_code": 0, "u": np.zeros(3), "v": np.zeros(2)}
    monkeypatch.setattr(ot, "emd", lambda *args, **options: (zeros, log))
    with pytest.raises(SolveFailed, match="network simplex stopped"):
        solve(rows(3, 2))
    log["result_code"] = 1
    with pytest.raises(SolveFailed, match="marginals are off"):
        solve(rows(3, 2))


@pytest.mark.parametrize(
    ("cost", "a", "match"),
    [
        (torch.zeros(0, 0), None, "non-empty"),
        (torch.zeros(3), None, "non-empty"),
        (torch.zeros(2, 2, dtype=torch.int64), None, "floating"),
        (torch.zeros(2, 2), torch.ones(3) / 3, "mass of shape"),
        (torch.zeros(2, 2), torch.tensor([0.5, 0.6]), "sum to 1"),
        (torch.zeros(2, 2), torch.tensor([1.5, -0.5]), "not negative"),
        (torch.zeros(2, 2), torch.tensor([1.0, float("nan")]), "finite"),
    ],
)
def test_refuses_ill_posed_problems(cost: torch.Tensor, a: torch.Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        solve(cost, a)


def test_refuses_a_tie_cost_of_another_shape() -> None:
    with pytest.raises(ValueError, match="tie cost"):
        solve(torch.zeros(2, 2), tie_NM=torch.zeros(2, 3))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_options_that_are_not_positive(value: float) -> None:
    with pytest.raises(UsageError, match="--epsilon must be a positive number"):
        solve(torch.zeros(2, 2), solver=Solver.SINKHORN, epsilon=value)


@pytest.mark.parametrize("kind", ["random", "dead", "copies", "whole"])
def test_with_and_without_lapx_the_plan_is_the_same(kind, monkeypatch):
    lap = pytest.importorskip("lap")
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(300, 20, generator=generator, dtype=torch.float64)
    if kind == "dead":
        rows[::3] = 0
    if kind == "copies":
        rows[100:200] = rows[:100]
    cost = torch.cdist(rows, torch.roll(rows, 7, 0) + 0.3 * (kind == "random"))
    if kind == "whole":
        cost = (cost * 3).round()
    calls = []
    real = lap.lapjvr
    monkeypatch.setattr(lap, "lapjvr", lambda *a, **k: calls.append(1) or real(*a, **k))
    fast = solve(cost)
    assert calls
    monkeypatch.setattr(assignment, "find_spec", lambda name: None)
    plain = solve(cost)
    assert len(calls) == 1
    assert fast.ot_cost == pytest.approx(plain.ot_cost, rel=1e-12, abs=1e-15)
    assert torch.equal(fast.plan.index_M, plain.plan.index_M)


def test_what_lapx_says_is_not_trusted(monkeypatch):
    lap = pytest.importorskip("lap")
    cost = torch.rand(40, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    best = solve(cost)
    order = np.arange(40)
    monkeypatch.setattr(lap, "lapjvr", lambda *a, **k: (order, order))
    assert torch.equal(solve(cost).plan.index_M, best.plan.index_M)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(0, 2**16), without=st.booleans())
def test_what_is_not_proved_is_as_good(n: int, seed: int, without: bool) -> None:
    similarity = torch.randn(n, n, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        if without:
            patch.setattr(assignment, "find_spec", lambda name: None)
        quick = maximise(similarity, proved=False)
    assert quick.cost(similarity) == pytest.approx(maximise(similarity).cost(similarity), rel=1e-12)
