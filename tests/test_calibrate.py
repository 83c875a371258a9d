"""Calibration at its oracles: torch's running statistics, the parents' moments, the identity."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import otfuse_cli
from nets import Mlp, ResNet, randomise, state
from otfuse_cli.fusion.calibrate import re_estimate, rescale
from otfuse_cli.fusion.lockstep import Parent
from otfuse_cli.graph.analysis.fit_targets import fits
from otfuse_cli.running.architecture import architecture
from otfuse_cli.running.execute import Walk, flat_inputs
from otfuse_cli.running.runnable import runnable
from otfuse_cli.running.samples import Samples
from otfuse_cli.runtime import Runtime

pytestmark = pytest.mark.usefixtures("kept_graphs")

RUNTIME = Runtime("cpu", 0)
MUCH, NOTHING = 1 << 30, 0
COUNT = 48


def chain():
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 5, 3, stride=2), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(),
        nn.Linear(45, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 4),
    )  # fmt: skip
    return net, torch.zeros(4, 3, 8, 8)


def plain():
    """Biases everywhere but in the second layer."""
    net = nn.Sequential(
        nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8, bias=False), nn.ReLU(), nn.Linear(8, 4)
    )
    return net, torch.zeros(4, 12)


def residual():
    return ResNet((6, 6, 9)), torch.zeros(4, 3, 8, 8)


NETS = {"chain": chain, "plain": plain, "residual": residual}


def tensors(name, seed):
    return {n: t.clone() for n, t in state(randomise(NETS[name]()[0], seed)).items()}


def inputs(name, seed=11):
    shape = NETS[name]()[1].shape[1:]
    return torch.randn(COUNT, *shape, generator=torch.Generator().manual_seed(seed)) * 1.5 + 0.3


def running(name, batch=20):
    """A program, its graph and samples; 48 samples are no multiple of its batch."""
    samples = Samples((inputs(name),))
    shapes = {n: tuple(t.shape) for n, t in tensors(name, 0).items()}
    known = architecture(f"{__name__}:{name}", shapes)
    return runnable(known, samples, device="cpu", batch=batch), known.graph, samples


@pytest.mark.slow
@pytest.mark.parametrize("most", [MUCH, NOTHING], ids=["held", "reached anew"])
@pytest.mark.parametrize("name", ["chain", "residual"])
def test_batch_norm_is_torchs_running_estimate(name, most):
    program, _, samples = running(name)
    fused = tensors(name, 1)
    net = copy.deepcopy(NETS[name]()[0])
    net.load_state_dict(fused)
    before = {n: t.clone() for n, t in fused.items()}
    assert re_estimate(program, fused, samples, runtime=RUNTIME, most_bytes=most)
    # A cumulative average over one batch of everything is its mean and unbiased variance, and in
    # train mode each layer sees what earlier ones make of the new statistics.
    rows = {}
    for path, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.reset_running_stats()
            module.momentum = None
            module.register_forward_hook(
                lambda m, args, out, path=path: rows.__setitem__(path, out.numel() // out.shape[1])
            )
    with torch.no_grad():
        net.train()(inputs(name))
    assert rows
    for path, n in rows.items():
        own = net.get_submodule(path)
        torch.testing.assert_close(
            fused[f"{path}.running_mean"], own.running_mean, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            fused[f"{path}.running_var"], own.running_var * (n - 1) / n, rtol=1e-4, atol=1e-5
        )
    for tensor, value in before.items():
        assert torch.equal(fused[tensor], value) is not ("running" in tensor), tensor


def moments(program, state, samples, node):
    walk_rows = []
    for batch in samples.batches(program.batch):
        value = Walk(program, state, flat_inputs(program, batch, "cpu")).to(node)
        value = value[: batch.count]
        walk_rows.append(value.movedim(1, -1).flatten(0, -2).double())
    rows = torch.cat(walk_rows)
    return rows.mean(0), rows.std(0, correction=0)


@pytest.mark.slow
@pytest.mark.parametrize("most", [MUCH, NOTHING], ids=["held", "reached anew"])
@pytest.mark.parametrize("name", NETS)
def test_repair_gives_every_layer_the_parents_mean_and_deviation(name, most):
    program, graph, samples = running(name)
    shares, states = (0.3, 0.7), [tensors(name, seed) for seed in (1, 2)]
    parents = [Parent(program, s, w, graph) for s, w in zip(states, shares, strict=True)]
    fused = {
        n: t if not t.is_floating_point() else shares[0] * t + shares[1] * states[1][n]
        for n, t in states[0].items()
    }
    last = {n: fused[n].clone() for n in list(fused)[-2:]}
    assert rescale(parents, program, fused, samples, runtime=RUNTIME, most_bytes=most)
    checked = 0
    for fit in fits(program)[0]:
        node = fit.norm.node if fit.norm is not None else fit.layer.node
        if node in program.outputs:
            continue
        theirs = [moments(program, s, samples, node) for s in states]
        mean, deviation = (
            sum(w * m[at] for w, m in zip(shares, theirs, strict=True)) for at in (0, 1)
        )
        own = moments(program, fused, samples, node)
        torch.testing.assert_close(own[1], deviation, rtol=1e-3, atol=1e-4)
        if fit.norm is not None or fit.layer.bias is not None:
            torch.testing.assert_close(own[0], mean, rtol=1e-3, atol=1e-3)
        else:
            assert not torch.allclose(own[0], mean, atol=1e-3)  # nothing to shift it with
        checked += 1
    assert checked == len(fits(program)[0]) - 1
    for tensor, value in last.items():
        assert torch.equal(fused[tensor], value)


@pytest.mark.quick_cases("plain")
@pytest.mark.parametrize("name", ["plain", "residual"])
def test_identical_parents_are_left_as_they_are(name):
    program, graph, samples = running(name)
    own = tensors(name, 3)
    parents = [Parent(program, own, 0.5, graph)] * 2
    fused = {n: t.clone() for n, t in own.items()}
    rescale(parents, program, fused, samples, runtime=RUNTIME, most_bytes=MUCH)
    for tensor, value in own.items():
        torch.testing.assert_close(fused[tensor], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["repair", "auto"])
def test_a_merge_of_identical_parents_keeps_their_bytes(kind):
    """No calibration agrees with the parents better than they do: none is kept."""
    own = state(randomise(Mlp(), 4))
    data = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    fused, report = otfuse_cli.merge(
        own, own, arch="mlp", samples={"x": data}, refit=False, calibrate=kind
    )
    for tensor, value in own.items():
        assert torch.equal(fused[tensor], value), tensor
    assert [step.kept for step in report.steps[1:]] == [False] * (len(report.steps) - 1)


@pytest.mark.slow
def test_what_is_left_alone_stays():
    program, graph, samples = running("chain")
    states = [tensors("chain", seed) for seed in (1, 2)]
    parents = [Parent(program, s, 0.5, graph) for s in states]
    for left in ("1.running_var", "0.weight"):
        fused = {n: t.clone() for n, t in states[0].items()}
        more = {"left": frozenset([left]), "runtime": RUNTIME, "most_bytes": MUCH}
        rescale(parents, program, fused, samples, **more)
        assert torch.equal(fused[left], states[0][left])
        assert not torch.equal(fused["3.weight"], states[0]["3.weight"]) or not torch.equal(
            fused["4.weight"], states[0]["4.weight"]
        )
    fused = {n: t.clone() for n, t in states[0].items()}
    re_estimate(
        program, fused, samples, left=frozenset(["1.running_var"]), runtime=RUNTIME, most_bytes=MUCH
    )
    assert torch.equal(fused["1.running_mean"], states[0]["1.running_mean"])
    assert not torch.equal(fused["4.running_mean"], states[0]["4.running_mean"])
