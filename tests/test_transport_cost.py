"""Ground metrics against brute force in float64 and against POT."""

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otfuse_cli.transport import cost as cost_module
from otfuse_cli.transport.cost import Metric, cost_matrix, paired_cost, unit_rows

POT_NAMES = {"euclidean": "euclidean", "sqeuclidean": "sqeuclidean", "cosine": "cosine"}


def rows(n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def brute(source: torch.Tensor, anchor: torch.Tensor, metric: Metric) -> np.ndarray:
    a, b = source.double().numpy(), anchor.double().numpy()
    if metric is Metric.COSINE:
        a = a / np.linalg.norm(a, axis=1, keepdims=True)
        b = b / np.linalg.norm(b, axis=1, keepdims=True)
    distance = np.linalg.norm(a[:, None] - b[None], axis=2)
    return {"euclidean": distance, "sqeuclidean": distance**2, "cosine": distance**2 / 2}[metric]


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matches_pot(metric: Metric, dtype: torch.dtype) -> None:
    source, anchor = rows(13, 40, 1, dtype), rows(9, 40, 2, dtype)
    found = cost_matrix(source, anchor, metric=metric)
    wanted = ot.dist(source.double().numpy(), anchor.double().numpy(), POT_NAMES[metric])
    assert found.dtype == dtype
    np.testing.assert_allclose(found, wanted, rtol=2e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6])
def test_near_duplicates_keep_their_digits(metric: Metric, noise: float) -> None:
    anchor = rows(30, 200, 3)
    source = anchor.flip(0) + noise * rows(30, 200, 4)
    found = cost_matrix(source, anchor, metric=metric).double().numpy()
    np.testing.assert_allclose(found, brute(source, anchor, metric), rtol=1e-4)


def test_near_duplicates_on_a_common_offset() -> None:
    anchor = rows(40, 300, 5) + 1e3
    source = anchor + 1e-4 * torch.round(3 * rows(40, 300, 6))
    found = cost_matrix(source, anchor).double().numpy()
    np.testing.assert_allclose(found, brute(source, anchor, Metric.EUCLIDEAN), rtol=3e-6)
    assert (found.argmin(1) == np.arange(40)).all()


def test_a_common_offset_costs_no_digits() -> None:
    source, anchor = rows(20, 300, 5) + 20, rows(20, 300, 6) + 20
    found = cost_matrix(source, anchor).double().numpy()
    np.testing.assert_allclose(found, brute(source, anchor, Metric.EUCLIDEAN), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scale_of_the_weights_does_not_matter(scale: float) -> None:
    source, anchor = rows(8, 50, 7), rows(8, 50, 8)
    found = cost_matrix(source * scale, anchor * scale).double() / scale
    np.testing.assert_allclose(found, brute(source, anchor, Metric.EUCLIDEAN), rtol=3e-6)
    assert torch.isfinite(cost_matrix(source * scale, anchor * scale, metric=Metric.COSINE)).all()


@pytest.mark.parametrize("metric", list(Metric))
def test_many_equal_rows_are_repaired_once(metric: Metric, monkeypatch: pytest.MonkeyPatch) -> None:
    few = rows(3, 20, 9) * 1e-3 + 5
    source, anchor = few.repeat(20, 1), few.flip(0).repeat(30, 1)
    pairs = []
    direct = cost_module._direct
    monkeypatch.setattr(
        cost_module, "_direct", lambda *args: pairs.append(len(args[2])) or direct(*args)
    )
    monkeypatch.setattr(cost_module, "_BLOCK", 2700)  # several blocks of rows
    found = cost_matrix(source, anchor, metric=metric).double().numpy()
    np.testing.assert_allclose(found, brute(source, anchor, metric), rtol=1e-5, atol=1e-12)
    assert max(pairs) <= 9


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = rows(17, 12, 10, torch.float64)
    source = torch.cat([anchor.flip(0) + 1e-9, rows(6, 12, 11, torch.float64)])
    whole = cost_matrix(source, anchor)
    monkeypatch.setattr(cost_module, "_BLOCK", 20)
    torch.testing.assert_close(cost_matrix(source, anchor), whole, rtol=1e-9, atol=0)
    torch.testing.assert_close(unit_rows(source).norm(dim=1), torch.ones(23, dtype=torch.float64))


@pytest.mark.parametrize("metric", list(Metric))
def test_dead_rows(metric: Metric) -> None:
    source, anchor = rows(5, 6, 12), rows(4, 6, 13)
    source[1] = 0
    anchor[2] = 0
    found = cost_matrix(source, anchor, metric=metric, dead_cost=1.0)
    assert (found[1] == 1).all()
    assert (found[:, 2] == 1).all()
    alive = [0, 2, 3, 4], [0, 1, 3]
    plain = cost_matrix(source[alive[0]], anchor[alive[1]], metric=metric)
    torch.testing.assert_close(found[alive[0]][:, alive[1]], plain)


def test_dead_rows_cost_one_under_cosine_and_their_norm_otherwise() -> None:
    source, anchor = torch.zeros(2, 3), torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    assert cost_matrix(source, anchor, metric=Metric.COSINE).tolist() == [[1, 1], [1, 1]]
    assert cost_matrix(source, anchor).tolist() == [[5, 0], [5, 0]]


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("dead_cost", [None, 1.0])
def test_paired_cost_is_the_diagonal(metric: Metric, dead_cost: float | None) -> None:
    source, anchor = rows(11, 30, 14), rows(11, 30, 15)
    source[3] = 0
    anchor[4] = 0
    anchor[5] = source[5] + 1e-5
    full = cost_matrix(source, anchor, metric=metric, dead_cost=dead_cost)
    found = paired_cost(source, anchor, metric=metric, dead_cost=dead_cost)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, full.diagonal(), rtol=1e-5, atol=0)


def test_unit_rows() -> None:
    features = rows(6, 9, 16)
    features[2] = 0
    features[3] = features[4] * 8
    features[5] *= 1e-30
    unit = unit_rows(features)
    assert unit.dtype == torch.float32
    assert (unit[2] == 0).all()
    assert torch.equal(unit[3], unit[4])  # parallel rows become equal, bit by bit
    torch.testing.assert_close(unit[5].norm(), torch.tensor(1.0))
    assert unit_rows(features.half()).dtype == torch.float32
    assert unit_rows(torch.tensor([[-3.0], [7.0], [0.0]])).tolist() == [[-1], [1], [0]]


def test_half_is_computed_in_float32() -> None:
    source, anchor = rows(4, 8, 17).half(), rows(5, 8, 18).bfloat16()
    found = cost_matrix(source, anchor)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, cost_matrix(source.float(), anchor.float()))


@pytest.mark.parametrize(
    ("source", "anchor"),
    [
        (torch.zeros(3), torch.zeros(3, 3)),
        (torch.zeros(3, 4), torch.zeros(3, 5)),
        (torch.zeros(3, 0), torch.zeros(3, 0)),
        (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4)),
    ],
)
def test_refuses_what_is_no_pair_of_matrices(source: torch.Tensor, anchor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="floating matrices"):
        cost_matrix(source, anchor)


def test_refuses_rows_that_do_not_pair() -> None:
    with pytest.raises(ValueError, match="don't pair"):
        paired_cost(torch.zeros(3, 4), torch.zeros(2, 4))


def test_empty_and_broken_features() -> None:
    assert cost_matrix(torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)
    broken = rows(3, 4)
    broken[1, 2] = float("nan")
    assert torch.isnan(cost_matrix(broken, rows(3, 4, 1), dead_cost=1.0)[1]).all()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31))
def test_property_brute_force(n: int, m: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grid = torch.randint(-3, 4, (n + m, k), generator=generator).float()
    source, anchor = grid[:n], grid[n:]
    found = cost_matrix(source, anchor).double().numpy()
    np.testing.assert_allclose(found, brute(source, anchor, Metric.EUCLIDEAN), rtol=1e-4, atol=0)
