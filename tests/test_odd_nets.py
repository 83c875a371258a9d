"""Networks out of the ordinary: a permuted twin is recovered, the function kept, `check` passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import odd_nets
import otfuse_cli
import real_nets
from nets import randomise
from otfuse_cli.errors import IncompatibleModels, SolveFailed
from otfuse_cli.graph.axes import axis_units
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running import function_change
from otfuse_cli.running.acid import acid_test, leave_one_out, redraw
from otfuse_cli.running.architecture import architecture
from otfuse_cli.running.factory import build
from otfuse_cli.running.once import run_once
from otfuse_cli.running.relabel import draw_maps, relabel_state

pytestmark = pytest.mark.usefixtures("kept_graphs")

# This many of each family are tried at every change, the others in the slow suite.
QUICK = 1


def members(*families: str) -> list[object]:
    found: list[object] = []
    for family in families or odd_nets.FAMILIES:
        for at, factory in enumerate(odd_nets.FAMILIES[family]):
            marks = [pytest.mark.slow] if at >= QUICK else []
            name = factory.__name__
            found.append(pytest.param(name, marks=marks, id=f"{family}-{name}"))
    return found


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def place(name: str) -> str:
    """Where a factory is."""
    return f"real_nets:{name}" if hasattr(real_nets, name) else f"odd_nets:{name}"


def made(name: str) -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
    network = build(place(name), device="cpu")
    return network.module, network.args, dict(network.kwargs)


def twins(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A state of the network, and the same with its free units in another order."""
    module, args, kwargs = made(name)
    graph = trace(module, args, kwargs)
    generator = torch.Generator().manual_seed(1)
    original = {n: t.detach().clone() for n, t in module.state_dict().items()}
    for names in ({t.name, *t.aliases} for t in graph.tensors.values()):
        first = next(n for n in original if n in names)
        original |= dict.fromkeys(names, original[first])
    twin = relabel_state(original, graph, draw_maps(graph, generator))
    moved = any(not torch.equal(twin[n], t) for n, t in original.items())
    assert moved == any(s.size > 1 for s in graph.free())
    return twin, original


@pytest.mark.quick_cases("legacy-legacy_first", "cached-cached_before")
@pytest.mark.parametrize("name", members("grouped", "legacy", "axis", "made", "cached", "packed"))
def test_a_permuted_twin_is_recovered_and_computes_the_same(name):
    twin, original = twins(name)
    fused, report = otfuse_cli.merge(twin, original, arch=f"odd_nets:{name}")
    for tensor, value in fused.items():
        assert torch.equal(value, original[tensor]), tensor
    assert report.checks.function == "kept"
    assert all(space.ot_cost < 1e-6 for space in report.spaces)


@pytest.mark.slow
@pytest.mark.usefixtures("kept_graphs")
@pytest.mark.parametrize("name", members())
def test_other_recipes_recover_the_twin_too(name):
    if "complex" in name:
        pytest.skip("complex units are not matched")
    twin, original = twins(name)
    for options in ({"weights": (1, 0)}, {"paper": True, "residual": "shared"}):
        fused, _ = otfuse_cli.merge(twin, original, arch=f"odd_nets:{name}", **options)
        for tensor, value in fused.items():
            assert torch.equal(value, original[tensor]), (options, tensor)


@pytest.mark.slow
@pytest.mark.usefixtures("kept_graphs")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [factory.__name__ for factory in real_nets.REAL])
def test_networks_of_libraries_are_recovered_and_stand_the_test(name):
    twin, original = twins(name)
    fused, report = otfuse_cli.merge(twin, original, arch=place(name), matcher="sweep")
    for tensor, value in fused.items():
        assert torch.equal(value, original[tensor]), tensor
    assert report.checks.function == "kept"
    checked = otfuse_cli.check(original, arch=place(name))
    assert checked.checks.function == "kept"
    assert (checked.evaluation or {})["members detected"]


@pytest.mark.quick_cases(
    "cached-cached_before", "legacy-legacy_first", "axis-axis_copies", "grouped-grouped"
)
@pytest.mark.parametrize("name", members())
def test_the_graph_stands_the_acid_test(name):
    module, args, kwargs = made(name)
    before = {n: (t.dtype, t.detach().clone()) for n, t in module.state_dict().items()}
    graph = trace(module, args, kwargs)
    result = acid_test(module, args, kwargs, graph, seed=0, draws=2)
    assert result.passed, result
    for tensor, value in module.state_dict().items():
        assert (value.dtype, True) == (before[tensor][0], torch.equal(value, before[tensor][1]))
    for cache in ("kept", "by_device", "steps"):
        assert not getattr(module, cache, None)


@pytest.mark.quick_cases("grouped-1e-10", "in_float16-0.01", "in_complex-1e-10")
@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("grouped", 1e-10),
        ("in_complex", 1e-10),
        ("all_complex", 1e-10),
        ("half_buffer", 1e-10),
        ("in_float32", 1e-4),
        ("in_float16", 1e-2),
        ("in_bfloat16", 5e-2),
    ],
)
def test_outputs_are_compared_as_precisely_as_they_are_computed(name, allowed):
    module, args, kwargs = made(name)
    result = acid_test(module, args, kwargs, trace(module, args, kwargs), seed=0, draws=1)
    assert result.threshold == allowed
    assert result.max_error <= allowed


@pytest.mark.quick_cases("in_float16")
@pytest.mark.parametrize("name", ["in_float32", "in_float16", "in_bfloat16"])
def test_a_wrong_graph_shows_at_any_precision(name):
    """A claim that is false moves the outputs by more than any of the allowances."""
    module, args, kwargs = made(name)
    graph = trace(module, args, kwargs)
    assert leave_one_out(module, args, kwargs, graph, seed=0).undetected == ()


@pytest.mark.quick_cases("in_bfloat16-0.06-False")
@pytest.mark.parametrize(
    ("name", "change", "kept"),
    [
        ("in_bfloat16", 0.04, True),
        ("in_bfloat16", 0.06, False),
        ("in_float16", 0.005, True),
        ("in_float16", 0.02, False),
        ("in_float32", 0.005, False),
        ("twice_named", 0.005, False),
    ],
)
def test_a_merge_allows_for_the_precision_of_the_network(name, change, kept, monkeypatch):
    twin, original = twins(name)
    monkeypatch.setattr(function_change, "function_change", lambda *_, **__: change)
    if kept:
        _, report = otfuse_cli.merge(twin, original, arch=f"odd_nets:{name}", matcher="sweep")
        assert report.checks.max_error == change
        return
    with pytest.raises(SolveFailed, match="computes something else"):
        otfuse_cli.merge(twin, original, arch=f"odd_nets:{name}", matcher="sweep")


@pytest.mark.parametrize("name", ["axis_none", "axis_last", "axis_mean", "axis_transposed"])
def test_an_axis_that_the_input_was_given_stays_in_place(name):
    module, args, kwargs = made(name)
    graph = trace(module, args, kwargs)
    (read,) = (s for s in graph.spaces.values() if s.id == "first.weight:1")
    assert read.pinned == "one position that no tensor makes"
    assert all(graph.producers(s.id) for s in graph.free())


@pytest.mark.quick_cases("axis_gain-tensors1")
@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("axis_copies", ("first.weight",)),  # what reads them
        ("axis_gain", ("w",)),
        ("modulated", ("w",)),
        ("modulated_upwards", ("w",)),
        ("packed_last_state", ("words.weight",)),
    ],
)
def test_units_are_compared_by_what_there_is(name, tensors):
    twin, original = twins(name)
    _, report = otfuse_cli.merge(twin, original, arch=f"odd_nets:{name}", matcher="sweep")
    assert tensors in [space.tensors for space in report.spaces]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"samples": True}, {"samples": True, "align": "acts", "refit": False}, {}]
)
@pytest.mark.parametrize("name", ["grouped", pytest.param("transposed", marks=pytest.mark.slow)])
def test_two_different_grouped_networks_fuse(name, options):
    """Repair, refit and activations on a grouped convolution that a norm follows."""
    states = []
    for seed in (0, 1):
        module, *_ = made(name)
        states.append({n: t.clone() for n, t in randomise(module, seed).state_dict().items()})
    given = {"samples": {"x": torch.randn(40, 3, 6, 6)}} if options.get("samples") else {}
    fused, _ = otfuse_cli.merge(*states, arch=f"odd_nets:{name}", **{**options, **given})
    assert all(torch.isfinite(t).all() for t in fused.values())
    assert any(not torch.equal(fused[n], t) for n, t in states[1].items())


@pytest.mark.slow
def test_packed_sequences_are_not_exported_to_be_run():
    states = [made("packed_gru")[0].state_dict() for _ in range(2)]
    x = {"x": torch.randn(40, 5, 6), "lengths": torch.full((40,), 3)}
    with pytest.raises(IncompatibleModels, match="packed sequences"):
        otfuse_cli.merge(*states, arch="odd_nets:packed_gru", samples=x)


@pytest.mark.parametrize("name", ["legacy_first", "legacy_last", "from_numpy", "legacy_tied"])
def test_parameters_made_anyhow_have_no_values_while_a_network_is_traced(name):
    module, *_ = made(name)
    state = module.state_dict(keep_vars=True)
    first = {id(t): n for n, t in reversed(state.items())}
    shapes = {n: tuple(state[n].shape) for n in sorted(first.values(), key=list(state).index)}
    known = architecture(f"odd_nets:{name}", shapes)
    assert known.network is not None
    held = known.network.module.state_dict(keep_vars=True)
    assert all(t.is_meta for t in held.values())
    assert len({id(t) for t in held.values()}) == len(first)


@pytest.mark.slow
def test_variances_are_drawn_as_such_where_no_unit_can_move():
    module, args, kwargs = made("shuffled")
    graph = trace(module, args, kwargs)
    (axis,) = graph.tensors["norms.4.running_var"].axes
    assert list(axis_units(axis.expr)) == []
    generator = torch.Generator().manual_seed(0)
    drawn = redraw(module.state_dict(), graph, generator)
    assert all((t > 0).all() for n, t in drawn.items() if n.endswith("running_var"))


def test_a_run_draws_the_same_whatever_was_drawn_before():
    module, args, kwargs = made("noisy")
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        runs.append(run_once(module, module.state_dict(), args, kwargs))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(*runs)


@pytest.mark.slow
def test_what_torch_says_is_quoted():
    class Opaque(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            y = super().forward(input)
            return y + len(y.tolist()[0]) * float(y.max())

    with pytest.raises(IncompatibleModels) as caught:
        trace(Opaque(3, 3), (torch.zeros(2, 3),))
    assert "torch.export: " in (caught.value.why or "")
    assert "Could not" in (caught.value.why or "")


@pytest.mark.slow
def test_merged_units_of_a_modulated_weight_are_told(tmp_path):
    """Which of its axes reads units can't be seen: only permutations are exact there."""
    (tmp_path / "net.py").write_text(MODULATED)
    arch = f"{tmp_path / 'net.py'}:net"
    namespace: dict = {}
    exec(MODULATED, namespace)
    states = [namespace["Modulated"](width).state_dict() for width in (9, 6, 6)]
    _, report = otfuse_cli.merge(states[0], states[1], arch=arch, matcher="sweep")
    assert any("loses more than elsewhere" in w and "weight" in w for w in report.warnings)
    _, report = otfuse_cli.merge(states[2], states[1], arch=arch, matcher="sweep")
    assert not any("loses more than elsewhere" in w for w in report.warnings)


MODULATED = """
import torch
from torch import nn

class Modulated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp, self.style = nn.Conv2d(3, width, 3, padding=1), nn.Linear(4, width)
        self.weight, self.out = nn.Parameter(torch.randn(16, width, 3, 3)), nn.Conv2d(16, 5, 1)

    def forward(self, x, z):
        h = self.inp(x).relu()
        b, c, height, width = h.shape
        w = self.weight[None] * self.style(z)[:, None, :, None, None]
        h = h.reshape(1, b * c, height, width)
        y = nn.functional.conv2d(h, w.reshape(b * 16, c, 3, 3), groups=b, padding=1)
        return self.out(y.reshape(b, 16, height, width).relu()).mean((2, 3))

def net():
    return Modulated(6), (torch.randn(2, 3, 8, 8), torch.randn(2, 4))
"""


class Turned(nn.Module):
    """A complex layer among real ones."""

    def __init__(self):
        super().__init__()
        self.first, self.mid, self.back = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 8)
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = self.back(self.mid(self.first(x)).relu())
        return self.out((x.to(torch.complex64) @ self.turn).abs())


def test_units_of_complex_weights_stay_and_the_others_are_matched():
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        states.append(Turned().state_dict())
    _, report = otfuse_cli.merge(*states, arch=Turned, matcher="sweep")
    assert report.checks.function == "kept"
    assert {space.id.partition(".")[0] for space in report.spaces} == {"first", "mid"}
    assert "complex" in {pin.reason for pin in report.graph.pinned}
