"""The refit at its oracles: lstsq, primal = dual, exactness where nothing is to be done."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import otfuse_cli
from nets import from_factory as build
from otfuse_cli.errors import SolveFailed, UsageError
from otfuse_cli.fusion.output_ridge import OutputRidge, affordable
from otfuse_cli.fusion.patches import along_outputs, rows_of
from otfuse_cli.fusion.ridge import Ridge
from otfuse_cli.graph.analysis.fit_targets import fits, scores
from otfuse_cli.graph.trace.from_module import export
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.session import bench

pytestmark = pytest.mark.usefixtures("kept_graphs")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_lstsq(inputs, target, prior, bias, ridge):
    """The same minimum as an ordinary least-squares problem: the penalty as further rows."""
    n, d = inputs.shape
    power = inputs.square().mean(0).mean()
    pull = (ridge * power * n) ** 0.5 * torch.eye(d, dtype=torch.float64)
    rest = target - inputs @ prior.T
    if bias is not None:
        rest = rest - bias
        inputs = torch.cat([inputs, torch.ones(n, 1, dtype=torch.float64)], 1)
        pull = torch.cat([pull, torch.zeros(d, 1, dtype=torch.float64)], 1)
    rows = torch.cat([inputs, pull])
    right = torch.cat([rest, torch.zeros(d, rest.shape[1], dtype=torch.float64)])
    step = torch.linalg.lstsq(rows, right, driver="gelsd").solution
    weight = prior + step[:d].T
    return weight, None if bias is None else bias + step[d]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(3, 40), st.integers(1, 12), st.integers(1, 5), st.sampled_from([0.01, 0.1, 3.0]),
    st.booleans(), st.integers(0, 10_000),
)  # fmt: skip
def test_ridge_is_lstsq_in_both_forms(n, d, o, ridge, with_bias, seed):
    inputs, target = draw(n, d, seed=seed) + 0.5, draw(n, o, seed=seed + 1)
    prior = draw(o, d, seed=seed + 2)
    bias = draw(o, seed=seed + 3) if with_bias else None
    weight, shift = by_lstsq(inputs, target, prior, bias, ridge)
    for rows in (1, 10_000):  # dual, primal
        sums = Ridge(prior[None], None if bias is None else bias[None], rows=rows)
        assert sums.dual is (rows < d)
        for part in torch.arange(n).chunk(3):
            sums.add(inputs[None, part], target[None, part])
        found = sums.solve(ridge, where="layer")
        assert found is not None
        torch.testing.assert_close(found.weight_gOD[0], weight, rtol=1e-8, atol=1e-8)
        outputs = inputs @ weight.T
        torch.testing.assert_close(found.mean_gO[0], outputs.mean(0), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(
            found.variance_gO[0], outputs.var(0, correction=0), rtol=1e-7, atol=1e-8
        )
        missed = target - outputs
        if bias is not None:
            torch.testing.assert_close(found.bias_gO[0], shift, rtol=1e-8, atol=1e-8)
            missed = missed - shift
        assert found.after == pytest.approx(float(missed.norm() / target.norm()), rel=1e-6)
        assert found.after <= found.before + 1e-12


def test_rows_are_counted_as_they_are_weighted():
    """A weight that float32 rounds: sums of rows and their number have to go together."""
    weights = torch.full((50,), 0.02, dtype=torch.float64)
    sums = Ridge(draw(1, 2, 4), None, rows=50)
    sums.add(draw(1, 50, 4).float(), draw(1, 50, 2, seed=1).float(), weights)
    assert sums.rows == float(weights.float().double().sum())
    assert sums.rows != float(weights.sum())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_in_float32_with_a_large_mean_lose_no_digits_to_it(with_bias, weighted):
    n, d, o = 400, 6, 3
    inputs = (draw(n, d) + 3000 * draw(1, d, seed=1)).float()
    target = (1e-2 * inputs @ draw(d, o, seed=2).float() + draw(n, o, seed=3)).float()
    prior, bias = draw(o, d, seed=4), draw(o, seed=5) if with_bias else None
    counts = torch.randint(1, 4, (n,), generator=torch.Generator().manual_seed(0))
    sums = Ridge(prior[None], None if bias is None else bias[None], rows=10_000)
    many = counts if weighted else torch.ones_like(counts)
    for part in torch.arange(n).chunk(3):
        weights = many[part] if weighted else None
        sums.add(inputs[None, part], target[None, part], weights)
    found = sums.solve(1e-9, where="layer")
    repeated = (rows.double().repeat_interleave(many, 0) for rows in (inputs, target))
    weight, _ = by_lstsq(*repeated, prior, bias, 1e-9)
    torch.testing.assert_close(found.weight_gOD[0], weight, rtol=1e-3, atol=1e-3)


def test_a_miss_of_rounding_is_told_from_a_small_one():
    inputs, weight = draw(300, 200).float(), draw(4, 200, seed=1)
    exact = inputs.double() @ weight.T
    for miss, fitted in ((0.0, False), (5e-7, False), (3e-6, True)):
        sums = Ridge(weight[None], None, rows=10_000)
        noise = draw(300, 4, seed=2)
        sums.add(inputs[None], (exact + miss * exact.norm() / noise.norm() * noise)[None])
        assert sums.residual == pytest.approx(miss, abs=1e-12)
        assert (sums.solve(0.01, where="layer") is not None) is fitted


def test_panels_of_products_make_the_whole(monkeypatch):
    inputs, target, prior = draw(2, 30, 11), draw(2, 30, 4, seed=1), draw(2, 4, 11, seed=2)
    found = []
    for panel in (3, 512):
        monkeypatch.setattr("otfuse_cli.fusion.half_products._PANEL", panel)
        for rows in (1, 10_000):  # dual, primal
            sums = Ridge(prior, draw(2, 4, seed=3), rows=rows)
            for part in torch.arange(30).chunk(2):
                sums.add(inputs[:, part], target[:, part])
            found.append(sums.solve(0.1, where="layer"))
    for one in found[1:]:
        torch.testing.assert_close(one.weight_gOD, found[0].weight_gOD, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.variance_gO, found[0].variance_gO, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [30, 2])
def test_a_row_that_counts_three_times_is_that_row_three_times(rows):
    """In the primal (many rows announced) and the dual form."""
    inputs, target, prior = draw(9, 5), draw(9, 2, seed=1), draw(1, 2, 5, seed=2)
    counts = torch.tensor([1.0, 3.0, 2.0] * 3, dtype=torch.float64)
    found = []
    for many in (True, False):
        sums = Ridge(prior, torch.zeros(1, 2), rows=rows)
        if many:
            again = counts.long()
            sums.add(
                inputs.repeat_interleave(again, 0)[None], target.repeat_interleave(again, 0)[None]
            )
        else:
            sums.add(inputs[None], target[None], counts)
        found.append(sums.solve(0.3, where="here"))
    one, two = found
    for part in ("weight_gOD", "bias_gO", "mean_gO", "variance_gO"):
        torch.testing.assert_close(getattr(one, part), getattr(two, part))
    assert one.before == pytest.approx(two.before)
    assert one.after == pytest.approx(two.after)


def test_a_right_prior_is_left_untouched():
    inputs, prior = draw(50, 8), draw(3, 8, seed=1)
    sums = Ridge(prior[None], None, rows=50)
    sums.add(inputs[None], (inputs @ prior.T)[None])
    assert sums.solve(0.1, where="layer") is None


def test_dependent_inputs_without_a_ridge_are_an_error():
    inputs = draw(50, 4).repeat(1, 2)
    sums = Ridge(draw(3, 8)[None], None, rows=50)
    sums.add(inputs[None], draw(50, 3, seed=5)[None])
    with pytest.raises(SolveFailed, match="singular"):
        sums.solve(0.0, where="fc1")


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("n", [40, 6])
def test_a_score_counts_by_the_root_of_its_chance_to_matter(n, with_bias):
    inputs, target, prior = draw(n, 9) + 0.5, 3 * draw(n, 4, seed=1), draw(4, 9, seed=2)
    bias = draw(4, seed=3) if with_bias else None
    more = torch.arange(1, n + 1) % 3 + 1  # an input counts so often beside that
    sums = OutputRidge(prior[None], None if bias is None else bias[None])
    for part in torch.arange(n).chunk(2):
        sums.add(inputs[None, part], target[None, part], more[part])
    found = sums.solve(0.2, where="head")
    says = inputs @ prior.T + (0 if bias is None else bias)
    likely = torch.maximum(target.softmax(1), says.softmax(1))
    chance = (likely.sqrt() + 0.01) * more[:, None]
    left = missed = torch.zeros(())
    for o in range(4):
        one = Ridge(prior[None, o : o + 1], None if bias is None else bias[None, o : o + 1], rows=n)
        one.add(inputs[None], target[None, :, o : o + 1], chance[:, o])
        alone = one.solve(0.2, where="head")
        torch.testing.assert_close(found.weight_gOD[0, o], alone.weight_gOD[0, 0])
        outputs = inputs @ found.weight_gOD[0, o]
        if bias is not None:
            torch.testing.assert_close(found.bias_gO[0, o], alone.bias_gO[0, 0])
            outputs = outputs + found.bias_gO[0, o]
        left = left + (chance[:, o] * (target[:, o] - outputs).square()).sum()
        missed = missed + (chance[:, o] * target[:, o].square()).sum()
    assert found.after == pytest.approx(float((left / missed).sqrt()))
    assert found.after < found.before


def test_a_bias_is_fitted_where_inputs_say_nothing():
    target = 3 * draw(50, 3, seed=1) + 1
    sums = OutputRidge(draw(3, 8, seed=2)[None], torch.zeros(1, 3))
    sums.add(torch.zeros(1, 50, 8), target[None])
    found = sums.solve(0.1, where="head")
    assert found is not None
    assert (found.bias_gO[0] > 0).all()


def test_right_scores_are_left_untouched_one_by_one():
    inputs, prior = draw(50, 8), draw(3, 8, seed=1)
    target = inputs @ prior.T
    sums = OutputRidge(prior[None], None)
    sums.add(inputs[None], target[None])
    assert sums.solve(0.1, where="head") is None
    target[:, 1] += 1
    sums = OutputRidge(prior[None], None)
    sums.add(inputs[None], target[None])
    found = sums.solve(0.1, where="head")
    assert [torch.equal(found.weight_gOD[0, o], prior[o]) for o in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "apart"),
    [
        (1000, 256, 360, True),
        (400, 512, 1000, True),
        (120_000, 768, 50_000, False),  # a vocabulary
        (400, 10, 1, False),
    ],
)
def test_every_score_has_a_system_where_that_is_affordable(rows, inputs, outputs, apart):
    assert affordable(rows, inputs, outputs) is apart


@pytest.mark.parametrize(
    ("end", "conv"),
    [
        (nn.Identity(), False),
        (nn.Sigmoid(), False),
        (nn.Softmax(dim=1), False),
        (nn.LogSoftmax(dim=1), True),
        (nn.Sequential(nn.Dropout(), nn.Softmax(dim=1)), True),
    ],
)
def test_scores_are_what_comes_before_functions_that_keep_their_order(end, conv):
    if conv:
        net, data = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 1)), (2, 3, 6, 6)
    else:
        net, data = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), (2, 6)
    whole = nn.Sequential(net, end).eval()
    program = labelled_program(export(whole, (torch.randn(data),)), batch=2)
    last = fits(program)[0][-1]
    assert scores(program) == last.target == last.layer.node


def test_no_layer_makes_scores_that_another_function_changes():
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    program = labelled_program(export(net, (torch.randn(2, 6),)), batch=2)
    assert scores(program) not in {fit.target for fit in fits(program)[0]}


class Added(nn.Module):
    """A layer, a function of its values, and what was there before is added."""

    def __init__(self, function):
        super().__init__()
        self.before, self.layer, self.function = nn.Linear(5, 4), nn.Linear(5, 4), function

    def forward(self, x):
        return self.before(x) + self.function(self.layer(x))


@pytest.mark.parametrize(
    ("function", "reaches"),
    [(nn.Identity(), True), (nn.Dropout(), True), (nn.Flatten(), True), (nn.Tanh(), False)],
    ids=str,
)
def test_a_layer_answers_for_a_sum_only_if_nothing_changes_its_values(function, reaches):
    net = Added(function).eval()
    program = labelled_program(export(net, (torch.randn(2, 5),)), batch=2)
    fit = next(fit for fit in fits(program)[0] if fit.layer.weight == "layer.weight")
    assert (fit.target != fit.layer.node) is reaches
    assert (fit.minus is not None) is reaches


CONVOLUTIONS = [
    nn.Conv1d(4, 6, 3, stride=2, padding=1),
    nn.Conv2d(4, 6, 3, padding=1, bias=False),
    nn.Conv2d(4, 6, (3, 2), stride=(1, 2), dilation=2, padding=(2, 1)),
    nn.Conv2d(4, 8, 3, groups=2),
    nn.Conv2d(4, 8, 3, groups=4),
    nn.Conv3d(2, 3, 2, padding=1),
    nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1),
    nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, dilation=2),
]


@pytest.mark.parametrize("layer", [nn.Linear(7, 5), *CONVOLUTIONS], ids=str)
def test_rows_times_weight_is_the_layer(layer):
    layer = layer.double()
    sides = {1: (9,), 2: (9, 8), 3: (5, 4, 6)}
    channels = getattr(layer, "in_channels", 7)
    space = layer.weight.dim() - 2
    inputs = draw(3, channels, *sides.get(space, ())) if space else draw(3, 6, 7)
    module = nn.Sequential(layer)
    program = labelled_program(export(module, (inputs,)), batch=3)
    (fit,), shared = fits(program)
    assert not shared
    expected = layer(inputs)
    generator = torch.Generator().manual_seed(0)
    for most in (10_000, 5):
        rows = rows_of(
            fit.layer, layer.weight, tuple(expected.shape[1:]), most=most, generator=generator
        )
        weight = rows.flat_weight(layer.weight.detach())
        made = torch.einsum("gnd,god->gno", rows.inputs(inputs), weight)
        if layer.bias is not None:
            made = made + layer.bias.view(rows.groups, 1, -1)
        torch.testing.assert_close(made, rows.outputs(expected.detach()))
        torch.testing.assert_close(rows.full_weight(weight, layer.weight), layer.weight.detach())
        if most == 5:
            assert made.shape[1] == 3 * 5
    gain = draw(expected.shape[1 if space else -1], seed=3)
    scaled = layer.weight * along_outputs(gain, layer.weight, fit.layer)
    with torch.no_grad():
        shift = 0 if layer.bias is None else layer.bias
        shape = [1] * expected.dim()
        shape[1 if space else -1] = -1
        spread = gain.view(shape)
        shift = 0 if layer.bias is None else layer.bias.view(shape)
        layer.weight.copy_(scaled)
        torch.testing.assert_close(layer(inputs) - shift, spread * (expected - shift).detach())


@pytest.fixture
def factory(tmp_path):
    """A file with a factory for a network of the test, and its state dicts."""

    def write(body):
        path = tmp_path / "net.py"
        path.write_text("import torch\nfrom torch import nn\n" + body)
        return f"{path}:net"

    return write


MLP = """
def net():
    layers = nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4)
    return nn.Sequential(*layers), torch.randn(4, 6)
"""
RESIDUAL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.short = nn.Conv2d(8, 8, 1, bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.bn0(self.stem(x)).relu()
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        x = (out + self.short(x)).relu()
        return self.head(x.mean((2, 3)))


def net():
    return Net(), torch.randn(4, 3, 8, 8)
"""


def inputs_of(arch, count, seed=3):
    shape = (6,) if "Linear(6" in Path(arch.partition(":")[0]).read_text() else (3, 8, 8)
    return {"x": torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.quick_cases("mlp")
@pytest.mark.parametrize("body", [MLP, RESIDUAL], ids=["mlp", "residual"])
def test_fusing_with_itself_changes_nothing(factory, body):
    arch = factory(body)
    state = build(arch, 0).state_dict()
    fused, report = otfuse_cli.merge(state, state, arch=arch, samples=inputs_of(arch, 60))
    for name, tensor in state.items():
        assert torch.equal(fused[name], tensor), name
    assert {step.agreement for step in report.steps} == {1.0}
    assert report.refits == ()


@pytest.mark.slow
@pytest.mark.parametrize("body", [MLP, RESIDUAL], ids=["mlp", "residual"])
def test_refit_brings_the_fused_net_nearer_to_its_parents(factory, body):
    arch = factory(body)
    parents = [build(arch, seed) for seed in (0, 1)]
    states = [p.state_dict() for p in parents]
    data = inputs_of(arch, 300)
    wanted = torch.stack([p.eval()(data["x"]) for p in parents]).mean(0).detach()
    missed = {}
    for refit in (False, True):
        fused, report = otfuse_cli.merge(
            *states,
            arch=arch,
            samples=data,
            refit=refit,
            calibrate="none",
            num_samples=300,
            blend="average",
        )
        net = build(arch, 0)
        net.load_state_dict(fused)
        missed[refit] = float((net.eval()(data["x"]).detach() - wanted).norm() / wanted.norm())
        assert [s.name for s in report.steps] == ["average", "refit"][: 1 + refit]
    assert missed[True] < 0.6 * missed[False]


@pytest.mark.slow
def test_batch_norm_holds_the_statistics_of_what_it_is_given(factory):
    arch = factory(RESIDUAL)
    states = [build(arch, seed).state_dict() for seed in (0, 1)]
    data = inputs_of(arch, 200)
    more = {"samples": data, "num_samples": 200, "blend": "average"}
    fused, _ = otfuse_cli.merge(*states, arch=arch, **more)
    net = build(arch, 0)
    net.load_state_dict(fused)
    seen = {}
    for name in ("bn0", "bn1", "bn2"):
        module = getattr(net, name)
        module.register_forward_hook(
            lambda m, args, out, name=name: seen.__setitem__(name, args[0].detach())
        )
    net.eval()(data["x"])
    for name, value in seen.items():
        mean, var = value.mean((0, 2, 3)), value.var((0, 2, 3), correction=0)
        torch.testing.assert_close(getattr(net, name).running_mean, mean, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(getattr(net, name).running_var, var, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_order_and_batching_of_inputs_do_not_matter(factory, monkeypatch):
    arch = factory(RESIDUAL)
    states = [build(arch, seed).state_dict() for seed in (0, 1)]
    data = inputs_of(arch, 90)
    merge = partial(otfuse_cli.merge, *states, arch=arch, num_samples=90, blend="average")
    first, _ = merge(samples=data)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(9))
    monkeypatch.setattr("otfuse_cli.running.runnable.BATCH", 32)
    from otfuse_cli.running import runnable

    monkeypatch.setattr(runnable.runnable, "__kwdefaults__", {"read": None, "batch": 32})
    second, _ = merge(samples={"x": data["x"][order]})
    third, _ = merge(samples=data, pass_memory=0.0)  # every layer is reached anew
    for name, tensor in first.items():
        for other in (second, third):
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("more", "most_bytes"), [({}, 4 << 30), ({"pass_memory": 0.5}, 1 << 29)])
def test_pass_memory_is_what_waiting_passes_may_hold(factory, monkeypatch, more, most_bytes):
    asked, real = [], bench.Bench

    def spy(*args):
        asked.append(real(*args))
        return asked[-1]

    monkeypatch.setattr(bench, "Bench", spy)
    arch = factory(MLP)
    states = [build(arch, seed).state_dict() for seed in (0, 1)]
    otfuse_cli.merge(*states, arch=arch, samples=inputs_of(arch, 40), max_memory=3.0, **more)
    assert [one.most_bytes for one in asked] == [most_bytes]


@pytest.mark.slow
def test_other_widths(factory):
    wide = factory(MLP)
    state = build(wide, 0).state_dict()
    path = Path(wide.partition(":")[0])
    narrow_path = path.with_name("narrow.py")
    narrow_path.write_text(path.read_text().replace("12", "8").replace("9", "5"))
    narrow = f"{narrow_path}:net"
    other = build(narrow, 1)
    data = inputs_of(wide, 200)
    fused, report = otfuse_cli.merge(
        state,
        other.state_dict(),
        arch=narrow,
        samples=data,
        num_samples=200,
        blend="average",
        weights=(0.3, 0.7),
    )
    assert fused["0.weight"].shape == (8, 6)
    assert len(report.refits) == 3
    assert report.steps[-1].agreement > 0.9
    assert report.steps[-1].kept
    assert all(fit.after < fit.before for fit in report.refits)


@pytest.mark.slow
def test_too_few_inputs(factory):
    arch = factory(MLP)
    states = [build(arch, seed).state_dict() for seed in (0, 1)]
    with pytest.raises(UsageError, match="too few") as error:
        otfuse_cli.merge(*states, arch=arch, samples=inputs_of(arch, 10))
    assert error.value.exit_code == 2
    otfuse_cli.merge(*states, arch=arch, samples=inputs_of(arch, 10), force=True)
    otfuse_cli.merge(*states, arch=arch, samples=inputs_of(arch, 25))
    otfuse_cli.merge(*states, arch=arch, samples=inputs_of(arch, 10), refit=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"align": "acts"}, "--align acts needs inputs"),
        ({"mass": "importance"}, "--mass importance needs inputs"),
        ({"refit": True}, "--refit needs inputs"),
        ({"calibrate": "bn"}, "--calibrate bn needs inputs"),
        ({"ridge": -1.0}, "ridge"),
        ({"calibrate": "often"}, "unknown value"),
    ],
)
def test_options_that_need_inputs(factory, options, words):
    arch = factory(MLP)
    states = [build(arch, seed).state_dict() for seed in (0, 1)]
    with pytest.raises(UsageError, match=words):
        otfuse_cli.merge(*states, arch=arch, **options)


@pytest.mark.slow
def test_calibration(factory):
    arch = factory(RESIDUAL)
    parents = [build(arch, seed) for seed in (0, 1)]
    data = inputs_of(arch, 200)
    merge = partial(
        otfuse_cli.merge, *(p.state_dict() for p in parents), arch=arch, samples=data,
        refit=False, num_samples=200,
    )  # fmt: skip
    for kind, tried in (("bn", 1), ("repair", 1), ("auto", 2), ("none", 0)):
        _, report = merge(calibrate=kind)
        steps = report.steps[1:]
        assert len(steps) == tried
        best = report.steps[0].agreement
        for step in steps:
            assert step.kept is (step.agreement > best)
            best = max(best, step.agreement)


@pytest.mark.slow
def test_a_network_that_was_guessed_is_said_to_be():
    torch.manual_seed(0)
    states = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).state_dict()] * 2
    data = torch.randn(30, 6)
    _, guessed = otfuse_cli.merge(*states, samples=data)
    assert any("--arch mlp confirms it" in w for w in guessed.warnings)
    _, said = otfuse_cli.merge(*states, samples=data, arch="mlp")
    assert not any("--arch mlp" in w for w in said.warnings)


def test_importance_goes_with_activations(factory):
    arch = factory(MLP)
    states = [build(arch, seed).state_dict() for seed in (0, 1)]
    with pytest.raises(UsageError, match="needs --align acts"):
        otfuse_cli.merge(*states, arch=arch, samples=inputs_of(arch, 30), mass="importance")
