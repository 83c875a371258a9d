"""Joint fusion: choosing and rebuilding units, and what must hold whatever the parents are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nets
import otfuse_cli
from nets import from_factory as build
from otfuse_cli.errors import IncompatibleModels, SolveFailed, UsageError
from otfuse_cli.fusion.choose_by_readers import choose_written, written
from otfuse_cli.fusion.lockstep import Parent
from otfuse_cli.fusion.pivoted_cholesky import choose_pivots, combinations
from otfuse_cli.fusion.stream_choice import choose_heads
from otfuse_cli.graph.trace.from_module import export, trace
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.running.chance import clearly_more
from otfuse_cli.session import bench, ways

pytestmark = pytest.mark.usefixtures("kept_graphs")

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, stream={stream}, inner={inner}):
        super().__init__()
        self.stem = nn.Conv2d(3, stream, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(stream)
        self.conv1 = nn.Conv2d(stream, inner, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, stream, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(stream)
        self.head = nn.Linear(stream, 5)

    def forward(self, x):
        x = self.bn0(self.stem(x)).relu()
        x = (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()
        return self.head(x.mean((2, 3)))


def net():
    return Net(), torch.randn(4, 3, 8, 8)
"""


@pytest.fixture
def factory(tmp_path):
    def write(stream=8, inner=6):
        path = tmp_path / f"net{stream}_{inner}.py"
        path.write_text(NET.format(stream=stream, inner=inner))
        return f"{path}:net"

    return write


def permuted(state, seed=5):
    """The twin of a network whose units stand in another order."""
    generator = torch.Generator().manual_seed(seed)
    twin = dict(state)
    stream = torch.randperm(len(state["stem.weight"]), generator=generator)
    inner = torch.randperm(len(state["conv1.weight"]), generator=generator)
    for names, order in ((("stem", "bn0", "conv2", "bn2"), stream), (("conv1", "bn1"), inner)):
        for name, tensor in state.items():
            if name.partition(".")[0] in names and tensor.dim():
                twin[name] = twin[name][order]
    for name, order in (("conv1.weight", stream), ("conv2.weight", inner), ("head.weight", stream)):
        twin[name] = twin[name][:, order]
    return twin


def outputs(arch, state, x):
    net = build(arch, 0)
    net.load_state_dict(state)
    with torch.no_grad():
        return net.eval()(x)


def inputs(count=120, seed=3):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 1000))
def test_chosen_units_are_themselves_and_residuals_nearly_orthogonal(units, most, seed):
    most = min(most, units)
    rows = torch.randn(units, 40, generator=torch.Generator().manual_seed(seed)).double()
    gram = rows @ rows.T
    chosen = choose_pivots(gram, torch.ones(units, dtype=torch.float64), most)
    assert len(set(chosen.tolist())) == most
    assert chosen.tolist() == sorted(chosen.tolist())
    read = combinations(gram, chosen)
    assert torch.equal(read[chosen], torch.eye(most, dtype=torch.float64))
    rest = rows - read @ rows[chosen]
    # what a ridge of 0.01 leaves of the inner products
    assert float((rest @ rows[chosen].T).abs().max()) < 0.05 * float(gram.diagonal().max())


def test_a_duplicate_is_its_twin_and_few_inputs_are_not_overfitted():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 10, generator=generator).double()
    rows = torch.cat([rows, 2 * rows[:3], 1e-9 * rows[:1]])
    chosen = torch.arange(12)
    read = combinations(rows @ rows.T, chosen)
    twins = torch.eye(12, dtype=torch.float64)[[0, 1, 2, 0]] * torch.tensor([[2.0]] * 3 + [[1e-9]])
    torch.testing.assert_close(read[12:], twins, rtol=0, atol=1e-9)

    # 30 units seen on 20 inputs, all made of 4 signals and noise: other inputs of the same kind
    mix = torch.randn(60, 4, generator=generator).double()
    seen, other = (
        mix @ torch.randn(4, count, generator=generator).double()
        + 0.3 * torch.randn(60, count, generator=generator).double()
        for count in (20, 2000)
    )
    chosen = torch.arange(30)
    read = combinations(seen @ seen.T, chosen)
    exact = torch.linalg.lstsq(seen[:30].T, seen.T, driver="gelsd").solution.T
    missed, exactly = ((m @ other[:30] - other)[30:].norm() for m in (read, exact))
    assert missed < 0.8 * exactly


def test_a_duplicate_is_never_chosen_before_something_new():
    rows = torch.randn(5, 30, generator=torch.Generator().manual_seed(0)).double()
    rows = torch.cat([rows, rows])
    chosen = choose_pivots(rows @ rows.T, torch.ones(10, dtype=torch.float64), 5)
    assert {c % 5 for c in chosen.tolist()} == set(range(5))


def test_a_parent_of_little_weight_gives_few_units():
    rows = torch.randn(20, 60, generator=torch.Generator().manual_seed(0)).double()
    share = torch.cat([torch.full((10,), 0.95), torch.full((10,), 0.05)]).double()
    chosen = choose_pivots(rows @ rows.T, share, 10)
    assert sum(c < 10 for c in chosen.tolist()) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("twin", [lambda s: s, permuted], ids=["itself", "permuted"])
def test_one_function_is_kept(factory, twin):
    arch = factory()
    state = build(arch, 1).state_dict()
    x = inputs()
    expected = outputs(arch, state, x)
    for pair in ((state, twin(state)), (twin(state), state)):
        fused, report = otfuse_cli.merge(
            *pair, arch=arch, samples={"x": x}, num_samples=120, blend="joint"
        )
        found = outputs(arch, fused, inputs(50, seed=8))
        wanted = outputs(arch, state, inputs(50, seed=8))
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4
        assert [s.name for s in report.steps] == ["average", "joint"]
    assert expected.shape == (120, 5)


@pytest.mark.slow
def test_order_of_the_parents_does_not_matter(factory):
    arch = factory()
    states = [build(arch, seed).state_dict() for seed in (1, 2)]
    x = inputs()
    found = [
        outputs(
            arch,
            otfuse_cli.merge(
                *pair, arch=arch, samples={"x": x}, num_samples=120, blend="joint",
                matcher="sweep",
            )[0],
            x,
        )
        for pair in (states, states[::-1])
    ]  # fmt: skip
    assert float((found[0] - found[1]).abs().max() / found[0].abs().max()) < 1e-3


@pytest.mark.slow
def test_other_widths_and_more_than_two(factory):
    small, large = factory(6, 4), factory(10, 8)
    states = [build(large, 1).state_dict(), build(small, 2).state_dict()]
    x = inputs(200)
    fused, _ = otfuse_cli.merge(
        *states, states[1], arch=small, samples={"x": x}, num_samples=200, blend="joint",
        matcher="sweep",
    )  # fmt: skip
    assert fused["stem.weight"].shape == (6, 3, 3, 3)
    wanted = (outputs(large, states[0], x) + 2 * outputs(small, states[1], x)) / 3
    missed = float((outputs(small, fused, x) - wanted).norm() / wanted.norm())
    assert missed < 0.25


@pytest.mark.slow
def test_auto_takes_what_agrees_more_on_what_was_held_out(factory):
    arch = factory()
    states = [build(arch, seed).state_dict() for seed in (1, 2)]
    _, report = otfuse_cli.merge(
        *states, arch=arch, samples={"x": inputs()}, num_samples=120, blend="auto", matcher="sweep"
    )
    _, *tried, last = report.steps
    names = [step.name.removesuffix(", held out") for step in tried]
    assert names == ["head", "average", "refit", "joint"]
    (chosen,) = [name for name, step in zip(names, tried, strict=True) if step.kept]
    assert last.name == chosen


@pytest.mark.slow
def test_joint_searches_once_and_judges_no_maps(factory):
    """What is matched is a report's, and an average's to fall back on."""
    arch = factory()
    states = [build(arch, seed).state_dict() for seed in (1, 2)]
    found = {}
    for blend in ("joint", "average"):
        _, report = otfuse_cli.merge(
            *states, arch=arch, samples={"x": inputs()}, num_samples=120, blend=blend
        )
        found[blend] = {c.name: c.agreement for c in report.candidates}
        assert report.steps[0].name == "average"
    assert found["joint"] == {"sweep": None, "sweep + descent": None}
    assert "activations + descent" in found["average"]
    # A fit follows: maps are told apart on 100 of the 120 inputs.
    assert all(float(100 * share).is_integer() for share in found["average"].values())


@pytest.mark.slow_cases("120")
@pytest.mark.parametrize("judged", [120, 70])
def test_what_parents_say_is_heard_where_they_are_looked_at(factory, monkeypatch, judged):
    """The same as in passes of its own, cut within a batch or not."""
    monkeypatch.setattr(bench, "_JUDGED", judged)
    arch, benches = factory(), []
    states = [build(arch, seed).state_dict() for seed in (1, 2)]
    looked = bench.seen_units
    monkeypatch.setattr(
        ways, "seen_units", lambda b, *a, **k: benches.append(b) or looked(b, *a, **k)
    )
    otfuse_cli.merge(*states, arch=arch, samples={"x": inputs()}, num_samples=120, blend="joint")
    (stand,) = benches
    assert stand.heard.keys() == {0, 1}
    for at, heard in stand.heard.items():
        assert len(heard) == judged
        wanted = stand.logits(stand.programs[at], stand.tensors[at])
        torch.testing.assert_close(heard, wanted, rtol=1e-6, atol=1e-6)


def mlp_state(seed):
    torch.manual_seed(seed)
    return nets.state(nets.Mlp((6, 8, 4, 3)))


def side_by_side(weights, states):
    """Parents of one MLP 6-8-4-3 as they are run, their shares given."""
    net = nets.Mlp((6, 8, 4, 3))
    x = (torch.randn(4, 6),)
    graph = trace(net, x, source="mlp")
    program = labelled_program(export(net, x), batch=4, graph=graph)
    return [Parent(program, s, w, graph) for s, w in zip(states, weights, strict=True)]


def units_of(parents, name):
    graph = parents[0].graph
    return next(s.id for s in graph.free() if (name, 0) in graph.members[s.id])


def test_what_parents_write_is_their_own_reading_or_their_weighted_sum():
    """Against the formula: hidden layers apart, each at its parent's share; the output together."""
    states = [mlp_state(seed) for seed in (1, 2)]
    parents = side_by_side((0.25, 0.75), states)
    rows = torch.randn(16, 40, dtype=torch.float64)
    gram = rows @ rows.T

    def at(matrix, power):
        own = gram[: matrix.shape[1], : matrix.shape[1]]
        return matrix * (power / torch.trace(matrix @ own @ matrix.T)).sqrt()

    two = [s["fc2.weight"].double() for s in states]
    apart = [torch.cat([two[0], 0 * two[0]], 1), torch.cat([0 * two[1], two[1]], 1)]
    wanted = torch.cat([at(m, w) for m, w in zip(apart, (0.25, 0.75), strict=True)])
    torch.testing.assert_close(written(parents, units_of(parents, "fc1.weight"), gram), wanted)
    three = [s["fc3.weight"].double() for s in states]
    whole = at(torch.cat([0.25 * three[0], 0.75 * three[1]], 1), 1.0)
    small = gram[:8, :8]
    torch.testing.assert_close(written(parents, units_of(parents, "fc2.weight"), small), whole)


def test_what_parents_cancel_is_not_worth_a_unit():
    """Two units that do the same, which the sum of the outputs reads with opposite signs."""
    states = [mlp_state(seed) for seed in (1, 2)]
    states[1]["fc3.weight"][:, 0] = -states[0]["fc3.weight"][:, 0]
    parents = side_by_side((0.5, 0.5), states)
    rows = torch.randn(8, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[4] = 30 * rows[0]
    rows[0] *= 30
    chosen = choose_written(parents, units_of(parents, "fc2.weight"), rows @ rows.T, 6)
    assert chosen.tolist() == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize(
    ("gained", "lost", "wins"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (6, 3, False), (7, 3, True), (3, 7, False)],
)
def test_joint_has_to_win_by_more_than_chance(gained, lost, wins):
    joint = torch.tensor([True] * gained + [False] * lost + [True, False] * 20)
    average = torch.tensor([False] * gained + [True] * lost + [True, False] * 20)
    assert clearly_more(joint, average) is wins


@pytest.mark.slow
def test_double_precision_goes_in_and_comes_out(factory):
    arch = factory()
    states = [
        {
            n: t.double() if t.is_floating_point() else t
            for n, t in build(arch, s).state_dict().items()
        }
        for s in (1, 2)
    ]
    fused, _ = otfuse_cli.merge(
        *states, arch=arch, samples={"x": inputs()}, num_samples=60, blend="joint", matcher="sweep"
    )
    assert all(fused[n].dtype == t.dtype for n, t in states[1].items())


@pytest.mark.slow
def test_where_joint_can_not_be(factory):
    arch = factory()
    states = [build(arch, seed).state_dict() for seed in (1, 2)]
    with pytest.raises(UsageError, match="makes all tensors anew"):
        otfuse_cli.merge(
            *states, arch=arch, samples={"x": inputs()}, blend="joint", skip=("head.*",)
        )
    assert IncompatibleModels.exit_code == 4


def test_joint_needs_inputs(factory):
    states = [build(factory(), seed).state_dict() for seed in (1, 2)]
    with pytest.raises(UsageError, match="--blend joint needs inputs"):
        otfuse_cli.merge(*states, arch=factory(), blend="joint")


def test_heads_that_put_out_nothing_finite_are_no_choice():
    covariance = torch.eye(8, dtype=torch.float64)
    covariance[0, 0] = torch.nan
    with pytest.raises(SolveFailed, match="covariance of heads"):
        choose_heads(covariance, torch.ones(3, 8, dtype=torch.float64), 4, 2)
