"""`curve`: what lies between two checkpoints, and how far the loss rises there."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import otfuse_cli
from otfuse_cli.commands.curve import barrier
from otfuse_cli.running.evaluation import Score

pytestmark = pytest.mark.usefixtures("kept_graphs")

WEIGHTS = ["0", "0.25", "0.5", "0.75", "1"]


def mlp(*widths):
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@pytest.fixture
def twins(tmp_path, monkeypatch):
    """A net, the same net with its hidden units in another order, and what it says of samples."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    net, twin = mlp(6, 8, 3), mlp(6, 8, 3)
    order = torch.randperm(8)
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.mul_(3)
        twin[0].weight.copy_(net[0].weight[order])
        twin[0].bias.copy_(net[0].bias[order])
        twin[2].weight.copy_(net[2].weight[:, order])
        twin[2].bias.copy_(net[2].bias)
        x = torch.randn(60, 6)
        y = net(x).argmax(1)
    torch.save(net.state_dict(), "a.pt")
    torch.save(twin.state_dict(), "b.pt")
    np.savez("s.npz", x=x.numpy(), y=y.numpy())
    return tmp_path


LINE = ("a.pt", "b.pt", "--arch", "mlp", "--samples", "s.npz", "--steps", "5")


def test_a_twin_is_reached_without_a_barrier(cli, twins):
    done = cli("curve", *LINE, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["report"]
    found = report["evaluation"]
    assert found["samples"] == 60
    assert found["weight of"] == "b.pt"
    for name in ("plain accuracy", "fused accuracy", "plain cross-entropy", "fused cross-entropy"):
        assert list(found[name]) == WEIGHTS
    assert set(found["fused accuracy"].values()) == {100}
    assert found["plain accuracy"]["0"] == found["plain accuracy"]["1"] == 100
    assert found["plain accuracy"]["0.5"] < 100
    assert found["loss barrier"]["fused"] == pytest.approx(0, abs=1e-5)
    assert found["loss barrier"]["plain"] > 0.1
    losses = list(found["plain cross-entropy"].values())
    line = np.linspace(losses[0], losses[-1], 5)
    assert found["loss barrier"]["plain"] == pytest.approx(max(losses - line))
    assert report["checks"]["function"] == "assumed"
    assert report["recipe"]["steps"] == 5
    assert report["spaces"]


@pytest.mark.slow
def test_points_of_the_curve_are_merged_checkpoints(cli, twins):
    torch.manual_seed(5)
    torch.save(mlp(6, 8, 3).state_dict(), "a.pt")
    found = json.loads(cli("curve", *LINE, "--json").out)["report"]["evaluation"]
    for name, options in (("plain", {"align": "none"}), ("fused", {})):
        for weight in (0.25, 0.5, 1.0):
            merged, _ = otfuse_cli.merge(
                "a.pt", "b.pt", weights=(1 - weight, weight), arch="mlp", **options
            )
            report = otfuse_cli.evaluate(merged, samples="s.npz", arch="mlp")
            (loss,) = report.evaluation["cross-entropy"].values()
            assert found[f"{name} cross-entropy"][f"{weight:g}"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_table_and_plots(cli, twins):
    done = cli("curve", *LINE, "--plot", "c.svg")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert ["1", "100.00"] in [line[:2] for line in lines]
    assert "loss barrier" in done.out
    assert "fused accuracy" in done.out
    drawn = (twins / "c.svg").read_text()
    assert "weight of b.pt" in drawn
    assert cli("curve", *LINE, "--plot", "c.svg").code == 6
    assert cli("curve", *LINE, "--plot", "c.svg", "--overwrite").code == 0
    assert (twins / "c.svg").read_text() == drawn
    assert cli("curve", *LINE, "--plot", "c.png").code == 0
    assert (twins / "c.png").read_bytes().startswith(b"\x89PNG")


def test_without_alignment_there_is_one_curve(cli, twins):
    found = json.loads(cli("curve", *LINE, "--align", "none", "--json").out)["report"]["evaluation"]
    assert "plain accuracy" in found
    assert "fused accuracy" not in found
    assert list(found["loss barrier"]) == ["plain"]


def test_other_widths_have_no_plain_average(cli, twins):
    torch.save(mlp(6, 12, 3).state_dict(), "a.pt")
    done = cli("curve", *LINE, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["report"]
    assert list(report["evaluation"]["loss barrier"]) == ["fused"]
    assert any("no plain average" in w for w in report["warnings"])
    assert report["evaluation"]["fused accuracy"]["1"] == 100
    both = cli("curve", *LINE, "--align", "none")
    assert both.code == 4
    assert "width" in both.err


def test_in_memory(twins):
    a, b = (torch.load(f"{name}.pt") for name in "ab")
    data = np.load("s.npz")
    report = otfuse_cli.curve(a, b, samples=dict(data), arch="mlp", steps=2)
    assert report.evaluation["fused accuracy"] == {"0": 100.0, "1": 100.0}


def test_barrier_is_the_rise_above_the_line():
    def points(*losses):
        return {at / (len(losses) - 1): Score(10, 50.0, loss) for at, loss in enumerate(losses)}

    assert barrier(points(1, 2, 3)) == 0
    assert barrier(points(1, 3, 3)) == 1
    assert barrier(points(0, 0, 3)) == 0
    assert barrier(points(1, float("inf"), 3)) is None


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("a.pt --arch mlp --samples s.npz", 2, ["two checkpoints"]),
        ("a.pt b.pt a.pt --arch mlp --samples s.npz", 2, ["two checkpoints", "3"]),
        ("a.pt b.pt --arch mlp", 2, ["--samples"]),
        ("a.pt b.pt --arch mlp --samples s.npz --steps 1", 2, ["--steps 1"]),
        ("a.pt b.pt --arch mlp --samples s.npz --plot c.pdf", 2, ["--plot c.pdf", ".png"]),
        ("a.pt b.pt --arch mlp --samples none.npz", 3, ["none.npz"]),
        ("a.pt b.pt --arch mlp --samples s.npz --beta 2", 2, ["--beta 2"]),
        ("a.pt b.pt --arch mlp --samples s.npz --align acts", 2, ["--align acts", "weights alone"]),
    ],
)
def test_wrong_inputs(cli, twins, line, code, words):
    done = cli("curve", *line.split())
    assert done.code == code, done.err
    assert done.out == ""
    for word in words:
        assert word in done.err, done.err


@pytest.mark.slow
def test_mnist_pair_has_the_shape_of_the_papers_figure(shared):
    with np.load(shared / "data" / "mnist.npz") as data:
        x = (data["x_test"].reshape(10000, -1).astype(np.float32) / 255 - 0.1307) / 0.3081
        y = data["y_test"]
    pair = [shared / "checkpoints" / f"mnist-mlpnet-{at}.checkpoint" for at in (0, 1)]
    report = otfuse_cli.curve(*pair, samples=(x, y.astype(np.int64)), arch="mlp", paper=True)
    plain, fused = (report.evaluation[f"{name} accuracy"] for name in ("plain", "fused"))
    assert round(plain["0"], 2) == round(fused["0"], 2) == 97.72
    assert round(plain["1"], 2) == round(fused["1"], 2) == 97.75
    assert round(plain["0.5"], 2) == 73.84
    assert round(fused["0.5"], 2) == 96.63
    assert min(fused.values()) == fused["0.5"]
    assert report.evaluation["loss barrier"]["plain"] > 1
    assert report.evaluation["loss barrier"]["fused"] < 0.1
    together = otfuse_cli.evaluate(
        *pair, samples=(x, y.astype(np.int64)), arch="mlp", ensemble=True
    )
    assert round(together.evaluation["accuracy"]["ensemble (logits)"], 2) == 97.88
