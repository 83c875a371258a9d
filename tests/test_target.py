"""What a refit aims at where an anchor's unit stands beside a mean of several source units."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import otfuse_cli
from kept_traces import kept_graphs, kept_programs
from nets import Mlp, randomise, state
from otfuse_cli.fusion.lockstep import Lockstep, Parent
from otfuse_cli.fusion.target import mean_target
from otfuse_cli.graph.analysis.fit_targets import fits
from otfuse_cli.graph.trace import from_module
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.matching.alignment import Alignment
from otfuse_cli.running.samples import Samples
from otfuse_cli.transport.maps import Coupling, Map, Permutation
from otfuse_cli.transport.plan import Plan
from test_twins import widened

pytestmark = pytest.mark.usefixtures("kept_graphs")
export = kept_programs(from_module.export)
trace = kept_graphs(from_module.trace)

COUNT, WIDE, NARROW = 40, 12, 4


class Words(nn.Module):
    """Linear layers at every position of a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


NETS = {
    "linear": (lambda w: nn.Sequential(nn.Linear(6, w), nn.ReLU(), nn.Linear(w, 3)), (6,)),
    "words": (Words, (7, 5)),
    "conv": (
        lambda w: nn.Sequential(
            nn.Conv2d(3, w, 3), nn.ReLU(), nn.Flatten(), nn.Linear(w * 16, 3)
        ),
        (3, 6, 6),
    ),
    "signal": (
        lambda w: nn.Sequential(nn.Conv1d(2, w, 3), nn.ReLU(), nn.Conv1d(w, 3, 3)), (2, 9)
    ),
    "norm": (
        lambda w: nn.Sequential(
            nn.Conv2d(3, w, 3), nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w, 3, 1)
        ),
        (3, 6, 6),
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", NETS)


def targets(name, source, anchor, map: Map, shares=None, weights=(0.7, 0.3)):
    """Of the first layer: what is aimed at, and the parents' own values on the anchor's units."""
    x = torch.randn(COUNT, *NETS[name][1], generator=torch.Generator().manual_seed(3))
    parents = []
    for net, weight in zip((anchor, source), weights, strict=True):
        program = labelled_program(export(net, (x,)), batch=COUNT)
        graph = trace(net, (x,), {}, source="here")
        parents.append(Parent(program, state(net), weight, graph))
    space = next(iter(parents[0].graph.free())).id
    alignment = Alignment({space: map}, shares={space: shares} if shares else {})
    both = [parents[0], replace(parents[1], alignment=alignment)]
    fit = fits(both[0].program)[0][0]
    lockstep = Lockstep(
        both, both[0].program, dict(both[0].tensors), Samples((x,)), device="cpu",
        keep=frozenset([fit.target]), most_bytes=1 << 30,
    )  # fmt: skip
    aim = mean_target(lockstep, fit.target, fit.layer.node)
    (stop,) = lockstep.stops([fit.target], fit.layer.node)
    own, other = (walk[fit.target] for walk in stop.parents)
    axis = own.dim() - 1 if name in ("linear", "words") else 1
    return aim(fit.target, both, stop.parents), own, map.produce(other, axis)


def network(name: str, width: int, seed: int) -> nn.Module:
    return randomise(NETS[name][0](width), seed)


def spread() -> Coupling:
    """Three source units beside every anchor's."""
    plan = torch.eye(NARROW).repeat_interleave(WIDE // NARROW, 0).double() / WIDE
    return Coupling(Plan.from_dense(plan))


@pytest.mark.quick_cases("linear")
@EVERY
def test_scale_and_place_of_the_source_do_not_matter(name):
    source, anchor = network(name, WIDE, 0), network(name, NARROW, 1)
    first = targets(name, source, anchor, spread())[0]
    kinds = nn.BatchNorm2d if name == "norm" else nn.Linear | nn.Conv1d | nn.Conv2d
    made = next(m for m in source.modules() if isinstance(m, kinds))
    with torch.no_grad():
        made.weight.mul_(30)
        made.bias.mul_(30).add_(11)
    again = targets(name, source, anchor, spread())[0]
    torch.testing.assert_close(again, first, rtol=1e-3, atol=1e-4)


@pytest.mark.quick_cases("linear")
@EVERY
def test_what_has_nothing_to_do_with_a_unit_hardly_enters_its_target(name):
    source, anchor = network(name, WIDE, 0), network(name, NARROW, 1)
    target, own, other = targets(name, source, anchor, spread(), shares=NARROW / WIDE)
    plain = 0.3 * (other - own)
    assert float((target - own).norm()) < 0.2 * float(plain.norm())


@pytest.mark.quick_cases("linear", "norm")
@EVERY
def test_what_both_compute_is_averaged(name):
    """Of duplicates of the anchor's units, each with a little of its own."""
    anchor = network(name, NARROW, 1)
    source = network(name, WIDE, 1)
    with torch.no_grad():
        for part, tensor in source.state_dict().items():
            whole = anchor.state_dict()[part]
            if tensor.dim() and tensor.shape[0] == WIDE:
                tensor.copy_(whole.repeat_interleave(WIDE // NARROW, 0))
        weight = next(source.parameters())
        weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    target, own, other = targets(name, source, anchor, spread())
    mean = own + 0.3 * (other - own)
    assert float((target - mean).norm()) < 0.45 * float((mean - own).norm()) + 1e-6


@pytest.mark.quick_cases("weights0-linear", "weights1-linear")
@EVERY
@pytest.mark.parametrize("weights", [(0.7, 0.3), (0.0, 1.0)])
def test_units_onto_units_and_an_anchor_without_a_share_are_plain_means(name, weights):
    anchor = network(name, NARROW, 1)
    turn = Permutation(torch.tensor([2, 0, 3, 1]))
    maps = [turn] if weights[0] else [turn, spread()]
    for map in maps:
        wide = network(name, map.sizes[0], 0)
        target, own, other = targets(name, wide, anchor, map, weights=weights)
        torch.testing.assert_close(target, own + weights[1] * (other - own))


@pytest.mark.slow
def test_a_widened_twin_changes_nothing():
    narrow = state(randomise(Mlp(), 4))
    x = torch.randn(60, 12, generator=torch.Generator().manual_seed(0))
    fused, report = otfuse_cli.merge(widened(narrow), narrow, arch="mlp", samples=x)
    assert report.steps[-1].agreement == 1
    for name, tensor in narrow.items():
        torch.testing.assert_close(fused[name], tensor, rtol=1e-4, atol=1e-5)
