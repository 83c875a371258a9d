"""Inputs that are moved to where BatchNorms see what they saw in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import otfuse_cli
from otfuse_cli.errors import UsageError
from otfuse_cli.running import norm_memory
from otfuse_cli.running.architecture import architecture
from otfuse_cli.running.norm_memory import recall_statistics
from otfuse_cli.running.runnable import runnable
from otfuse_cli.running.synthetic import synthetic_samples

pytestmark = pytest.mark.usefixtures("kept_graphs")

NETS = """
import torch
from torch import nn

def deep(layer, norm, shape, inner, width):
    layers = layer(shape[0], inner, 1 if len(shape) == 1 else 3), norm(inner), nn.ReLU()
    return nn.Sequential(
        *layers, layer(inner, width, 1), norm(width), nn.ReLU(), Mean(), nn.Linear(width, 3)
    ), torch.randn(2, *shape)

class Mean(nn.Module):
    def forward(self, x):
        return x.flatten(2).mean(2) if x.dim() > 2 else x

def linear(i, o, kernel):
    return nn.Linear(i, o)

def vectors(inner=7, width=5):
    return deep(linear, nn.BatchNorm1d, (6,), inner, width)

def signals(inner=7, width=5):
    return deep(nn.Conv1d, nn.BatchNorm1d, (3, 12), inner, width)

def images(inner=7, width=5):
    return deep(nn.Conv2d, nn.BatchNorm2d, (3, 9, 8), inner, width)

def volumes(inner=7, width=5):
    return deep(nn.Conv3d, nn.BatchNorm3d, (2, 5, 6, 5), inner, width)

def bare():
    norm = nn.BatchNorm2d(5, affine=False)
    return nn.Sequential(nn.Conv2d(3, 5, 3), norm, nn.ReLU(), Mean(), nn.Linear(5, 3)), torch.randn(
        2, 3, 8, 8
    )

def plain():
    layers = nn.Conv2d(3, 5, 3), nn.ReLU(), Mean(), nn.Linear(5, 3)
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)

def batches():
    norm = nn.BatchNorm2d(5, track_running_stats=False)
    layers = nn.Conv2d(3, 5, 3), norm, nn.ReLU(), Mean(), nn.Linear(5, 3)
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)

def table():
    layers = nn.BatchNorm1d(6), nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)
    return nn.Sequential(*layers), torch.randn(2, 6)

class Ids(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids).mean(1)).relu())

def ids():
    return Ids(), torch.randint(9, (2, 4))

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lift = nn.Embedding(9, 6), nn.Linear(4, 6)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, ids, x):
        return self.head(self.norm(self.embed(ids).mean(1) + self.lift(x)).relu())

def both():
    return Both(), (torch.randint(9, (2, 4)), torch.randn(2, 4))
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NETS)
    return path


def trained(module, seed, *examples):
    """A network whose norms have seen inputs that are neither centred nor independent."""
    torch.manual_seed(seed)
    for layer in module.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = 1.0
    real = []
    for example in examples:
        if example.is_floating_point():
            drawn = torch.randn(500, *example.shape[1:])
            real.append(0.4 + drawn.cumsum(1) + 0.7 * torch.randn(500, *[1] * (example.dim() - 1)))
        else:
            real.append(torch.randint(9, (500, *example.shape[1:])))
    with torch.no_grad():
        module.train()(*real)
    return {name: tensor.clone() for name, tensor in module.eval().state_dict().items()}


def deviation(module, state, *inputs):
    """Largest mean distance of a norm's channels from its memory: shift, and ratio of variances."""
    module.load_state_dict(state)
    worst = []

    def watch(norm, taken):
        values = taken[0].transpose(0, 1).flatten(1)
        shift = (values.mean(1) - norm.running_mean) / norm.running_var.sqrt()
        ratio = values.var(1, unbiased=False) / norm.running_var
        worst.append(float((shift.square() + (ratio - 1).square()).mean()))

    norms = [n for n in module.modules() if isinstance(n, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(watch) for norm in norms]
    with torch.no_grad():
        module.eval()(*inputs)
    for hook in hooks:
        hook.remove()
    return max(worst)


def made(name, *widths):
    """A network of the source, and its example inputs."""
    names = {}
    exec(NETS, names)
    module, examples = names[name](*widths)
    return module, examples if isinstance(examples, tuple) else (examples,)


def parent(source, name, seed=0, *widths):
    """Its architecture, the module, and what it learnt."""
    module, examples = made(name, *widths)
    state = trained(module, seed, *examples)
    shapes = {key: tensor.shape for key, tensor in state.items()}
    return architecture(f"{source}:{name}", shapes), module, state


@pytest.mark.quick_cases("vectors")
@pytest.mark.parametrize("name", ["vectors", "signals", "images", "volumes", "bare"])
def test_norms_see_what_they_saw_whatever_the_rank(source, name):
    known, module, state = parent(source, name)
    first = {"0.weight": state["0.weight"]}
    start = synthetic_samples(known.network, first, number=60, kind="statistics")
    drawn = synthetic_samples(known.network, first, number=60)
    assert torch.equal(start.args[0], drawn.args[0])
    moved = recall_statistics(
        start, [(runnable(known, start, device="cpu"), state)], seed=0, device="cpu", steps=60
    )
    assert moved.args[0].shape == start.args[0].shape
    before, after = (deviation(module, state, *x.args) for x in (start, moved))
    assert before > 0.2
    assert after < 0.1 * before


@pytest.mark.slow
def test_an_input_that_a_norm_reads_itself_starts_there(source):
    """A table's columns: far from zero, each at a scale of its own."""
    known, module, state = parent(source, "table")
    mean = torch.tensor([50.0, -3, 0, 1e4, 7, 1])
    deviations = torch.tensor([10.0, 0.1, 1, 500, 2, 0.02])
    state["0.running_mean"], state["0.running_var"] = mean, deviations.square()
    start = synthetic_samples(known.network, number=80, kind="statistics")
    moved = recall_statistics(
        start, [(runnable(known, start, device="cpu"), state)], seed=0, device="cpu", steps=60
    )
    x = moved.args[0]
    assert ((x.mean(0) - mean).abs() < 0.5 * deviations).all()
    assert ((x.std(0) / deviations - 1).abs() < 0.5).all()
    assert deviation(module, state, x) < 0.3


@pytest.mark.slow
def test_three_parents_of_their_own_widths(source):
    widths = (7, 5), (4, 6), (9, 3)
    parents = [parent(source, "images", seed, *pair) for seed, pair in enumerate(widths)]
    known = parents[0][0]
    start = synthetic_samples(known.network, number=50, kind="statistics")
    kept = [{name: tensor.clone() for name, tensor in state.items()} for *_, state in parents]
    runs = [(runnable(known, start, device="cpu", read=state), state) for *_, state in parents]
    moved = recall_statistics(start, runs, seed=0, device="cpu")
    for (_, module, state), before in zip(parents, kept, strict=True):
        assert deviation(module, state, *moved.args) < 0.25 * deviation(module, state, *start.args)
        assert all(torch.equal(state[name], before[name]) for name in before)


def test_the_same_inputs_by_seed_and_progress_step_by_step(source):
    known, _, state = parent(source, "images")
    start = synthetic_samples(known.network, number=30, kind="statistics")
    runs = [(runnable(known, start, device="cpu"), state)]
    told = []
    options = {"device": "cpu", "steps": 4, "progress": lambda *at: told.append(at)}
    one, same, other = (recall_statistics(start, runs, seed=s, **options) for s in (0, 0, 1))
    assert torch.equal(one.args[0], same.args[0])
    assert not torch.equal(one.args[0], other.args[0])
    assert told[:4] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.slow
def test_a_group_has_the_statistics_not_each_pass(source, monkeypatch):
    """Passes of ten: if each had to have the variance of all, they would be alike."""
    monkeypatch.setattr(norm_memory, "_GROUP", 60)
    known, module, state = parent(source, "vectors")
    start = synthetic_samples(known.network, {"0.weight": state["0.weight"]}, number=122)
    program = runnable(known, start, device="cpu", batch=10)
    told = []
    moved = recall_statistics(
        start,
        [(program, state)],
        seed=0,
        device="cpu",
        steps=60,
        progress=lambda *at: told.append(at),
    )
    assert told[-1] == (120, 120)  # two groups, the second with what is left
    x = moved.args[0]
    assert x.shape == (122, 6)
    whole = deviation(module, state, x[60:])
    assert whole < 0.1 * deviation(module, state, start.args[0][60:])
    passes = [deviation(module, state, part) for part in x[60:120].split(10)]
    assert sum(passes) / len(passes) > 3 * whole


def test_integers_stay_where_numbers_move(source):
    known, module, state = parent(source, "both")
    start = synthetic_samples(known.network, number=40, kind="statistics")
    moved = recall_statistics(
        start, [(runnable(known, start, device="cpu"), state)], seed=0, device="cpu", steps=60
    )
    assert torch.equal(start.args[0], moved.args[0])
    assert deviation(module, state, *moved.args) < 0.2 * deviation(module, state, *start.args)


def pair(source, name):
    return [parent(source, name, seed)[2] for seed in (0, 1)]


@pytest.mark.slow
def test_a_merge_takes_them_without_asking(source):
    states = pair(source, "images")
    options = {"arch": f"{source}:images", "synthetic": True, "num_samples": 40}
    fused, report = otfuse_cli.merge(*states, **options, synthetic_steps=3)
    assert report.recipe["synthetic_kind"] == "statistics"
    assert report.recipe["synthetic_steps"] == 3
    assert report.steps
    asked, _ = otfuse_cli.merge(*states, **options, synthetic_steps=3, synthetic_kind="statistics")
    assert all(torch.equal(fused[name], asked[name]) for name in fused)
    further, _ = otfuse_cli.merge(*states, **options, synthetic_steps=5)
    assert any(not torch.equal(fused[name], further[name]) for name in fused)


@pytest.mark.slow
def test_a_saved_program_is_enough(source, tmp_path):
    """Its passes are as large as its example: two inputs, and the statistics are the group's."""
    module, examples = made("images")
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(module.eval(), examples), path)
    states = pair(source, "images")
    _, report = otfuse_cli.merge(
        *states,
        arch=str(path),
        blend="average",
        synthetic=True,
        num_samples=31,
        synthetic_steps=3,
    )
    assert report.recipe["synthetic_kind"] == "statistics"
    assert [step.name for step in report.steps][-1] == "refit"


@pytest.mark.slow_cases("batches-balanced")
@pytest.mark.parametrize(
    ("name", "kind"), [("plain", "balanced"), ("batches", "balanced"), ("ids", "auto")]
)
def test_networks_without_memory_get_other_inputs(source, name, kind):
    states = pair(source, name)
    _, report = otfuse_cli.merge(*states, arch=f"{source}:{name}", synthetic=True, num_samples=30)
    assert report.recipe["synthetic_kind"] == kind
    assert report.steps


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("plain", {"synthetic_kind": "statistics"}, "no BatchNorm with running statistics"),
        ("batches", {"synthetic_kind": "statistics"}, "no BatchNorm with running statistics"),
        ("ids", {"synthetic_kind": "statistics"}, "integers"),
        ("plain", {"synthetic_kind": "leaves", "synthetic_steps": 5}, "drawn once"),
        ("plain", {"synthetic_steps": 5}, "drawn once"),
        ("images", {"synthetic_kind": "leaves+statistics"}, "statistics stands alone"),
    ],
)
def test_what_can_not_be_made(source, name, options, words):
    with pytest.raises(UsageError) as refused:
        otfuse_cli.merge(
            *pair(source, name),
            arch=f"{source}:{name}",
            synthetic=True,
            num_samples=30,
            **options,
        )
    assert words in f"{refused.value.what} {refused.value.why}"
    assert refused.value.exit_code == 2
