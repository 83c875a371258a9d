"""BatchNorms behind an activation, on a sum, on a concatenation: repair, refit, calibration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import norm_nets
import otfuse_cli
from kept_traces import kept_graphs, kept_programs
from nets import StateDict, distance, randomise, run, state
from otfuse_cli.fusion.calibrate import re_estimate, rescale
from otfuse_cli.fusion.lockstep import Parent
from otfuse_cli.fusion.repair import plan_repair
from otfuse_cli.graph.analysis.fit_targets import fits, norm_fits
from otfuse_cli.graph.model import LayerGraph
from otfuse_cli.graph.trace import from_module
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.matching.activations import observe
from otfuse_cli.matching.alignment import Alignment
from otfuse_cli.matching.apply import transport
from otfuse_cli.running.execute import Walk
from otfuse_cli.running.samples import Samples
from otfuse_cli.runtime import Runtime
from otfuse_cli.transport.maps import Permutation

pytestmark = pytest.mark.usefixtures("kept_graphs")
export = kept_programs(from_module.export)
trace = kept_graphs(from_module.trace)
SHAPE = (4, 3, 8, 8)
EVERY = pytest.mark.parametrize("name", norm_nets.NETS)


def arch(name: str) -> str:
    return f"norm_nets:narrow_{name.lower()}"


def network(name: str, seed: int, widths: tuple[int, int] = norm_nets.NARROW) -> nn.Module:
    return randomise(norm_nets.NETS[name](widths), seed)


def traced(net: nn.Module) -> LayerGraph:
    return trace(net, (torch.zeros(SHAPE),), {}, source="here")


def inputs(count: int = 60) -> torch.Tensor:
    return torch.randn(count, *SHAPE[1:], generator=torch.Generator().manual_seed(3))


def permuted(net: nn.Module, seed: int = 7) -> StateDict:
    """The same function with the units of every space in another order."""
    graph, generator = traced(net), torch.Generator().manual_seed(seed)
    maps = {s.id: Permutation(torch.randperm(s.size, generator=generator)) for s in graph.free()}
    return {n: transport(t, n, graph, Alignment(maps)) for n, t in state(net).items()}


def statistics(net: nn.Module, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Mean and variance of what every BatchNorm is given."""
    seen = {}

    def look(name: str) -> None:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            dims = [d for d in range(args[0].dim()) if d != 1]
            seen[name] = (args[0].mean(dims), args[0].var(dims, correction=0))

        net.get_submodule(name).register_forward_pre_hook(hook)

    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            look(name)
    with torch.no_grad():
        net(x)
    return seen


@pytest.mark.quick_cases("Signal")
@EVERY
def test_what_feeds_every_norm_is_known(name):
    plan = plan_repair(traced(network(name, 0)))
    norms = [n for n in state(network(name, 0)) if n.endswith("running_var")]
    assert set(plan.feeds) == set(norms)
    assert all(feed.rows for feeds in plan.feeds.values() for feed in feeds)
    assert not [w for w in plan.warnings if "BatchNorm" in w]


def test_an_activation_that_is_not_homogeneous_hides_what_feeds_a_norm():
    class Bent(norm_nets.Behind):
        def forward(self, x):
            x = self.norm1(self.conv1(x).sigmoid())
            return self.head(self.norm2(self.conv2(x).relu()).mean((2, 3)))

    plan = plan_repair(traced(Bent(norm_nets.NARROW).eval()))
    assert set(plan.feeds) == {"norm2.running_var"}
    assert any("norm1: the layer that feeds" in warning for warning in plan.warnings)


@pytest.mark.quick_cases("Signal")
@EVERY
def test_a_permuted_twin_keeps_the_function(name):
    net = network(name, 1)
    fused, _ = otfuse_cli.merge(permuted(net), state(net), weights=(0.2, 0.8), arch=arch(name))
    assert distance(run(net, fused, SHAPE), run(net, state(net), SHAPE)) < 1e-5
    for tensor, own in state(net).items():
        if tensor.endswith("running_var"):
            torch.testing.assert_close(fused[tensor], own, rtol=1e-5, atol=0)


@pytest.mark.quick_cases("Signal-layers4-relu")
@pytest.mark.parametrize(
    ("name", "layers", "through"),
    [
        ("Behind", ("conv1",), torch.relu),
        ("Sum", ("near", "far"), torch.relu),
        ("Before", ("stem",), lambda z: z),
        ("Dense", ("stem",), lambda z: z),
        ("Signal", ("conv1",), torch.relu),
    ],
)
def test_white_inputs_have_the_variance_that_is_written(name, layers, through):
    """Monte Carlo, for norms that stand behind the first layers; parents of unlike scales."""
    nets = [network(name, seed) for seed in (0, 1)]
    norm = "norm0" if name == "Dense" else "norm1"
    x = torch.randn(4000, 25 * 3, generator=torch.Generator().manual_seed(0))

    def units(tensors: StateDict) -> torch.Tensor:
        rows = [tensors[f"{layer}.weight"].flatten(1) for layer in layers]
        return through(sum(x[:, : r.shape[1]] @ r.T for r in rows))

    states = [state(net) for net in nets]
    for scale, tensors in zip((3.0, 0.5), states, strict=True):
        for layer in layers:
            tensors[f"{layer}.weight"] *= scale
            if f"{layer}.bias" in tensors:
                tensors[f"{layer}.bias"].zero_()
        tensors[f"{norm}.running_var"] = units(tensors).var(0)
    fused, _ = otfuse_cli.merge(*states, arch=arch(name), matcher="sweep")
    plain, _ = otfuse_cli.merge(*states, arch=arch(name), matcher="sweep", repair="none")
    true, written = units(fused).var(0), fused[f"{norm}.running_var"]
    torch.testing.assert_close(written, true, rtol=0.25, atol=0)
    mean = plain[f"{norm}.running_var"]
    assert (written / true).log().abs().mean() < 0.3 * (mean / true).log().abs().mean()


class Again(norm_nets.Before):
    """One BatchNorm reads the stream twice, another once."""

    def forward(self, x):
        x = self.norm1(self.stem(x).relu())
        x = self.norm1(x.relu())
        return self.head(self.norm3(x.relu()).mean((2, 3)))


def unlabelled(net):
    """The program of a network whose axes are not named."""
    return labelled_program(export(net.eval(), (torch.zeros(SHAPE),)), batch=SHAPE[0])


def test_a_norm_that_is_used_twice_has_no_fit():
    assert [fit.name for fit in norm_fits(unlabelled(Again(norm_nets.NARROW)))] == ["norm3"]


@pytest.mark.slow
def test_a_norm_that_belongs_to_a_layer_has_no_fit_of_its_own():
    program = unlabelled(norm_nets.Dense(norm_nets.NARROW))
    assert [fit.norm.tensors["weight"] for fit in fits(program)[0] if fit.norm] == ["norm0.weight"]
    assert [fit.name for fit in norm_fits(program)] == ["norm1", "norm2"]


@pytest.mark.slow
@EVERY
def test_a_network_fused_with_itself_is_left_alone(name):
    tensors = state(network(name, 2))
    fused, report = otfuse_cli.merge(tensors, tensors, arch=arch(name), samples=inputs())
    assert report.refits == ()
    assert all(torch.equal(fused[n], t) for n, t in tensors.items())


@pytest.mark.slow
@EVERY
def test_a_refit_writes_the_statistics_of_what_norms_are_given(name):
    states = [state(network(name, seed)) for seed in (4, 5)]  # a refit is kept that agrees
    fused, report = otfuse_cli.merge(
        *states, arch=arch(name), samples=inputs(), num_samples=60, blend="average"
    )
    net = network(name, 0)
    net.load_state_dict(fused)
    alone = {fit.name for fit in norm_fits(labelled_program(export(net, (inputs(),)), batch=60))}
    fitted = {fit.layer for fit in report.refits}
    for norm, (mean, variance) in statistics(net, inputs()).items():
        torch.testing.assert_close(fused[f"{norm}.running_mean"], mean, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(fused[f"{norm}.running_var"], variance, rtol=1e-3, atol=1e-4)
    assert alone
    assert alone <= fitted
    assert all(fit.after <= fit.before + 1e-9 for fit in report.refits if fit.layer in alone)


@pytest.mark.quick_cases("Signal")
@EVERY
def test_calibration_gives_every_norm_the_statistics_of_what_it_is_given(name):
    net, other, data = network(name, 0), network(name, 1), inputs(48)
    program = labelled_program(export(net, (data,)), batch=48)
    tensors = state(other)
    runtime = Runtime("cpu", 0)
    assert re_estimate(program, tensors, Samples((data,)), runtime=runtime, most_bytes=1 << 30)
    other.load_state_dict(tensors)
    for norm, (mean, variance) in statistics(other, data).items():
        torch.testing.assert_close(tensors[f"{norm}.running_mean"], mean, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(tensors[f"{norm}.running_var"], variance, rtol=1e-3, atol=1e-4)


@pytest.mark.quick_cases("Signal")
@EVERY
def test_rescaling_gives_what_norms_give_the_moments_of_a_lone_parent(name):
    net, other, data = network(name, 0), network(name, 1), inputs(48)
    program = labelled_program(export(net, (data,)), batch=48)
    tensors = state(other)
    parent = Parent(program, state(net), 1.0, traced(net))
    more = {"runtime": Runtime("cpu", 0), "most_bytes": 1 << 30}
    assert rescale([parent], program, tensors, Samples((data,)), **more)
    for fit in norm_fits(program):
        moments = []
        for own in (tensors, parent.tensors):
            value = Walk(program, own, [data]).to(fit.norm.node).movedim(1, 0).flatten(1)
            moments.append(torch.stack([value.mean(1), value.std(1)]))
        alive = moments[0][1] > 0  # a unit that is silent can't be scaled to anything
        assert alive.sum() > 1
        mine, theirs = (m[:, alive] for m in moments)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@EVERY
def test_joint_fusion_with_a_permuted_twin_keeps_the_function(name):
    net = network(name, 3)
    fused, _ = otfuse_cli.merge(
        permuted(net), state(net), arch=arch(name), samples=inputs(120), num_samples=120,
        blend="joint",
    )  # fmt: skip
    assert distance(run(net, fused, SHAPE), run(net, state(net), SHAPE)) < 0.02


@pytest.mark.slow
def test_units_are_seen_behind_the_norm_that_belongs_to_their_activation():
    net = network("Behind", 0)
    data = inputs(10)
    program = labelled_program(export(net, (data,)), batch=10)
    tensors = state(net)
    seen = observe(program, tensors, traced(net), Samples((data,)), device="cpu", post=True, seed=0)
    with torch.no_grad():
        value = net.norm1(net.conv1(data).relu())
    (tap,) = next(taps for taps in seen.values() if taps[0].layer == "conv1")
    torch.testing.assert_close(tap.features_NF, value.movedim(1, 0).flatten(1))
    assert len(fits(program)[0]) == 3
