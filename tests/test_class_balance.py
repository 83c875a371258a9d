"""Leaves of every class: which of too many are kept, and where."""

from __future__ import annotations

import pytest
import torch

import otfuse_cli
from nets import from_factory as build
from otfuse_cli.errors import UsageError
from otfuse_cli.running.class_balance import _of_each, drawn_for
from otfuse_cli.session import open_inputs

pytestmark = pytest.mark.usefixtures("kept_graphs")

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x):
        x = self.conv(x).relu()
        return {result}


def net():
    return Net(), torch.randn(4, 3, 8, 8)
"""
SCORES, IMAGES = "self.head(x.mean((2, 3)))", "self.head(x.movedim(1, -1))"


@pytest.fixture
def arch(tmp_path):
    def write(result):
        path = tmp_path / "net.py"
        path.write_text(NET.format(result=result))
        return f"{path}:net"

    return write


def test_every_class_keeps_its_likeliest_and_none_is_kept_twice():
    likely = torch.tensor([[0.9, 0.8], [0.8, 0.7], [0.1, 0.6], [0.2, 0.5], [0.3, 0.1]])
    assert _of_each(likely, 4).tolist() == [0, 1, 2, 3]
    assert _of_each(likely, 3).tolist() == [0, 1, 2]
    many = torch.randn(400, 7, generator=torch.Generator().manual_seed(0))
    kept = _of_each(many, 100)
    assert len(set(kept.tolist())) == 100
    assert kept.tolist() == sorted(kept.tolist())


def test_large_images_are_drawn_less_often():
    assert drawn_for(2_000, (3, 32, 32)) == 8_000
    assert drawn_for(2_000, (3, 128, 128)) == 2**30 // (4 * 3 * 128**2) == 5_461
    assert drawn_for(2_000, (3, 512, 512)) == 2_000


def fused(arch, monkeypatch, **options):
    """The report, and the inputs that were taken."""
    taken = []
    monkeypatch.setattr(
        "otfuse_cli.session.bench.Bench.__post_init__",
        lambda bench: (
            taken.append(bench.samples),
            setattr(bench, "judged", bench.samples.take(slice(0, 500))),
        )[0],
    )
    states = [build(arch, seed).state_dict() for seed in (0, 1)]
    _, report = otfuse_cli.merge(
        *states, arch=arch, synthetic=True, num_samples=60, blend="average", **options
    )
    return report, states, taken[0]


def test_leaves_of_classifiers_are_balanced(arch, monkeypatch):
    """More of the rarest class than among leaves as they fall."""
    report, states, chosen = fused(arch(SCORES), monkeypatch)
    assert report.recipe["synthetic_kind"] == "balanced"
    assert chosen.count == 60
    plain, _, leaves = fused(arch(SCORES), monkeypatch, synthetic_kind="leaves")
    assert plain.recipe["synthetic_kind"] == "leaves"

    def likelihood(samples):
        """Mean over classes of how likely the 15 likeliest inputs are."""
        total = 0.0
        for state in states:
            net = build(arch(SCORES), 0)
            net.load_state_dict(state)
            with torch.no_grad():
                total = total + net.eval()(samples.args[0]).log_softmax(-1)
        return float(total.topk(15, 0).values.mean())

    assert likelihood(chosen) > likelihood(leaves)


@pytest.mark.slow
def test_leaves_are_as_before_where_nothing_is_a_score(arch, monkeypatch):
    report, _, auto = fused(arch(IMAGES), monkeypatch)
    assert report.recipe["synthetic_kind"] == "auto"
    _, _, leaves = fused(arch(IMAGES), monkeypatch, synthetic_kind="leaves")
    assert torch.equal(auto.args[0], leaves.args[0])


def test_four_times_as_many_are_drawn(arch, monkeypatch):
    drawn = []
    real = open_inputs._inputs

    def watched(*given):
        drawn.append(real(*given))
        return drawn[-1]

    monkeypatch.setattr(open_inputs, "_inputs", watched)
    fused(arch(SCORES), monkeypatch)
    assert [samples.count for samples in drawn] == [60 * 4]


def test_steps_are_for_inputs_that_gradients_move(arch, monkeypatch):
    with pytest.raises(UsageError, match="not moved"):
        fused(arch(SCORES), monkeypatch, synthetic_kind="balanced", synthetic_steps=3)
