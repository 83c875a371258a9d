"""Maps against einsum with dense matrices; twins kept exactly; bits kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otfuse_cli.transport.cost import cost_matrix
from otfuse_cli.transport.maps import Coupling, Permutation, as_map
from otfuse_cli.transport.plan import Plan
from otfuse_cli.transport.solve import solve


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sparse_plan(n: int, m: int) -> Plan:
    return solve(rand(n, m, seed=9).abs()).plan


def dense_plan(n: int, m: int) -> Plan:
    return Plan.from_dense(torch.softmax(rand(n * m), 0).view(n, m))


@pytest.mark.parametrize("make", [sparse_plan, dense_plan])
@pytest.mark.parametrize("shape", [(24, 20), (20, 24), (24, 24)])
@pytest.mark.parametrize("scale", ["preserve", "paper"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_coupling_is_the_einsum(make, shape, scale, dim) -> None:  # type: ignore[no-untyped-def]
    n, m = shape
    plan = make(n, m) if make is dense_plan or n != m else Plan.blend(
        Plan.identity(n), Plan.from_index(torch.arange(n).roll(1)), 0.3
    )  # fmt: skip
    assert plan.sparse == (make is sparse_plan)
    coupling = as_map(plan, scale=scale)
    assert isinstance(coupling, Coupling)
    assert coupling.sizes == shape
    assert not coupling.hard
    matrix = plan.dense()
    produce = (matrix / matrix.sum(0)).float()
    consume = produce if scale == "paper" else (matrix / matrix.sum(1, keepdim=True)).float()
    weight = rand(n, n, 3, n, seed=1)
    moved = weight.movedim(dim, -1)
    for found, one in (
        (coupling.produce(weight, dim), produce),
        (coupling.consume(weight, dim), consume),
    ):
        wanted = torch.einsum("...n,nm->...m", moved, one).movedim(-1, dim)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous()
        assert found.dtype == torch.float32


def test_dtypes() -> None:
    coupling = as_map(sparse_plan(6, 4))
    assert coupling.produce(rand(6, dtype=torch.float64), 0).dtype == torch.float64
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        half = rand(6, 5).to(dtype)
        found = coupling.produce(half, 0)
        assert found.dtype == torch.float32
        assert torch.equal(found, coupling.produce(half.float(), 0))
    with pytest.raises(ValueError, match="averages"):
        coupling.produce(torch.arange(6), 0)


def test_the_tensor_is_not_changed() -> None:
    for plan in (sparse_plan(6, 4), dense_plan(30, 40), Plan.from_index(torch.arange(6).flip(0))):
        weight = rand(plan.shape[0], plan.shape[0])
        before = weight.clone()
        as_map(plan).produce(weight, 0)
        as_map(plan).consume(weight, 1)
        assert torch.equal(weight, before)


ALL = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_permutation_keeps_every_bit(dtype: torch.dtype) -> None:
    index = torch.tensor([2, 0, 3, 1])
    weight = (8 * rand(4, 3, 4)).to(dtype)
    if dtype.is_floating_point:
        weight[0, 0, 0] = float("nan")
    permutation = as_map(Plan.from_index(index))
    assert isinstance(permutation, Permutation)
    assert permutation.hard
    found = permutation.produce(weight, 0)
    assert found.dtype == dtype
    for m, n in enumerate(index.tolist()):
        assert torch.equal(found[m].view(torch.uint8), weight[n].view(torch.uint8))
    columns = permutation.consume(weight, -1)
    assert torch.equal(
        columns.movedim(-1, 0).contiguous().view(torch.uint8),
        permutation.produce(weight.movedim(-1, 0).contiguous(), 0).view(torch.uint8),
    )
    back = Permutation(torch.argsort(permutation.index_M)).produce(found, 0)
    assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))


def test_permutation_of_strided_8_bit_floats() -> None:
    weight = rand(4, 6).to(torch.float8_e4m3fn).T
    found = Permutation(torch.tensor([3, 1, 0, 2])).produce(weight, 1)
    assert torch.equal(found.float(), weight.float()[:, [3, 1, 0, 2]])


def test_the_identity_returns_the_tensor_itself() -> None:
    weight = rand(5, 5)
    identity = as_map(Plan.identity(5))
    assert identity.produce(weight, 0) is weight
    assert identity.consume(weight, 1) is weight


def test_sizes_are_checked() -> None:
    for chart in (as_map(Plan.from_index(torch.tensor([1, 0]))), as_map(dense_plan(2, 3))):
        for shape, dim in (((3, 2), 0), ((2, 3), 1), ((2,), 1), ((), 0)):
            with pytest.raises(ValueError, match="2 source units"):
                chart.produce(torch.zeros(shape), dim)
    with pytest.raises(ValueError, match="preserve or paper"):
        Coupling(Plan.identity(2), scale="other")  # type: ignore[arg-type]


@pytest.mark.parametrize("dense", [False, True])
def test_where_no_mass_arrives_the_anchor_stays(dense: bool) -> None:
    matrix = torch.zeros(40, 30) if dense else torch.zeros(4, 3)
    if dense:
        matrix[1:, 1:] = rand(39, 29).abs()
    else:
        matrix[[1, 2, 3], [1, 2, 2]] = torch.tensor([0.25, 0.5, 0.25])
    matrix[2, 0] = 1e-14 * matrix.sum()  # what an unbalanced solver leaves of a unit
    plan = Plan.from_dense(matrix / matrix.sum())
    assert plan.sparse != dense
    coupling = as_map(plan)
    n, m = plan.shape
    weight, anchor = rand(n, 5), rand(m, 5, seed=3)
    weight[0] = float("inf") if not dense else 1e30  # a unit without mass is dropped
    found = coupling.produce(weight, 0, anchor)
    assert torch.equal(found[0], anchor[0])
    assert torch.isfinite(found).all()
    assert found.abs().max() < 1e3
    columns = coupling.consume(rand(5, n), 1, rand(5, m, seed=3))
    assert torch.equal(columns[:, 0], rand(5, m, seed=3)[:, 0])
    assert torch.isfinite(columns).all()
    assert torch.equal(coupling.produce(weight, 0, anchor.half())[0], anchor[0].half().float())
    for wrong in (None, anchor[:, :2]):
        with pytest.raises(ValueError, match="receive no mass"):
            coupling.produce(weight, 0, wrong)


def network(first: torch.Tensor, bias: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.relu(rand(20, 6, seed=7) @ first.T + bias) @ second.T


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("widen_source", [True, False])
def test_a_widened_twin_keeps_its_function(copies: int, widen_source: bool) -> None:
    narrow = rand(4, 6, seed=1), rand(4, seed=2), rand(5, 4, seed=3)
    order = torch.randperm(4 * copies, generator=torch.Generator().manual_seed(4))
    wide = (
        narrow[0].repeat(copies, 1)[order],
        narrow[1].repeat(copies)[order],
        narrow[2].repeat(1, copies)[:, order] / copies,
    )
    source, anchor = (wide, narrow) if widen_source else (narrow, wide)
    chart = as_map(solve(cost_matrix(source[0], anchor[0])).plan)
    moved = chart.produce(source[0], 0), chart.produce(source[1], 0), chart.consume(source[2], 1)
    for found, wanted in zip(moved, anchor, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(network(*moved), network(*source), rtol=1e-5, atol=1e-5)
    # The paper's scale multiplies the layer by M / N instead.
    paper = as_map(chart.plan, scale="paper").consume(source[2], 1)
    ratio = anchor[0].shape[0] / source[0].shape[0]
    torch.testing.assert_close(paper, moved[2] * ratio, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**31))
def test_property_maps_of_optimal_plans(n: int, m: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(n, m, generator=generator)
    chart = as_map(solve(cost).plan)
    ones = torch.ones(n)
    torch.testing.assert_close(chart.produce(ones, 0), torch.ones(m))  # columns sum to 1
    total = chart.consume(torch.rand(3, n, generator=generator), 1)
    assert total.shape == (3, m)
    weight = torch.rand(n, n, generator=generator)
    torch.testing.assert_close(chart.consume(weight, 1).sum(1), weight.sum(1))  # rows sum to 1
