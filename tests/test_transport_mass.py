"""Masses: proportions, the floor, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otfuse_cli.errors import SolveFailed
from otfuse_cli.transport import mass


def test_uniform() -> None:
    assert mass.uniform(4).tolist() == [0.25] * 4
    assert mass.uniform(4).dtype == torch.float64
    with pytest.raises(ValueError, match="at least one"):
        mass.uniform(0)


def test_from_norms_is_proportional() -> None:
    assert mass.from_norms(torch.tensor([1.0, 3.0])).tolist() == [0.25, 0.75]
    assert mass.from_norms(torch.zeros(2)).tolist() == [0.5, 0.5]


def test_large_norms_do_not_overflow() -> None:
    assert mass.from_norms(torch.tensor([1e308, 1e308], dtype=torch.float64)).tolist() == [0.5, 0.5]


def test_dead_units_keep_a_thousandth_of_the_mean() -> None:
    found = mass.from_norms(torch.tensor([0.0, 1.0, 1.0, 2.0]))
    assert float(found[0] / found[1]) == pytest.approx(1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_non_finite(value: float) -> None:
    with pytest.raises(SolveFailed, match="not finite"):
        mass.from_norms(torch.tensor([1.0, value]))


@pytest.mark.parametrize("norms", [torch.zeros(0), torch.zeros(2, 2), torch.tensor([1.0, -1.0])])
def test_refuses_what_is_no_mass(norms: torch.Tensor) -> None:
    with pytest.raises(ValueError):
        mass.from_norms(norms)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1.7e308), min_size=1, max_size=20))
def test_property_sums_to_one(norms: list[float]) -> None:
    found = mass.from_norms(torch.tensor(norms, dtype=torch.float64))
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    assert (found > 0).all()
