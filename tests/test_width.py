"""`--width`: networks wider than the anchor, and parents side by side as one network, exactly."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import nets
import otfuse_cli
from otfuse_cli.errors import IncompatibleModels, UsageError
from otfuse_cli.fusion.widths import Width, space_widths
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running.runnable import with_tensors

pytestmark = pytest.mark.usefixtures("kept_graphs")


class Residual(nn.Module):
    """BatchNorm, a depthwise convolution, a PReLU with one slope, two branches into one stream."""

    def __init__(self, stream=8, inner=6):
        super().__init__()
        self.stem = nn.Conv2d(3, stream, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(stream)
        self.dw = nn.Conv2d(stream, stream, 3, padding=1, groups=stream)
        self.bn1 = nn.BatchNorm2d(stream)
        self.act = nn.PReLU()
        self.conv1 = nn.Conv2d(stream, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, stream, 1)
        self.head = nn.Linear(stream, 5)

    def forward(self, x):
        x = self.bn0(self.stem(x)).relu()
        x = x + self.act(self.bn1(self.dw(x)))
        x = (x + self.conv2(self.bn2(self.conv1(x)).relu())).relu()
        return self.head(x.mean((2, 3)))


class Grouped(nn.Module):
    """Groups of four channels between two plain layers, as in a ResNeXt, and a flattened map."""

    def __init__(self, groups=2, wide=6):
        super().__init__()
        inner = 4 * groups
        self.stem = nn.Conv2d(3, wide, 3, padding=1)
        self.reduce = nn.Conv2d(wide, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.grouped = nn.Conv2d(inner, inner, 3, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.expand = nn.Conv2d(inner, wide, 1)
        self.head = nn.Linear(wide * 16, 5)

    def forward(self, x):
        x = self.stem(x).relu()
        y = self.bn2(self.grouped(self.bn1(self.reduce(x)).relu())).relu()
        x = nn.functional.adaptive_max_pool2d((x + self.expand(y)).relu(), 4)
        return self.head(x.flatten(1))


def seeded(make, seed):
    """A network whose norms have statistics, gains and shifts of their own."""
    torch.manual_seed(seed)
    net = make().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
    return net


def images(count=4, seed=9):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def residual(stream=8, inner=6):
    return lambda: Residual(stream, inner)


def factory():
    return Residual(), images()


def grouped_factory():
    return Grouped(), images()


FAMILIES = {
    "mlp": ([lambda w=w: nets.Mlp((12, *w, 5)) for w in ((9, 8, 7), (5, 6, 7), (9, 4, 7))], 12),
    "vgg": ([lambda w=w: nets.Vgg(w) for w in ((6, 8, 7), (4, 8, 9), (6, 5, 7))], None),
    "resnet": ([lambda w=w: nets.ResNet(w) for w in ((6, 6, 9), (4, 4, 8), (5, 5, 9))], None),
    "traced": ([residual(8, 6), residual(5, 7), residual(6, 6)], None),
    "grouped": ([lambda g=g: Grouped(*g) for g in ((2, 6), (3, 5), (2, 6))], None),
}


@pytest.mark.slow_cases("grouped-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_side_by_side_give_the_mean_of_their_logits(family, dtype):
    makes, wide = FAMILIES[family]
    parents = [seeded(make, at).to(dtype) for at, make in enumerate(makes)]
    if family == "traced":
        for parent in parents:
            parent.act.weight.data.fill_(0.3)
    x = images(2) if wide is None else torch.randn(6, wide)
    weights = (0.2, 0.3, 0.5)
    arch = {"traced": factory, "grouped": grouped_factory}.get(family, "auto")
    fused, report = otfuse_cli.merge(
        *(p.state_dict() for p in parents), width=3, weights=weights, arch=arch
    )
    with torch.no_grad():
        said = with_tensors(parents[-1], fused).eval()(x.to(dtype))
        mean = sum(w * p(x.to(dtype)) for w, p in zip(weights, parents, strict=True))
    limit = 1e-5 if dtype is torch.float32 else 1e-10
    torch.testing.assert_close(said, mean, rtol=0, atol=limit * float(mean.abs().max()))
    assert all(space.units == space.together for space in report.widened.spaces)
    assert report.checks.function == ("assumed" if arch == "auto" else "kept")
    assert report.warnings == ()


def test_a_wide_network_is_a_checkpoint_like_any_other(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parents = [seeded(lambda: nets.Mlp((6, 8, 7, 3)), at) for at in (0, 1)]
    for name, parent in zip("ab", parents, strict=True):
        torch.save({"model": parent.state_dict()}, f"{name}.pt")
    x = torch.randn(40, 6)
    with torch.no_grad():
        y = (parents[0](x) + parents[1](x)).argmax(1)
    np.savez("s.npz", x=x.numpy(), y=y.numpy())
    done = cli("merge", "a.pt", "b.pt", "-o", "w.pt", "--width", "2")
    assert done.code == 0, done.err
    assert "All units of all checkpoints stand side by side" in done.out
    assert "To do" in done.out
    assert set(torch.load("w.pt")) == {"model"}
    found = json.loads(cli("eval", "w.pt", "--arch", "mlp", "--samples", "s.npz", "--json").out)
    assert found["report"]["evaluation"]["accuracy"] == {"w.pt": 100}
    assert cli("inspect", "w.pt").code == 0
    assert cli("merge", "w.pt", "w.pt", "-o", "again.pt").code == 0
    both = [torch.load(name)["model"] for name in ("w.pt", "again.pt")]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def fitted(*parents, **options):
    options = {"arch": factory, "samples": {"x": images(60)}, "refit": True, **options}
    return otfuse_cli.merge(*(p.state_dict() for p in parents), **options)


def test_the_anchors_width_is_plain_joint_fusion():
    parents = [seeded(residual(), at) for at in (0, 1)]
    plain, _ = fitted(*parents, blend="joint")
    same, report = fitted(*parents, width=1)
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    assert report.recipe["blend"] == "joint"
    assert [step.name for step in report.yardsticks] == ["parent 0", "parent 1 (anchor)"]


@pytest.mark.quick_cases("1.5")
@pytest.mark.parametrize("width", [1.5, 2])
def test_a_network_with_itself_keeps_its_function(width):
    net = seeded(residual(), 0)
    fused, report = fitted(net, net, width=width)
    assert fused["stem.weight"].shape[0] == 8 * width
    assert fused["conv1.weight"].shape[:2] == (6 * width, 8 * width)
    assert report.checks.function == "kept"
    x = images(3)
    with torch.no_grad():
        said, wanted = with_tensors(net, fused).eval()(x), net(x)
    # One unit hardly does anything: at any width below all units it is made of others.
    torch.testing.assert_close(said, wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


@pytest.mark.slow
def test_with_inputs_all_units_give_the_mean_too():
    parents = [seeded(residual(), 0), seeded(residual(), 1)]
    for parent in parents:
        parent.act.weight.data.fill_(0.3)
    fused, _ = fitted(*parents, width=2)
    x = images(3)
    with torch.no_grad():
        said = with_tensors(parents[0], fused).eval()(x)
        mean = (parents[0](x) + parents[1](x)) / 2
    torch.testing.assert_close(said, mean, rtol=0, atol=1e-5 * float(mean.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "llama", "gpt2-untied"])
def test_a_transformer_with_itself_keeps_its_function_and_has_its_config(name, tmp_path):
    from test_joint_streams import inputs_for
    from test_orthogonal import folder, made

    transformers = pytest.importorskip("transformers")
    arch, out = folder(name, tmp_path), tmp_path / "wide"
    source = Path(arch.removeprefix("hf:"))
    _, report = otfuse_cli.merge(
        source, source, arch=arch, samples=inputs_for(name), width=1.4, output=out
    )
    config = json.loads((out / "config.json").read_text())
    keys = ("n_embd", "n_head") if "gpt2" in name else ("hidden_size", "num_attention_heads")
    assert [config[key] for key in keys] == [48, 6]
    assert any("config.json of the output says" in warning for warning in report.warnings)
    module, inputs = made(name)
    wide = getattr(transformers, type(module).__name__).from_pretrained(out).eval()
    with torch.no_grad():
        old, new = module(**inputs)[0], wide(**inputs)[0]
    torch.testing.assert_close(new, old, rtol=0, atol=1e-4 * float(old.abs().max()))
    assert otfuse_cli.inspect(out).graph.spaces


@pytest.mark.slow
def test_code_that_makes_other_heads_is_refused():
    class Heads(nn.Module):
        """Four heads of whatever width there is, on a stream that stays in place."""

        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 16) for _ in range(3))
            self.out, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

        def forward(self, x):
            q, k, v = (
                m(x).unflatten(-1, (4, -1)).transpose(1, 2) for m in (self.q, self.k, self.v)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.head(x + self.out(y.transpose(1, 2).flatten(2))).mean(1)

    states = [Heads().state_dict() for _ in range(2)]
    with pytest.raises(IncompatibleModels, match="makes other heads") as raised:
        otfuse_cli.merge(
            *states,
            width=1.5,
            arch=lambda: (Heads(), torch.randn(4, 5, 8)),
            samples={"x": torch.randn(40, 5, 8)},
        )
    assert "take the checkpoint's shapes" in raised.value.fix


@pytest.mark.slow
def test_more_width_agrees_more():
    parents = [seeded(lambda: nets.Mlp((12, 6, 6, 9)), at) for at in (0, 1)]
    x = torch.randn(300, 12)
    missed = []
    with torch.no_grad():
        mean = (parents[0](x) + parents[1](x)) / 2
        for width in (0.5, 1.5, 2):
            fused, _ = fitted(*parents, width=width, arch="mlp", samples={"x": x})
            said = with_tensors(parents[0], fused)(x)
            missed.append(float((said - mean).square().mean()))
    assert all(more > less for more, less in pairwise(missed))
    assert missed[-1] < 1e-10


def test_sizes_are_factors_by_name_multiples_and_never_more_than_there_are():
    graphs = []
    for stream, inner in ((5, 7), (8, 6)):
        net = Residual(stream, inner)
        graphs.append(trace(net, (images(),), {}, source="net"))
    anchor = graphs[1]
    stream, inner = (anchor.tensors[name].units for name in ("stem.weight", "conv1.weight"))
    (stream,) = [u for u in stream if anchor.spaces[u].pinned is None]
    (inner,) = inner - {stream}

    def units(*arguments, **more):
        widths = space_widths(anchor, graphs, Width(*arguments, **more))
        return {w.space: (w.units, w.capped) for w in widths}

    assert units(1.5, 2) == {stream: (12, False), inner: (9, False)}
    assert units(1.9, 2) == {stream: (13, True), inner: (11, False)}
    assert units(2, 2) == {stream: (13, False), inner: (13, False)}
    assert units(1.5, 2, {"conv1": 0.5}) == {stream: (12, False), inner: (3, False)}
    assert units(1, 2, {"bn1.weight": 2}) == {stream: (13, False), inner: (6, False)}
    assert units(1.3, 2, multiple=4) == {stream: (12, False), inner: (8, False)}
    assert units(0.1, 2, multiple=4) == {stream: (4, False), inner: (4, False)}
    assert units(2, 2, multiple=4) == {stream: (12, False), inner: (12, False)}
    with pytest.raises(UsageError, match="can't be widened"):
        units(1, 2, {"head": 2})
    with pytest.raises(UsageError, match="two amounts"):
        units(1, 2, {"stem": 2, "dw": 1})


@pytest.mark.parametrize(
    ("options", "what", "where"),
    [
        ({"width": 3}, "wider than all checkpoints", "--width 3"),
        ({"width": 2, "weights": (0, 1)}, "wider than all checkpoints", "--width 2"),
        ({"width": 1.5}, "needs inputs", "--width 1.5"),
        ({"width": 2, "layer": {"fc1": 1}}, "needs inputs", "--layer fc1=1"),
        ({"layer": {"fc1": 2}}, "needs inputs", "others keep the anchor's width"),
        ({"width": 2, "width_multiple": 4}, "needs inputs", "--width-multiple 4"),
        ({"width_multiple": 4}, "without a width", "--width-multiple 4"),
        ({"width": 2, "layer": {"fc1": -1}}, "a factor above 0", "--layer fc1=-1"),
        ({"width": 2, "layer": {"fc1": 3}}, "wider than all checkpoints", "--layer fc1=3"),
        ({"width": 2, "layer": {"fc9": 2}}, "no such layer", "--layer fc9"),
        ({"width": 2, "layer": {"fc3": 2}}, "can't be widened", "--layer fc3"),
        ({"width": 2, "blend": "average"}, "not go with --width", "--blend average"),
        ({"width": 2, "blend": "head"}, "not go with --width", "--blend head"),
        ({"width": 2, "skip": ("fc1*",)}, "not go with --width", "--skip"),
        ({"width": 2, "calibrate": "bn"}, "not go with --width", "--calibrate bn"),
        ({"width": 2, "residual": "orthogonal"}, "not go with --width", "orthogonal"),
        ({"width": 2, "paper": True}, "not go with --width", "--paper"),
        ({"width": 2, "align": "none"}, "not go with --width", "--align none"),
        ({"width": 2, "weights": {"fc1*": (1, 1)}}, "not go with --width", "--weights FILE"),
        ({"width": 0}, "out of range", "--width 0"),
        ({"width": float("nan")}, "out of range", "--width nan"),
        ({"width": float("inf")}, "out of range", "--width inf"),
    ],
)
def test_widths_that_can_not_be_are_usage_errors(options, what, where):
    state = nets.Mlp((6, 5, 4, 3)).state_dict()
    with pytest.raises(UsageError, match=what) as raised:
        otfuse_cli.merge(state, state, **options)
    assert where in raised.value.where
    assert raised.value.fix


def two_layers(middle, slope=None):
    net = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3))
    if slope is not None:
        net[1].weight.data.fill_(slope)
    return net


class Ending(nn.Module):
    """Something between the last layer and the outputs, or between two layers."""

    def __init__(self, end, wide=3):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, wide)
        self.end = end

    def forward(self, x):
        return self.end(self, self.last(self.first(x).relu()))


class Centred(nn.Module):
    """Units less their mean."""

    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


REFUSED = {
    "mean": (lambda at: two_layers(Centred()), "space 0.weight:0", "a mean over units"),
    "layer norm": (lambda at: two_layers(nn.LayerNorm(8)), "space 0.weight:0", "layer norm"),
    "group norm": (
        lambda at: two_layers(nn.GroupNorm(2, 8)),
        "space",
        "heads and groups|group norm",
    ),
    "softmax": (lambda at: two_layers(nn.Softmax(-1)), "space 0.weight:0", "softmax"),
    "softmax at the end": (
        lambda at: Ending(lambda net, y: y.softmax(-1)),
        "outputs differ from the models' mean",
        "its outputs' scale",
    ),
    "mean over outputs": (
        lambda at: Ending(lambda net, y: y + net.first.weight.new_ones(1) * y.square().mean()),
        "outputs differ from the models' mean",
        "several units",
    ),
    "a layer behind outputs": (
        lambda at: Ending(lambda net, y: net.last.bias * y.tanh()),
        "outputs differ from the models' mean|last",
        "several units|stay in place",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_at_several_units_is_refused_and_named(name):
    make, where, why = REFUSED[name]
    torch.manual_seed(0)
    parents = [make(at).state_dict() for at in (1, 2)]
    with pytest.raises(IncompatibleModels, match="side by side") as raised:
        otfuse_cli.merge(*parents, width=2, arch=lambda: (make(1), torch.randn(5, 6)))
    assert re.search(where, raised.value.where), raised.value
    assert re.search(why, raised.value.why), raised.value
    assert "--samples" in raised.value.fix


def test_what_has_no_units_and_differs_is_refused_and_named():
    torch.manual_seed(0)
    parents = [two_layers(nn.PReLU(), slope).state_dict() for slope in (0.25, 0.5)]
    with pytest.raises(IncompatibleModels, match="no common width") as raised:
        otfuse_cli.merge(
            *parents, width=2, arch=lambda: (two_layers(nn.PReLU()), torch.randn(5, 6))
        )
    assert raised.value.where == "1.weight"


@pytest.mark.slow
def test_code_that_fixes_widths_is_refused_with_a_way_out():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(self.first(x).relu().view(-1, 8))

    parents = [Fixed().state_dict() for _ in range(2)]
    with pytest.raises(IncompatibleModels) as raised:
        otfuse_cli.merge(
            *parents,
            width=1.5,
            arch=lambda: (Fixed(), torch.randn(5, 6)),
            samples={"x": torch.randn(40, 6)},
        )
    assert "take the checkpoint's shapes" in raised.value.fix


@pytest.mark.slow
def test_a_curve_over_widths(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parents = [seeded(lambda: nets.Mlp((6, 8, 3)), at) for at in (0, 1)]
    x = torch.randn(80, 6)
    with torch.no_grad():
        y = (parents[0](x) + parents[1](x)).argmax(1)
    for name, parent in zip("ab", parents, strict=True):
        torch.save(parent.state_dict(), f"{name}.pt")
    np.savez("test.npz", x=x.numpy(), y=y.numpy())
    np.savez("x.npz", x=torch.randn(60, 6).numpy())
    line = ("curve", "a.pt", "b.pt", "--arch", "mlp", "--samples", "test.npz")
    over = ("--over", "width", "--inputs", "x.npz", "--widths", "2,1", "--plot", "c.html")
    done = cli(*line, *over, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["report"]["evaluation"]
    assert list(found["fused accuracy"]) == ["1", "2"]
    assert found["fused accuracy"]["2"] == found["accuracy"]["ensemble (logits)"] == 100
    assert found["parameters"] == {"1": 6 * 8 + 8 + 8 * 3 + 3, "2": 6 * 16 + 16 + 16 * 3 + 3}
    drawn = (tmp_path / "c.html").read_text()
    assert all(word in drawn for word in ("a.pt", "b.pt", "ensemble (logits)", "parameters"))
    wider = otfuse_cli.merge("a.pt", "b.pt", width=1, arch="mlp", samples="x.npz")[0]
    measured = otfuse_cli.evaluate(wider, samples="test.npz", arch="mlp").evaluation
    assert list(measured["accuracy"].values()) == [found["fused accuracy"]["1"]]
    assert cli(*line, "--widths", "1,2").code == 2
    assert cli(*line, "--over", "width", "--widths", "0,2").code == 2
    assert cli(*line, "--over", "width", "--matcher", "sweep").code == 2
    assert cli(*line, "--over", "width", "--widths", "3", "--inputs", "x.npz").code == 2


def test_a_curve_refuses_a_width_before_it_opens_anything(cli):
    files = ("nowhere-a.pt", "nowhere-b.pt", "--arch", "mlp", "--samples", "nowhere.npz")
    done = cli("curve", *files, "--over", "width", "--widths", "1,3")
    assert done.code == 2
    assert "--widths 3" in done.err
    assert "use at most 2" in done.err
