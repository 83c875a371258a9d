"""Fits that a ReLU is read behind, and chosen units that take in what others do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import otfuse_cli
from nets import from_factory as build
from otfuse_cli.fusion.merged_units import _Descent, given_to_relus, merge_units
from otfuse_cli.fusion.rectified import behind_relu, target_change
from otfuse_cli.fusion.ridge import Ridge
from otfuse_cli.graph.trace.from_module import export
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.matching.activations import Activations
from otfuse_cli.session import bench

pytestmark = pytest.mark.usefixtures("kept_graphs")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(inputs, target, prior, bias, weights, *, primal, changes=False, ridge=0.2):
    sums = Ridge(prior, bias, rows=10_000 if primal else 1)
    for part in torch.arange(inputs.shape[1]).chunk(3):
        counts = None if weights is None else weights[part]
        sums.add(inputs[:, part], target[:, part], counts)
    return sums, sums.solve(ridge, where="layer", changes=changes)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("primal", [False, True])
def test_changed_targets_give_the_fit_to_these(primal, with_bias, weighted):
    """As if they had been the targets from the start."""
    inputs, target, change = draw(2, 12, 7) + 0.5, draw(2, 12, 3, seed=1), draw(2, 12, 3, seed=2)
    prior = draw(2, 3, 7, seed=3)
    bias = draw(2, 3, seed=4) if with_bias else None
    weights = torch.tensor([1.0, 3.0, 2.0] * 4, dtype=torch.float64) if weighted else None
    sums, plain = fitted(inputs, target, prior, bias, weights, primal=primal, changes=True)
    for part in torch.arange(12).chunk(2):
        counts = None if weights is None else weights[part]
        sums.change(inputs[:, part], change[:, part], counts)
    found = sums.solve_changed(plain)
    _, wanted = fitted(inputs, target + change, prior, bias, weights, primal=primal)
    for name in ("weight_gOD", "mean_gO", "variance_gO", *(["bias_gO"] if with_bias else [])):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    outputs = inputs @ found.weight_gOD.transpose(1, 2)
    missed = outputs - target if bias is None else outputs + found.bias_gO[:, None] - target
    counts = torch.ones(12, 1) if weights is None else weights[:, None]
    left = (counts * missed.square()).sum() / (counts * target.square()).sum()
    assert found.after == pytest.approx(float(left**0.5), rel=1e-6)


def test_targets_move_to_what_is_as_good_behind_a_relu():
    inputs, target = draw(1, 200, 5), draw(1, 200, 4, seed=1)
    prior, zero = torch.zeros(1, 4, 5, dtype=torch.float64), 0.3 * draw(1, 200, 4, seed=2)
    _, plain = fitted(inputs, target, prior, None, None, primal=True)
    given = inputs @ plain.weight_gOD.transpose(1, 2)
    moved = target + target_change(inputs, target, zero, plain)
    seen, below = target > zero, given <= zero
    for where, aim in ((seen, target), (~seen & below, given), (~seen & ~below, zero)):
        assert int(where.sum()) > 50
        torch.testing.assert_close(((moved - given) / 1.7)[where], (aim - given)[where])


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_fit_behind_a_relu_misses_less_there(with_bias):
    inputs, prior = draw(1, 400, 6), torch.zeros(1, 3, 6, dtype=torch.float64)
    target = draw(1, 400, 9) @ draw(1, 9, 3, seed=1) - 1.0
    target += inputs @ draw(1, 6, 3, seed=2)
    bias = torch.zeros(1, 3, dtype=torch.float64) if with_bias else None
    sums, plain = fitted(inputs, target, prior, bias, None, primal=True, changes=True, ridge=1e-3)
    sums.change(inputs, target_change(inputs, target, 0.0, plain))
    better = sums.solve_changed(plain)

    def missed(fit):
        given = inputs @ fit.weight_gOD.transpose(1, 2)
        if fit.bias_gO is not None:
            given = given + fit.bias_gO[:, None]
        # What is cut off misses nothing, what should not be misses all the way.
        given = torch.where(target > 0, given, given.relu())
        return float((given - target.relu()).square().mean())

    assert missed(better) < 0.95 * missed(plain)
    assert better.after >= plain.after  # the plain one is the nearest to what is cut off as well


class Reads(nn.Module):
    def __init__(self, ending):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)
        self.ending = ending

    def forward(self, x):
        return self.two(self.ending(self.one(x)))


@pytest.mark.parametrize(
    ("ending", "is_one"),
    [(nn.ReLU(), True), (nn.GELU(), False), (lambda x: x.relu() + x, False)],
    ids=["relu", "gelu", "and something else"],
)
def test_which_values_relus_alone_read(ending, is_one):
    net, example = Reads(ending), torch.randn(2, 4)
    program = labelled_program(export(net, (example,)), batch=2)
    nodes = [node.name for node in program.nodes if "linear" in node.name]
    assert [behind_relu(program, name) for name in nodes] == [is_one, False]


def two_of_a_kind(noise, seed=0, rows=600):
    """What ReLUs of two parents are given: six units each, those of the second nearly the same."""
    first = draw(rows, 6, seed=seed).float()
    return torch.cat([first, first + noise * draw(rows, 6, seed=seed + 1).float()], 1)


def test_merged_units_miss_less_than_chosen_ones():
    given, chosen = two_of_a_kind(0.5), torch.arange(6)
    read = torch.eye(12, dtype=torch.float64)
    merged = merge_units(given, read, chosen)
    work = _Descent(given, read.float())
    assert work._at(merged.made_UM).missed < 0.9 * work.missed_by_choice(chosen)
    fresh = two_of_a_kind(0.5, seed=7)

    def missed(made, read_UM):
        return float((fresh.relu() - (fresh @ made).relu() @ read_UM.float().T).square().mean())

    alone = torch.eye(12)[:, :6]
    gram = (given.relu().T @ given.relu()).double()
    rebuilt = torch.linalg.solve(gram[:6, :6], gram[:6]).T
    assert missed(merged.made_UM, merged.read_UM) < 0.9 * missed(alone, rebuilt)
    # Every unit takes in its like, and each parent gets its part.
    assert bool((merged.made_UM[6:].diagonal() > 0.1).all())
    first, second = merged.bases([6, 6])
    torch.testing.assert_close(first.made_MN, merged.made_UM[:6].T)
    torch.testing.assert_close(second.read_NM, merged.read_UM[6:].float())


def test_units_that_explain_all_others_stay_as_they_are():
    given = two_of_a_kind(0.0)
    assert merge_units(given, torch.eye(12, dtype=torch.float64), torch.arange(6)) is None


def test_only_units_behind_one_relu_are_merged():
    given = draw(6, 50).float()
    tap = Activations("fc1", "fc1.weight", given.relu(), given)
    torch.testing.assert_close(given_to_relus([[tap], [tap]]), torch.cat([given, given]).T)
    for other in (
        Activations("fc1", "fc1.weight", given.relu()),
        Activations("fc1", "fc1.weight", nn.functional.gelu(given), given),
    ):
        assert given_to_relus([[tap], [other]]) is None
    assert given_to_relus([[tap, tap], [tap, tap]]) is None


MLP = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(10, 12), nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.fc2(self.fc1(x).relu()).relu())


def net():
    return Net(), torch.randn(4, 10)
"""


@pytest.fixture
def arch(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(MLP)
    return f"{path}:net"


def test_joint_fusion_merges_and_comes_nearer(arch, monkeypatch):
    states = [build(arch, seed).state_dict() for seed in (0, 1)]
    x = draw(900, 10).float()
    options = {"arch": arch, "blend": "joint", "matcher": "sweep"}

    def missed():
        fused, _ = otfuse_cli.merge(*states, samples={"x": x[:600]}, num_samples=600, **options)
        nets = [build(arch, 0) for _ in range(3)]
        for net, state in zip(nets, (fused, *states), strict=True):
            net.load_state_dict(state)
        with torch.no_grad():
            ours, one, two = (net(x[600:]) for net in nets)
        return float((ours - (one + two) / 2).square().mean())

    found = missed()
    monkeypatch.setattr("otfuse_cli.fusion.joint.merge_units", lambda *given: None)
    unmerged = missed()
    monkeypatch.setattr("otfuse_cli.fusion.refit.behind_relu", lambda *given: False)
    assert found < unmerged < missed()


def test_a_layer_that_is_right_lets_go_of_what_was_kept(arch, monkeypatch):
    """A network fused with itself; nothing is held for a second look at any layer."""
    released = []
    real = bench.refit.__globals__["Lockstep"].release
    monkeypatch.setattr(
        "otfuse_cli.fusion.lockstep.Lockstep.release",
        lambda self, targets: (released.extend(targets), real(self, targets)),
    )
    state = build(arch, 0).state_dict()
    x = draw(60, 10).float()
    fused, _ = otfuse_cli.merge(
        state, state, arch=arch, samples={"x": x}, num_samples=60, blend="joint"
    )
    assert len(released) == 3
    # Units that were chosen from both may come in another order.
    before, after = build(arch, 0), build(arch, 0)
    after.load_state_dict(fused)
    with torch.no_grad():
        torch.testing.assert_close(after(x), before(x), rtol=1e-5, atol=1e-6)


RESIDUAL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.fc1(x).relu()
        return self.head((x + self.fc2(x)).relu())


def net():
    return Net(), torch.randn(4, 10)
"""


def test_a_layer_that_feeds_a_sum_is_cut_off_where_the_sum_is(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "otfuse_cli.fusion.layer_looks.target_change",
        lambda inputs, target, zero, fit: (
            seen.append((inputs, zero)),
            target_change(inputs, target, zero, fit),
        )[1],
    )
    path = tmp_path / "net.py"
    path.write_text(RESIDUAL)
    states = [build(f"{path}:net", seed).state_dict() for seed in (0, 1)]
    otfuse_cli.merge(
        *states, arch=f"{path}:net", samples={"x": draw(60, 10).float()}, num_samples=60
    )
    sums = [(inputs, zero) for inputs, zero in seen if isinstance(zero, torch.Tensor)]
    assert sums
    assert len(sums) < len(seen)
    for inputs, zero in sums:  # here a layer reads the very stream that it adds to
        torch.testing.assert_close(zero, -inputs)
