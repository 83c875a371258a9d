"""More than two models: passes, and the medoid."""

from __future__ import annotations

import pytest
import torch

import otfuse_cli
from nets import Mlp, StateDict, randomise, state
from otfuse_cli.errors import IncompatibleModels, UsageError
from test_matchers import random_like
from test_twins import permuted

pytestmark = pytest.mark.usefixtures("kept_graphs")

WIDTHS = (9, 14, 12, 5)


def mlp(seed: int, widths: tuple[int, ...] = WIDTHS) -> StateDict:
    return state(randomise(Mlp(widths), seed))


def agreement(models: list[StateDict], anchor: StateDict, weights: tuple, **options) -> float:
    """Sum over pairs of w_j w_k <aligned_j, aligned_k>, from the fused model's square."""
    fused, _ = otfuse_cli.merge(*models, anchor, weights=weights, repair="none", **options)
    return sum(float(t.double().square().sum()) for t in fused.values())


@pytest.mark.slow
def test_further_passes_bring_the_sources_together():
    models, anchor = [mlp(1), mlp(2), mlp(3)], mlp(4)
    weights = (0.25, 0.25, 0.25, 0.25)
    values = [agreement(models, anchor, weights, passes=p) for p in (1, 2, 5)]
    assert values[0] < values[1] <= values[2] * (1 + 1e-6)


@pytest.mark.slow
def test_passes_end_when_nothing_moves_and_are_listed():
    models = [mlp(1), mlp(2), mlp(3)]
    _, report = otfuse_cli.merge(*models, passes=50)
    names = [c.name for c in report.candidates if c.source == 0]
    passes = [n for n in names if n.startswith("pass")]
    assert 1 <= len(passes) < 49
    for source in (0, 1):
        assert sum(c.chosen for c in report.candidates if c.source == source) == 1
    # One more pass than needed is the same model.
    one, _ = otfuse_cli.merge(*models, passes=50)
    two, _ = otfuse_cli.merge(*models, passes=51)
    assert all(torch.equal(one[n], t) for n, t in two.items())


@pytest.mark.parametrize("matcher", ["sweep", "auto"])
def test_twins_stay_recovered(matcher):
    anchor = mlp(1)
    twins = [permuted(anchor, s) for s in (2, 3)]
    fused, _ = otfuse_cli.merge(*twins, anchor, passes=3, matcher=matcher)
    assert all(torch.equal(fused[n], t) for n, t in anchor.items())


@pytest.mark.slow
def test_two_models_have_one_pass():
    one, first = otfuse_cli.merge(mlp(1), mlp(2))
    two, second = otfuse_cli.merge(mlp(1), mlp(2), passes=4)
    assert all(torch.equal(one[n], t) for n, t in two.items())
    assert first.candidates == second.candidates


@pytest.mark.slow
def test_passes_between_widths():
    fused, report = otfuse_cli.merge(
        mlp(1, (9, 16, 11, 5)), mlp(2, (9, 10, 13, 5)), mlp(3), passes=3
    )
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in mlp(3).items()}
    assert any(c.name == "pass 2" for c in report.candidates)


@pytest.mark.slow
def test_the_medoid_is_the_model_in_the_middle():
    middle = mlp(1)
    around = [permuted(random_like(middle, s, 0.7), s) for s in (2, 3, 4)]
    _, report = otfuse_cli.merge(around[0], around[1], middle, around[2], anchor="medoid")
    assert report.recipe["anchor"] == 2
    with pytest.raises(IncompatibleModels, match="models of different widths have no medoid"):
        otfuse_cli.merge(middle, mlp(2, (9, 10, 12, 5)), anchor="medoid")


def test_a_pass_is_a_positive_number():
    with pytest.raises(UsageError, match="--passes 0"):
        otfuse_cli.merge(mlp(1), mlp(2), passes=0)
