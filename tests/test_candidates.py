"""Candidates on held-out inputs, the parents as yardsticks, and what is never kept or ignored."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import otfuse_cli
from nets import Mlp, StateDict, randomise, state
from otfuse_cli.errors import GateFailed, UsageError
from otfuse_cli.fusion.choose_by_readers import choose_written
from otfuse_cli.fusion.lockstep import Parent
from otfuse_cli.graph.trace.from_module import export, trace
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.session.candidates import _Trial
from otfuse_cli.session.ways import Ways

pytestmark = pytest.mark.usefixtures("kept_graphs")

WIDE, NARROW = (12, 30, 24, 5), (12, 10, 8, 5)


def mlp(seed: int, widths: tuple[int, ...] = NARROW) -> StateDict:
    return state(randomise(Mlp(widths), seed))


def inputs(count: int = 200) -> torch.Tensor:
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(3))


def said(tensors: StateDict, x: torch.Tensor) -> torch.Tensor:
    net = Mlp((*[t.shape[1] for n, t in tensors.items() if "weight" in n], 5))
    net.load_state_dict(tensors)
    return net(x).detach()


def permuted(tensors: StateDict, seed: int = 5) -> StateDict:
    generator, twin = torch.Generator().manual_seed(seed), dict(tensors)
    for here, there in pairwise(("fc1", "fc2", "fc3")):
        order = torch.randperm(len(twin[f"{here}.bias"]), generator=generator)
        for part in ("weight", "bias"):
            twin[f"{here}.{part}"] = twin[f"{here}.{part}"][order]
        twin[f"{there}.weight"] = twin[f"{there}.weight"][:, order]
    return twin


def merge(*models: StateDict, **options):
    more = {"arch": "mlp", "samples": {"x": inputs()}, "num_samples": 200, "matcher": "sweep"}
    return otfuse_cli.merge(*models, **{**more, **options})


@pytest.mark.quick_cases("equal")
@pytest.mark.parametrize("widths", [NARROW, WIDE], ids=["equal", "wider"])
def test_every_way_is_tried_and_one_is_taken(widths):
    _, report = merge(mlp(0, widths), mlp(1))
    assert report.recipe["blend"] == "auto"
    tried = [s for s in report.steps if s.name.endswith(", held out")]
    names = {s.name.removesuffix(", held out") for s in tried}
    assert {"head", "average", "refit", "joint"} <= names
    assert widths == WIDE or not any("graft" in name for name in names)
    (chosen,) = [s.name.removesuffix(", held out") for s in tried if s.kept]
    assert [s.name for s in report.steps if s.kept][-1] == chosen
    assert {f"refit: {name}, held out" for name in names} <= set(report.timings)


def verdict(right: int, distances: torch.Tensor | None = None, of: int = 20) -> SimpleNamespace:
    """Right on the first inputs, so far from the ensemble on each."""
    far = torch.ones(of) if distances is None else distances
    return SimpleNamespace(hits=torch.arange(of) < right, hit_rate=right / of, distances=far)


@pytest.mark.slow
def test_auto_leaves_the_head_for_a_way_that_is_clearly_nearer():
    models = (mlp(1, WIDE), mlp(0, WIDE))
    more = {"samples": {"x": inputs(800)}, "num_samples": 800}
    fused, report = merge(*models, blend="auto", **more)
    tried = [s for s in report.steps if s.name.endswith(", held out")]
    assert [s.name for s in tried if s.kept] == ["refit, held out"]
    assert report.steps[-1].name == "refit"
    by_name, _ = merge(*models, blend="average", **more)
    assert all(torch.equal(fused[n], t) for n, t in by_name.items())
    assert not torch.equal(fused["fc1.weight"], models[1]["fc1.weight"])


@pytest.mark.parametrize(
    ("right", "tried"),
    [
        ({"head": 15, "joint": 16}, True),
        ({"head": 16, "joint": 16}, True),
        ({"head": 17, "joint": 16}, False),  # what joint fusion makes of it is worse already
        ({"head": 16, "joint": 19}, False),  # one input is left, on which a coin decides
        ({"head": 15}, True),  # joint fusion could not be tried
    ],
)
def test_a_graft_is_tried_where_joint_fusion_leads_and_something_is_left(right, tried):
    trial = _Trial(None, None, None, {name: verdict(count) for name, count in right.items()})
    order = ("head", "joint", "graft 10%", "graft 25%")
    assert trial.may_win("graft 10%", order) is tried
    assert trial.may_win("joint", order)
    trial.verdicts["graft 10%"] = verdict(1)
    assert not trial.may_win("graft 25%", order)


@pytest.mark.parametrize(
    ("right", "distances", "best"),
    [
        ({"head": 15, "joint": 18}, {}, "head"),  # three tosses of a coin
        ({"head": 15, "joint": 20}, {}, "joint"),
        ({"head": 15, "joint": 15}, {"joint": 0.5}, "joint"),
        ({"head": 15, "joint": 15}, {"head": 0.5}, "head"),
        ({"head": 10, "joint": 18}, {"head": 0.1}, "joint"),  # choices come first
    ],
)
def test_the_first_way_is_left_for_one_that_is_clearly_better(right, distances, best):
    noise = torch.linspace(0.9, 1.1, 20)
    verdicts = {n: verdict(count, noise * distances.get(n, 1.0)) for n, count in right.items()}
    trial = _Trial(None, None, None, verdicts)
    assert trial.best(("head", "joint")) == best


def test_the_parents_are_the_yardstick():
    models, x = (mlp(0, WIDE), mlp(1)), inputs()
    _, report = merge(*models, weights=(0.3, 0.7))
    logits = [said(m, x) for m in models]
    ensemble = (0.3 * logits[0].softmax(1) + 0.7 * logits[1].softmax(1)).argmax(1)
    for record, own in zip(report.yardsticks, logits, strict=True):
        assert record.agreement == pytest.approx(float((own.argmax(1) == ensemble).float().mean()))
    assert [r.name for r in report.yardsticks] == ["parent 0", "parent 1 (anchor)"]


def test_the_head_alone_is_fitted():
    source, anchor = mlp(0, WIDE), mlp(1)
    fused, report = merge(source, anchor, blend="head")
    changed = {n for n, t in anchor.items() if not torch.equal(fused[n], t)}
    assert changed == {"fc3.weight", "fc3.bias"}
    (fit,) = report.refits
    assert fit.after < fit.before
    hidden, x = said, inputs()
    wanted = (said(source, x) + said(anchor, x)) / 2
    assert (hidden(fused, x) - wanted).norm() < (said(anchor, x) - wanted).norm()


@pytest.mark.parametrize("blend", ["auto", "average", "joint", "head", "graft"])
def test_a_permuted_twin_keeps_the_function(blend):
    anchor = mlp(4)
    fused, report = merge(permuted(anchor), anchor, blend=blend)
    torch.testing.assert_close(said(fused, inputs()), said(anchor, inputs()), rtol=2e-2, atol=2e-2)
    assert report.steps[-1].agreement > 0.97


@pytest.mark.quick_cases("0.25")
@pytest.mark.parametrize("given", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_a_graft_gives_so_many_units_to_other_parents(given):
    parents = []
    for seed, widths, weight in ((1, NARROW, 0.7), (0, WIDE, 0.3)):
        net = randomise(Mlp(widths), seed)
        program = labelled_program(export(net, (inputs(),)), batch=200)
        parents.append(Parent(program, state(net), weight, trace(net, (inputs(),), {}, source="")))
    space = next(iter(parents[0].graph.free())).id
    units = torch.cat([nn.functional.linear(inputs(), p.tensors["fc1.weight"]) for p in parents], 1)
    chosen = choose_written(parents, space, (units.T @ units).double(), 10, other_share=given)
    assert len(chosen) == 10
    assert int((chosen >= 10).sum()) == round(10 * given)


def test_labels_decide_where_there_are_any():
    models, x = (mlp(0, WIDE), mlp(1)), inputs()
    labels = said(models[0], x).argmax(1)
    _, report = merge(*models, samples={"x": x, "y": labels}, weights=(0.5, 0.5))
    chosen = next(s for s in report.steps if s.kept and s.name.endswith("held out"))
    best = max(s.accuracy for s in report.steps if s.name.endswith("held out"))
    assert chosen.accuracy >= best - 15
    assert report.yardsticks[0].accuracy == 100


def spoiled(self, bench, *args, **more):
    tensors = {n: -t for n, t in bench.tensors[bench.anchor].items()}
    return tensors, (), ()


@pytest.mark.parametrize(
    ("blend", "way"),
    [("average", "refit"), ("joint", "joint"), ("head", "head"), ("graft", "graft")],
)
def test_what_lowers_agreement_is_not_kept(blend, way, monkeypatch):
    monkeypatch.setattr(Ways, way, spoiled)
    anchor = mlp(1)
    fused, report = merge(permuted(anchor), anchor, blend=blend)
    assert not report.steps[-1].kept
    assert any("it lowers agreement, the average was kept" in w for w in report.warnings)
    torch.testing.assert_close(fused, anchor)


@pytest.mark.slow
def test_pruning_by_reconstruction_does_not_keep_it_either(monkeypatch):
    def spoil(self, parents, tensors, ridge, **more):
        for name, tensor in tensors.items():
            tensors[name] = -tensor
        return (), ()

    monkeypatch.setattr("otfuse_cli.session.bench.Bench.refit", spoil)
    more = {"arch": "mlp", "samples": {"x": inputs()}, "criterion": "reconstruct"}
    _, report = otfuse_cli.prune(mlp(1, WIDE), amount=0.3, **more)
    assert [s.kept for s in report.steps] == [True, False]
    assert any("fitting lowers agreement" in warning for warning in report.warnings)


@pytest.mark.slow
def test_a_result_below_the_anchor_is_written_with_a_warning(tmp_path):
    models = mlp(0), mlp(1)
    options = {"weights": (0.4, 0.6), "blend": "average", "num_samples": 30, "ridge": 1e6}
    _, report = merge(*models, **options)
    assert any("than the anchor alone: keep the anchor" in w for w in report.warnings)
    out = tmp_path / "out.safetensors"
    with pytest.raises(GateFailed, match="fewer inputs than the anchor alone") as error:
        merge(*models, **options, output=out, require_gain=True)
    assert error.value.exit_code == 7
    assert not list(tmp_path.iterdir())


def test_a_gain_that_is_there_passes():
    anchor = mlp(1)
    _, report = merge(permuted(anchor), anchor, require_gain=True)
    assert report.recipe["require_gain"] is True


@pytest.mark.parametrize("weights", [(1, 0), (0, 1)])
@pytest.mark.parametrize("blend", ["joint", "head"])
def test_a_blend_that_is_given_holds_at_the_ends_too(weights, blend):
    source, anchor = mlp(0, WIDE), mlp(1)
    fused, report = merge(source, anchor, weights=weights, blend=blend)
    whole = source if weights[0] else anchor
    own = said(whole, inputs()).argmax(1)
    assert float((said(fused, inputs()).argmax(1) == own).float().mean()) > 0.7
    assert report.steps[-1].name == blend
    assert blend == "head" or fused["fc1.weight"].shape == anchor["fc1.weight"].shape


@pytest.mark.parametrize("option", [{"blend": b} for b in ("joint", "head", "graft", "auto")]
                         + [{"require_gain": True}])  # fmt: skip
@pytest.mark.parametrize("without", [{"refit": False}, {"paper": True}, {"align": "none"}])
def test_options_of_fits_are_refused_without_fits(option, without):
    more = {"matcher": None, **option, **without}
    with pytest.raises(UsageError, match="without fits") as error:
        merge(mlp(0), mlp(1), **more)
    assert error.value.exit_code == 2


@pytest.mark.quick_cases("20-False")
@pytest.mark.parametrize(
    ("first", "warned"), [(20, False), (21, True), (30, True), (4, True), (5, False)]
)
def test_widths_far_apart_are_warned_about_without_inputs(first, warned):
    source, anchor = mlp(0, (12, first, 8, 5)), mlp(1)
    _, report = otfuse_cli.merge(source, anchor, matcher="sweep")
    assert any("--samples FILE or --synthetic" in w for w in report.warnings) is warned
    _, report = otfuse_cli.merge(source, anchor, matcher="sweep", weights=(1, 0))
    assert not any("--samples FILE" in w for w in report.warnings)
