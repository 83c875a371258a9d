"""Plans: three representations, one meaning."""

import pytest
import torch

from otfuse_cli.transport.plan import Plan


def soft(n: int, m: int, seed: int = 0) -> torch.Tensor:
    plan = torch.rand(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return plan / plan.sum()


def cases() -> list[tuple[Plan, torch.Tensor]]:
    permutation = torch.zeros(3, 3, dtype=torch.float64)
    permutation[[2, 0, 1], [0, 1, 2]] = 1 / 3
    narrow = torch.tensor([[0.3, 0.0, 0.1], [0.0, 0.6, 0.0]], dtype=torch.float64)
    return [
        (Plan.from_index(torch.tensor([2, 0, 1])), permutation),
        (Plan.from_dense(narrow), narrow),
        (Plan.from_dense(soft(20, 30)), soft(20, 30)),
    ]


@pytest.mark.parametrize("k", range(3))
def test_every_kind_answers_alike(k: int) -> None:
    plan, matrix = cases()[k]
    assert (plan.hard, plan.sparse) == [(True, True), (False, True), (False, False)][k]
    assert plan.shape == tuple(matrix.shape)
    assert torch.equal(plan.dense(), matrix)
    torch.testing.assert_close(plan.mass_N, matrix.sum(1))
    torch.testing.assert_close(plan.mass_M, matrix.sum(0))
    assert plan.total == pytest.approx(1)
    assert plan.trace() == pytest.approx(float(matrix.diagonal().sum()))
    rows, cols, values = plan.entries()
    assert torch.equal(matrix[rows, cols], values)
    assert len(values) == int((matrix > 0).sum())
    cost = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(1))
    wanted = float((cost.double() * matrix).sum())
    assert plan.cost(cost) == pytest.approx(wanted, rel=1e-12)
    assert Plan.from_dense(matrix).cost(cost) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(ValueError, match="cost of shape"):
        plan.cost(torch.zeros(7, 7))


def test_a_dense_copy_is_a_copy() -> None:
    plan, matrix = cases()[2]
    plan.dense().zero_()
    assert torch.equal(plan.dense(), matrix)


def test_moved_fraction() -> None:
    assert Plan.identity(4).moved_fraction == 0
    assert Plan.from_index(torch.tensor([1, 0, 2, 3])).moved_fraction == 0.5
    assert Plan.from_dense(soft(2, 3)).moved_fraction is None
    matrix = torch.tensor([[0.4, 0.1], [0.2, 0.3]], dtype=torch.float64)
    assert Plan.from_dense(matrix).moved_fraction == pytest.approx(0.3)
    assert Plan.from_dense(matrix / 2).moved_fraction == pytest.approx(0.3)


def test_blend() -> None:
    a, b = Plan.identity(3), Plan.from_index(torch.tensor([2, 0, 1]))
    assert Plan.blend(a, b, 1) is a
    assert Plan.blend(a, b, 0) is b
    assert Plan.blend(a, Plan.identity(3), 0.3) is a
    mixed = Plan.blend(a, b, 0.25)
    assert mixed.sparse
    assert not mixed.hard
    torch.testing.assert_close(mixed.dense(), 0.25 * a.dense() + 0.75 * b.dense())
    dense = Plan.from_dense(soft(20, 20))
    other = Plan.identity(20)
    torch.testing.assert_close(
        Plan.blend(dense, other, 0.5).dense(), (dense.dense() + other.dense()) / 2
    )


def test_entries_at_one_place_add_up() -> None:
    plan = Plan.from_entries(
        torch.tensor([1, 0, 1, 0]),
        torch.tensor([2, 1, 2, 0]),
        torch.tensor([0.25, 0.25, 0.5, 0.0]),
        (2, 3),
    )
    assert [part.tolist() for part in plan.entries()] == [[0, 1], [1, 2], [0.25, 0.75]]


@pytest.mark.parametrize("index", [[0, 0], [1, 2], [-1, 0], [], [[0, 1]]])
def test_refuses_what_is_no_permutation(index: list[int]) -> None:
    with pytest.raises(ValueError, match="not a permutation"):
        Plan.from_index(torch.tensor(index))


def test_refuses_broken_plans() -> None:
    for value in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            Plan.from_dense(torch.tensor([[value, 1.0]]))
    one = torch.tensor([0])
    for row, col in ((2, 0), (0, 2), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            Plan.from_entries(one + row, one + col, torch.tensor([1.0]), (2, 2))
    with pytest.raises(ValueError, match="equal length"):
        Plan.from_entries(one, one, torch.tensor([1.0, 2.0]), (2, 2))
    with pytest.raises(ValueError, match="a matrix"):
        Plan.from_dense(torch.zeros(3))
    with pytest.raises(ValueError, match="differ in shape"):
        Plan.blend(Plan.identity(2), Plan.identity(3), 0.5)
    with pytest.raises(ValueError, match="beta"):
        Plan.blend(Plan.identity(2), Plan.identity(2), 1.5)


def test_a_plan_does_not_follow_its_inputs() -> None:
    index = torch.tensor([1, 0])
    plan = Plan.from_index(index)
    index[:] = 0
    assert plan.dense().tolist() == [[0, 0.5], [0.5, 0]]
