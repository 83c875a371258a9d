"""Recurrent networks: a weight that reads the units that it makes, at equal and other widths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import otfuse_cli
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running.relabel import draw_maps, relabel_state

pytestmark = pytest.mark.usefixtures("kept_graphs")

KINDS = [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, False), (nn.GRU, True), (nn.RNN, False)]


class Net(nn.Module):
    def __init__(self, width, kind, both):
        super().__init__()
        self.rnn = kind(5, width, batch_first=True, bidirectional=both)
        self.fc = nn.Linear(width * (1 + both), 3)

    def forward(self, x):
        return self.fc(self.rnn(x)[0][:, -1])


def made(width, kind, both, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(width, kind, both), torch.randn(2, 4, 5)


@pytest.mark.quick_cases("widths0-GRU-False")
@pytest.mark.parametrize(("kind", "both"), KINDS)
@pytest.mark.parametrize("widths", [(7, 4), (4, 7)])
def test_other_widths_merge(kind, both, widths):
    source, anchor = (made(w, kind, both, seed)[0] for seed, w in enumerate(widths))
    fused, report = otfuse_cli.merge(
        source, anchor, arch=lambda: made(widths[1], kind, both), matcher="sweep"
    )
    assert report.checks.function == "kept"
    anchor.load_state_dict(fused)
    assert any("weight_hh" in layer.name or layer.name == "rnn" for layer in report.layers)


@pytest.mark.quick_cases("RNN-False")
@pytest.mark.parametrize(("kind", "both"), KINDS)
def test_every_layer_of_a_permuted_twin_costs_nothing(kind, both):
    net, x = made(6, kind, both)
    graph = trace(net, (x,), {}, source="net")
    maps = draw_maps(graph, torch.Generator().manual_seed(0))
    twin = relabel_state(net.state_dict(), graph, maps)
    _, report = otfuse_cli.merge(twin, net, arch=lambda: made(6, kind, both), matcher="sweep")
    for layer in report.layers:
        assert layer.ot_cost is None or layer.ot_cost < 1e-3, layer


class Stacked(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(5, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.rnn(x)[0][:, -1])


def test_a_second_layer_reads_both_directions_of_the_first():
    net = Stacked(nn.GRU)
    graph = trace(net, (torch.randn(2, 4, 5),), {}, source="net")
    forward, backward = (
        str(graph.tensors[f"rnn.weight_hh_l0{way}"].axes[1].expr) for way in ("", "_reverse")
    )
    for way in ("", "_reverse"):
        read = str(graph.tensors[f"rnn.weight_ih_l1{way}"].axes[1].expr)
        assert read == f"{forward} + {backward}"
