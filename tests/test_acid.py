"""The acid test where rounding is large by itself: neither a false alarm nor a blind eye."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from otfuse_cli.errors import IncompatibleModels
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running.acid import acid_test
from otfuse_cli.running.precision import EXACT


class Chaos(nn.Module):
    """Each step of the logistic map doubles a difference."""

    def __init__(self, steps) -> None:
        super().__init__()
        self.steps = steps
        self.one, self.two = nn.Linear(6, 512), nn.Linear(512, 3)

    def forward(self, x):
        y = torch.sigmoid(self.two(torch.tanh(self.one(x))))
        for _ in range(self.steps):
            y = 4 * y * (1 - y)
        return y


class Tied(nn.Module):
    """What is larger of two equal sums is a matter of rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 64)

    def forward(self, x):
        h = self.one(x)
        return torch.sign(h.sum(1) - 3 * (h / 3).sum(1))


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


def result(net, graph=None):
    torch.manual_seed(0)
    net = net.double()
    return acid_test(net, (X,), None, graph or trace(net, (X.double(),)), seed=0, draws=3)


@pytest.mark.slow
def test_rounding_that_a_network_enlarges_is_allowed():
    outcome = result(Chaos(19))
    assert outcome.max_error > EXACT
    assert outcome.passed
    assert outcome.threshold <= 1e-8


def test_a_usual_network_is_allowed_no_more_than_ever():
    assert result(Chaos(1)).threshold == EXACT


def test_a_wrong_graph_of_such_a_network_does_not_pass():
    net = Chaos(19).double()
    graph = trace(net, (X.double(),))
    tensors = dict(graph.tensors)
    bias = tensors["one.bias"]
    tensors["one.bias"] = replace(bias, axes=tensors["two.bias"].axes)
    wrong = replace(graph, tensors=tensors)
    assert not result(net, wrong).passed


def test_outputs_that_jump_on_rounding_tell_nothing():
    with pytest.raises(IncompatibleModels, match="nothing can be told"):
        result(Tied())
