"""Repair without data, against direct formulas and white inputs."""

from __future__ import annotations

import pytest
import torch

import otfuse_cli
from nets import TWO_BRANCHES_SPEC, Mlp, ResNet, StateDict, TwoBranches, Vgg, randomise, state
from otfuse_cli.fusion.repair import RowNorms, plan_repair
from otfuse_cli.graph.spec.from_shapes import layer_graph
from test_twins import widened

pytestmark = pytest.mark.usefixtures("kept_graphs")

WIDTHS = (11, 9, 8, 7, 5)


def mlp(seed: int, widths: tuple[int, ...] = WIDTHS) -> StateDict:
    return state(randomise(Mlp(widths), seed))


def vgg(seed: int, widths: tuple[int, ...] = (6, 8, 7)) -> StateDict:
    """Statistics as white inputs would give them: variance = 1.5 |row|^2."""
    tensors = state(randomise(Vgg(widths), seed))
    for at in (0, 4, 8):
        rows = tensors[f"features.{at}.weight"].flatten(1)
        tensors[f"features.{at + 1}.running_var"] = 1.5 * rows.square().sum(1)
    return tensors


def aligned(source: StateDict, anchor: StateDict) -> StateDict:
    return otfuse_cli.merge(source, anchor, weights=(1, 0))[0]


@pytest.mark.slow
def test_rows_have_the_mean_length_of_what_was_averaged():
    models = [mlp(1), mlp(2), mlp(3)]
    share = (0.2, 0.3, 0.5)
    fused, _ = otfuse_cli.merge(*models, weights=share)
    plain, _ = otfuse_cli.merge(*models, weights=share, repair="none")
    moved = [aligned(models[0], models[2]), aligned(models[1], models[2]), models[2]]
    for at in (1, 2, 3):
        name = f"fc{at}.weight"
        wanted = sum(w * m[name].norm(dim=1) for w, m in zip(share, moved, strict=True))
        assert (plain[name].norm(dim=1) < wanted).all()
        torch.testing.assert_close(fused[name].norm(dim=1), wanted)
        # Only the length changed, and of the weights only.
        cosine = torch.nn.functional.cosine_similarity(fused[name], plain[name])
        torch.testing.assert_close(cosine, torch.ones_like(cosine))
        assert torch.equal(fused[f"fc{at}.bias"], plain[f"fc{at}.bias"])
    wanted = sum(w * m["fc4.weight"].norm() for w, m in zip(share, moved, strict=True))
    torch.testing.assert_close(fused["fc4.weight"].norm(), wanted)
    ratio = fused["fc4.weight"] / plain["fc4.weight"]
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))


def test_equal_rows_keep_their_bits():
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    norms = RowNorms(0)
    for share in (0.3, 0.5, 0.2):
        norms.add(share, weight)
    assert norms.restore(weight) is weight


def test_a_row_that_cancels_out_is_not_divided_by_zero():
    norms = RowNorms(0)
    rows = torch.ones(2, 3)
    norms.add(0.5, rows)
    norms.add(0.5, -rows)
    assert torch.equal(norms.restore(torch.zeros(2, 3)), torch.zeros(2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.2, 0.8), (0.2, 0.3, 0.5)])
def test_variance_of_white_inputs_is_exact(weights):
    """The variance of a fused unit under white inputs is 1.5 |fused row|^2, for any K."""
    models = [vgg(seed) for seed in range(len(weights))]
    fused, report = otfuse_cli.merge(*models, weights=weights)
    assert not report.warnings
    for at in (0, 4, 8):
        rows = fused[f"features.{at}.weight"].flatten(1)
        wanted = 1.5 * rows.square().sum(1)
        torch.testing.assert_close(fused[f"features.{at + 1}.running_var"], wanted)


def test_variance_of_white_inputs_is_exact_between_widths():
    fused, _ = otfuse_cli.merge(vgg(0, (9, 8, 10)), vgg(1, (6, 8, 7)), matcher="sweep")
    rows = fused["features.0.weight"].flatten(1)
    # First layer: rows are convex combinations, each at its own deviation, so nothing is lost.
    torch.testing.assert_close(fused["features.1.running_var"], 1.5 * rows.square().sum(1))


def test_variance_is_the_formula_of_two_models():
    a, b = vgg(0), vgg(1)
    g = torch.Generator().manual_seed(5)
    for model in (a, b):
        for name in model:
            if name.endswith("running_var"):
                model[name] = 0.5 + torch.rand(model[name].shape, generator=g)
    fused, _ = otfuse_cli.merge(a, b, weights=(0.3, 0.7))
    a = aligned(a, b)
    for at in (0, 4, 8):
        rows = [m[f"features.{at}.weight"].flatten(1) for m in (a, b)]
        va, vb = (m[f"features.{at + 1}.running_var"] for m in (a, b))
        rho = torch.nn.functional.cosine_similarity(*rows)
        wanted = 0.09 * va + 0.49 * vb + 0.42 * rho * (va * vb).sqrt()
        torch.testing.assert_close(fused[f"features.{at + 1}.running_var"], wanted)
        assert (rho < 0.999).any()


def test_simulated_white_inputs_have_the_variance_that_is_written():
    """Monte Carlo: statistics taken from samples, not from the formula."""
    a, b = (state(randomise(Vgg((6,)), s)) for s in (1, 2))
    x = torch.randn(4000, 27, generator=torch.Generator().manual_seed(0))
    for model in (a, b):
        values = x @ model["features.0.weight"].flatten(1).T
        model["features.1.running_var"] = values.var(0)
    fused, _ = otfuse_cli.merge(a, b)
    values = x @ fused["features.0.weight"].flatten(1).T
    torch.testing.assert_close(fused["features.1.running_var"], values.var(0), rtol=0.1, atol=0)


@pytest.mark.slow
def test_duplicated_units_keep_their_variance():
    narrow = state(randomise(Vgg(), 4))
    fused, _ = otfuse_cli.merge(widened(narrow), narrow)
    for at in (1, 5, 9):
        name = f"features.{at}.running_var"
        torch.testing.assert_close(fused[name], narrow[name], rtol=1e-5, atol=0)


def test_a_unit_without_incoming_weights_keeps_the_mean():
    a, b = vgg(0), vgg(1)
    for model in (a, b):
        model["features.0.weight"][2] = 0
        model["features.1.running_var"][2] = 0.25
    fused, _ = otfuse_cli.merge(a, b)
    assert float(fused["features.1.running_var"][2]) == 0.25


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda s: mlp(s), vgg])
def test_endpoints_and_plain_averages_are_not_repaired(make):
    a, b = make(1), make(2)
    for options in ({"weights": (1, 0)}, {"weights": (0, 1)}, {"align": "none"}, {"paper": True}):
        fused, report = otfuse_cli.merge(a, b, **options)
        without, _ = otfuse_cli.merge(a, b, repair="none", **options)
        assert all(torch.equal(fused[n], t) for n, t in without.items())
        if "weights" not in options:
            assert report.recipe["repair"] == "none"


def test_what_can_not_be_repaired_is_named(tmp_path):
    spec = tmp_path / "net.yaml"
    spec.write_text(TWO_BRANCHES_SPEC.replace("act: relu", "act: other"))
    a, b = (state(randomise(TwoBranches(), s)) for s in (1, 2))
    fused, report = otfuse_cli.merge(a, b, arch=str(spec))
    plain, _ = otfuse_cli.merge(a, b, arch=str(spec), repair="none")
    assert any("norm: the layer that feeds this BatchNorm" in w for w in report.warnings)
    assert any("row norms" in w and "stem" in w for w in report.warnings)
    changed = {n for n in fused if not torch.equal(fused[n], plain[n])}
    assert changed == {"head.weight"}


def test_layers_before_a_norm_keep_their_rows():
    tensors = state(ResNet())
    plan = plan_repair(layer_graph("auto", {n: tuple(t.shape) for n, t in tensors.items()}))
    assert not plan.rows
    assert plan.outputs == {"fc.weight"}
    assert set(plan.feeds) == {n for n in tensors if n.endswith("running_var")}
    (feed,) = plan.feeds["layer2.0.downsample.1.running_var"]
    assert feed.rows == (("layer2.0.downsample.0.weight", 0),)
    assert not plan.warnings
