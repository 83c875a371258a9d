"""Everything on another device: what the CPU gives, bit for bit, and no mixture on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import nets
import otfuse_cli
import test_joint
from conftest import ROOT
from nets import from_factory as build
from otfuse_cli.commands import evaluate, inspect, prune
from otfuse_cli.federated.federation import Federation
from otfuse_cli.federated.updates import Update
from otfuse_cli.fusion.pivoted_cholesky import choose_pivots
from otfuse_cli.fusion.ridge import Ridge
from otfuse_cli.fusion.stream_choice import choose_heads, choose_units
from otfuse_cli.matching.matchers import orthogonal
from otfuse_cli.matching.matchers.descent import movable
from otfuse_cli.matching.matchers.frank_wolfe import relax
from otfuse_cli.matching.matchers.sweep import sweep
from otfuse_cli.matching.similarity import Similarity
from otfuse_cli.requests.recipe import Recipe
from otfuse_cli.runtime import Runtime
from otfuse_cli.session import far_workers
from otfuse_cli.transport.solve import maximise, solve
from other_device import Elsewhere, other_device, transfers
from test_matchers import EVERY, models

ALONE = "OTFUSE_TEST_ALONE"  # in the environment of a test that runs alone
STATES = [
    nets.state(nets.randomise(nets.Vgg(widths), at))
    for at, widths in enumerate(((6, 8, 7), (6, 8, 7), (5, 9, 7)))
]
MATCHED = {
    **{matcher: {"matcher": matcher} for matcher in EVERY},
    "by norm": {"matcher": "descent", "mass": "norm"},
    "sinkhorn": {"matcher": "sweep", "solver": "sinkhorn", "epsilon": 1.0},
    "paper": {"paper": True},
    "cosine": {"matcher": "sweep", "unit_norm": False, "metric": "cosine"},
}
WITH_INPUTS = {
    "refit": {"blend": "average", "matcher": "sweep"},
    "joint": {"blend": "joint", "matcher": "sweep"},
    "the best": {},
    "calibration": {"refit": False, "calibrate": "auto", "matcher": "sweep"},
    "activations": {"align": "acts", "mass": "importance", "blend": "average"},
    "statistics": {"synthetic": True, "synthetic_kind": "statistics", "synthetic_steps": 4},
    "wider": {"width": 1.5, "matcher": "sweep"},
    "classes": {"synthetic": True, "synthetic_kind": "class", "synthetic_steps": 2},
}


@pytest.fixture
def device(monkeypatch):
    """The other device, which verbs take for `cuda`."""
    name = other_device()
    for verb in (far_workers, evaluate, inspect, prune):
        monkeypatch.setattr(verb, "resolve_device", {"cpu": "cpu", "cuda": name}.__getitem__)
    return name


def on_both(verb, *models, **options):
    """What a verb gives on the CPU and on the other device; that it is one has to be seen."""
    here, _ = verb(*models, device="cpu", **options)
    with transfers() as waits:
        there, _ = verb(*models, device="cuda", **options)
    assert waits, "nothing came from the other device"
    return here, there


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def run_alone(test):
    """A test in a process of its own: autograd counts devices at the first backward pass of one."""
    kept = {n: value for n, value in os.environ.items() if not n.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        command, cwd=ROOT, env=kept | {ALONE: "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "1 passed" in done.stdout


def pair(make):
    return [nets.state(nets.randomise(make(), seed)) for seed in (0, 1)]


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(test_joint.NET.format(stream=6, inner=5))
    return f"{path}:net"


@pytest.fixture
def parents(factory):
    return [dict(build(factory, seed).state_dict()) for seed in (0, 1)]


def test_the_device_refuses_what_cuda_does():
    there, here = torch.ones(2, 2, device=other_device()), torch.ones(2, 2)
    for mixed in (
        lambda: there + here,
        lambda: there @ here,
        lambda: here[torch.zeros(1, dtype=torch.int64, device=there.device)],
        lambda: there.index_select(0, torch.zeros(1, dtype=torch.int64)),
        lambda: torch.where(there > 0, there, here),
        lambda: there.index_put_((torch.zeros(1, dtype=torch.int64),), here[:1]),
        lambda: np.asarray(there),
        lambda: there.numpy(),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            mixed()
    assert isinstance(there * torch.tensor(2.0), Elsewhere)
    assert isinstance(there[torch.tensor([0])], Elsewhere)
    assert type(there.cpu()) is torch.Tensor


def test_what_makes_the_host_wait_is_counted():
    there = torch.ones(4, device=other_device())
    with transfers() as waits:
        there.mul_(2).sum()
        assert not waits
        float(there.sum())
        there.cpu()
        there.tolist()
        there.nonzero()
    assert sum(waits.values()) == 4


@pytest.mark.parametrize("options", MATCHED.values(), ids=MATCHED)
@pytest.mark.slow_cases("by norm", "sinkhorn", "frank-wolfe", "descent")
def test_matching(device, options):
    a, b = pair(lambda: nets.Mlp((9, 8, 7, 4)))
    assert equal(*on_both(otfuse_cli.merge, a, b, **options))


@pytest.mark.slow
@pytest.mark.parametrize("matcher", EVERY)
def test_matching_of_a_residual_net(device, matcher):
    a, b = pair(lambda: nets.ResNet((6, 6, 8, 10)))
    assert equal(*on_both(otfuse_cli.merge, a, b, matcher=matcher))


def test_matching_of_other_widths(device):
    (a, _), (_, b) = pair(lambda: nets.Mlp((9, 12, 8, 4))), pair(lambda: nets.Mlp((9, 8, 7, 4)))
    assert equal(*on_both(otfuse_cli.merge, a, b, matcher="descent"))


@pytest.mark.slow
def test_several_models(device):
    a, b = pair(lambda: nets.Mlp((9, 8, 7, 4)))
    c, _ = pair(lambda: nets.Mlp((9, 8, 7, 4)))
    options = {"anchor": "medoid", "passes": 2, "matcher": "sweep"}
    assert equal(*on_both(otfuse_cli.merge, a, b, c, **options))


@pytest.mark.parametrize("options", WITH_INPUTS.values(), ids=WITH_INPUTS)
@pytest.mark.slow
def test_with_inputs(device, factory, parents, options, request):
    if "synthetic" in options and ALONE not in os.environ:
        run_alone(request.node.nodeid)
        return
    if "synthetic" in options:
        options = {"num_samples": 40, "matcher": "sweep", "blend": "average", **options}
    else:
        options = {"samples": test_joint.inputs(60), **options}
    assert equal(*on_both(otfuse_cli.merge, *parents, arch=factory, **options))


def test_a_small_net_with_inputs(device):
    a, b = pair(lambda: nets.Mlp((9, 8, 7, 4)))
    x = torch.randn(60, 9, generator=torch.Generator().manual_seed(0))
    options = {"arch": "mlp", "samples": x, "matcher": "sweep", "blend": "joint"}
    assert equal(*on_both(otfuse_cli.merge, a, b, **options))


@pytest.mark.slow
def test_pruning_with_inputs(device):
    weights = nets.state(nets.Mlp((12, 10, 8, 6, 5)))
    x = torch.randn(80, 12, generator=torch.Generator().manual_seed(0))
    inputs = {"samples": x, "arch": "mlp"}
    options = {"amount": 0.5, "criterion": "reconstruct"}
    pruned, there = on_both(otfuse_cli.prune, weights, **options, **inputs)
    assert equal(pruned, there)
    plain, _ = otfuse_cli.prune(weights, amount=0.5, device="cpu")
    assert equal(*on_both(otfuse_cli.prune_fuse, weights, plain, blend="average", **inputs))


@pytest.mark.slow
def test_measuring(device, factory, parents, tmp_path):
    paths = []
    for at, tensors in enumerate(parents):
        paths.append(tmp_path / f"{at}.safetensors")
        save_file(tensors, paths[-1])
    x, y = test_joint.inputs(60), np.arange(60) % 5
    np.savez(tmp_path / "s.npz", x=x.numpy(), y=y)
    options = {"arch": factory, "samples": tmp_path / "s.npz", "ensemble": True}
    scores = [otfuse_cli.evaluate(*paths, device=d, **options).evaluation for d in ("cpu", "cuda")]
    assert scores[0] == scores[1]
    costs = []
    for d in ("cpu", "cuda"):
        report = otfuse_cli.inspect(*paths, arch=factory, ot_costs=True, device=d)
        costs.append([layer.ot_cost for layer in report.layers])
    assert costs[0] == costs[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_transformers(device, name, tmp_path, monkeypatch):
    """Attention has other kernels there: rounding differs."""
    pytest.importorskip("transformers")
    from test_joint_streams import inputs_for
    from test_orthogonal import folder, tensors_of

    own = [tensors_of(name, seed) for seed in (0, 1)]
    arch = folder(name, tmp_path)
    monkeypatch.setattr(orthogonal, "_MOST_ROUNDS", 2)
    assert equal(*on_both(otfuse_cli.merge, *own, arch=arch, residual="orthogonal"))
    options = {"samples": inputs_for(name, 40), "matcher": "sweep", "blend": "joint"}
    here, there = on_both(otfuse_cli.merge, *own, arch=arch, **options)
    for key in here:
        torch.testing.assert_close(there[key], here[key], rtol=1e-3, atol=1e-3)


def test_an_assignment_takes_one_transfer():
    cost = torch.rand(9, 9, generator=torch.Generator().manual_seed(0))
    there = cost.to(other_device())
    for find in (maximise, solve, lambda c: maximise(c, proved=False)):
        with transfers() as waits:
            find(there)
        assert sum(waits.values()) == 1


def test_frank_wolfe_waits_for_assignments_and_lengths_of_steps(device):
    a, b = pair(lambda: nets.Mlp((9, 8, 7, 4)))
    source, anchor = (replace(m, device=device) for m in models(a, b))
    work, recipe = Similarity(source, anchor), Recipe()
    start = sweep(source, anchor, recipe, Runtime(device)).alignment
    spaces, steps = movable(work, recipe), []
    with transfers() as waits:
        relax(work, spaces, start, watch=steps.append)
    rounds = len(steps) + 1  # the last one finds no step
    assert waits.at("solve.py") == (rounds + 1) * len(spaces)
    assert waits.at("frank_wolfe.py") <= 2 * rounds
    assert waits.at("similarity.py") == 1


def test_a_batch_of_a_fit_is_waited_for_once():
    generator = torch.Generator().manual_seed(0)
    x, z, w = (torch.randn(1, *s, generator=generator) for s in ((50, 6), (50, 4), (4, 6)))
    sums = Ridge(w.to(other_device()), None, rows=100)
    with transfers() as waits:
        sums.add(x.to(other_device()), z.to(other_device()))
    assert sum(waits.values()) == 1


def test_choices_are_made_without_waiting():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(90, 24, generator=generator, dtype=torch.float64)
    gram, write = rows.T @ rows, torch.randn(5, 24, generator=generator, dtype=torch.float64)
    share = torch.ones(24, dtype=torch.float64)
    there = [t.to(other_device()) for t in (gram, write, share)]
    with transfers() as waits:
        units = choose_units(*there[:2], 9)
        pivots = choose_pivots(there[0], there[2], 9)
        heads = choose_heads(*there[:2], 6, 2)
    assert sum(waits.values()) == 3  # the indices themselves, the scores of subsets
    assert torch.equal(units.cpu(), choose_units(gram, write, 9))
    assert torch.equal(pivots.cpu(), choose_pivots(gram, share, 9))
    assert heads == choose_heads(gram, write, 6, 2)


def test_a_federation(device):
    """Clients of two widths, new ones and known ones, bit for bit as on the CPU."""
    results = []
    for place in ("cpu", device):
        server = Federation(arch="auto", recipe=Recipe(passes=2), runtime=Runtime(place))
        updates = [Update(n, s, 1.0 + n, sent=False) for n, s in enumerate(STATES)]
        with transfers() as waits:
            first = server.fuse(STATES[0], updates)
        assert bool(waits) == (place == device)
        server.meet(7, {n: tuple(t.shape) for n, t in STATES[2].items()}, first.tensors)
        sent = {n: server.carry(n, first.tensors) for n in (0, 1, 2, 7)}
        second = server.fuse(first.tensors, [Update(n, s, 1.0) for n, s in sent.items()])
        assert first.matched == (0, 1, 2)
        assert second.matched == ()
        results.append([first.tensors, second.tensors, *sent.values()])
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
        assert all(tensor.device.type == "cpu" for tensor in other.values())
