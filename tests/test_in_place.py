"""Networks that write in place: the program without the writes computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from otfuse_cli.graph.trace import from_module
from otfuse_cli.graph.trace.in_place import write_apart


class Net(nn.Module):
    def __init__(self, way) -> None:
        super().__init__()
        self.way = way
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.way(self, x)


def activation(net, x):
    return net.two(F.relu(net.norm(net.one(x)), inplace=True))


def read_afterwards(net, x):
    made = net.one(x)
    early = F.silu(net.norm(made))
    made.add_(early)
    return net.two(made) + made.sigmoid_() * early


def read_before(net, x):
    made = net.one(x)
    early = net.two(made)
    F.hardswish(made, inplace=True)
    return early * made + early.mul_(2.0)


def clamped(net, x):
    return net.two(net.one(x).clamp_(-0.1, 0.1)).sub_(0.5).abs()


def through_a_view(net, x):
    made = net.one(x)
    F.relu(made.flatten(2), inplace=True)
    return net.two(made)


def viewed_before(net, x):
    made = net.one(x)
    early = made.flatten(2)
    F.relu(made, inplace=True)
    return net.two(made) + early.mean()


def through_a_dropout(net, x):
    made = net.one(x)
    F.relu(F.dropout(made, 0.5, net.training), inplace=True)
    return net.two(made)


def the_input(net, x):
    x += 1
    return net.one(x) + net.one(x.clone().relu_())


def dropped(net, x):
    flat = net.one(x).flatten(2)
    return F.dropout(flat, 0.5, net.training, inplace=True).mean(2) + flat.sum(2)


def reshaped(net, x):
    made = net.one(x)
    flat = net.two(F.relu(made, inplace=True)).flatten(2)
    return flat.reshape_as(made) * made


def returned(net, x):
    made = net.one(x)
    out = net.two(made)
    made.relu_()
    return out, made


SIMPLE = (activation, read_afterwards, read_before, clamped, dropped, reshaped, returned)
OTHERS = (through_a_view, viewed_before, through_a_dropout, the_input)


@pytest.mark.parametrize("way", [*SIMPLE, *OTHERS])
def test_the_program_computes_what_the_module_does(way):
    torch.manual_seed(0)
    net = Net(way).eval()
    program = from_module.export(net, (torch.randn(2, 3, 6, 6),))
    write_apart(program)
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x.clone()), net(x.clone()))


@pytest.mark.parametrize("way", SIMPLE)
def test_simple_writes_need_no_second_pass_of_torch(way, monkeypatch):
    program = from_module.export(Net(way), (torch.randn(2, 3, 6, 6),))
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", pytest.fail)
    from_module.functional(program)


@pytest.mark.quick_cases("activation")
@pytest.mark.parametrize("way", SIMPLE)
def test_the_graph_is_that_of_torchs_own_way(way, monkeypatch):
    example = (torch.randn(2, 3, 6, 6),)
    graph = from_module.trace(Net(way), example)
    monkeypatch.setattr(from_module, "write_apart", lambda program: None)
    torchs = from_module.trace(Net(way), example)
    assert graph.tensors == torchs.tensors
    assert graph.spaces == torchs.spaces


@pytest.mark.parametrize("way", OTHERS)
def test_others_are_left_to_torch(way):
    program = from_module.export(Net(way), (torch.randn(2, 3, 6, 6),))
    write_apart(program)
    written = [
        n for n in program.graph.nodes if "relu_" in str(n.target) or "add_" in str(n.target)
    ]
    assert written
