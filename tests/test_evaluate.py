"""`eval`: measured numbers against ones computed by hand, and one message for each wrong input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import otfuse_cli
from nets import state
from otfuse_cli.errors import UsageError

pytestmark = pytest.mark.usefixtures("kept_graphs")

NET = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*body), torch.rand(2, 2, 4, 4)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, input_ids):
        return {"logits": self.head(self.words(input_ids).tanh())}

def words():
    return Words(), {"input_ids": torch.zeros(2, 5, dtype=torch.long)}

def samples():
    print("a word of the loader")
    g = torch.Generator().manual_seed(1)
    return torch.randn(30, 2, 4, 4, generator=g), torch.arange(30) % 3
"""


def conv_net():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Two convolutional nets, a factory, and labelled samples, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    for name in "ab":
        save_file(state(conv_net()), tmp_path / f"{name}.safetensors")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 2, 4, 4)).astype(np.float32), rng.integers(3, size=30)
    np.savez(tmp_path / "s.npz", x=x, y=y)
    return tmp_path


LINE = ("--arch", "net.py:net", "--samples", "s.npz")


def by_hand(path, samples):
    from safetensors.torch import load_file

    net = conv_net()
    net.load_state_dict(load_file(path))
    with torch.no_grad():
        return net(torch.tensor(samples["x"]))


def measured(logits, labels):
    accuracy = 100 * (logits.argmax(1) == labels).double().mean().item()
    return accuracy, F.cross_entropy(logits, labels).item()


def test_numbers_are_those_computed_by_hand(cli, work):
    done = cli("eval", "a.safetensors", "b.safetensors", *LINE, "--ensemble", "--average", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["report"]
    data = np.load("s.npz")
    labels = torch.tensor(data["y"])
    a, b = (by_hand(f"{name}.safetensors", data) for name in "ab")
    assert otfuse_cli.merge(
        "a.safetensors", "b.safetensors", align="none", arch="net.py:net", output="mean.safetensors"
    )
    expected = {
        "a.safetensors": a,
        "b.safetensors": b,
        "ensemble (logits)": (a + b) / 2,
        "ensemble (probabilities)": ((a.softmax(1) + b.softmax(1)) / 2).log(),
        "plain average": by_hand("mean.safetensors", data),
    }
    found = report["evaluation"]
    assert list(found) == ["samples", "accuracy", "cross-entropy"]
    assert found["samples"] == 30
    assert list(found["accuracy"]) == list(found["cross-entropy"]) == list(expected)
    for name, logits in expected.items():
        accuracy, loss = measured(logits, labels)
        assert found["accuracy"][name] == pytest.approx(accuracy)
        assert found["cross-entropy"][name] == pytest.approx(loss, rel=1e-5)
    assert report["command"] == "eval"
    assert report["recipe"]["samples"] == "s.npz"
    assert report["warnings"] == []


@pytest.mark.parametrize("options", [(), ("--ensemble",)])
def test_batches_change_nothing(cli, work, options):
    found = []
    for batch in (7, 1000):
        done = cli(
            "eval", "a.safetensors", "b.safetensors", *LINE, *options, "--batch", batch, "--json"
        )
        found.append(json.loads(done.out)["report"]["evaluation"])
    assert found[0]["accuracy"] == found[1]["accuracy"]
    assert found[0]["cross-entropy"] == pytest.approx(found[1]["cross-entropy"], rel=1e-6)


def test_samples_are_drawn_by_seed_and_loaders_run(cli, work):
    line = ("eval", "a.safetensors", "--arch", "net.py:net", "--json", "--num-samples", 10)
    runs = [cli(*line, "--samples", "net.py:samples", "--seed", seed) for seed in (0, 0, 1)]
    losses = [json.loads(r.out)["report"]["evaluation"]["cross-entropy"] for r in runs]
    assert losses[0] == losses[1] != losses[2]
    assert json.loads(runs[0].out)["report"]["evaluation"]["samples"] == 10


def test_the_table_has_a_line_for_each_model(cli, work):
    done = cli("eval", "a.safetensors", "a.safetensors", *LINE)
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert ["accuracy", "cross-entropy"] in lines
    assert sum(line[:1] == ["a.safetensors"] for line in lines) == 2
    assert "a.safetensors (2)" in done.out


@pytest.mark.slow
def test_a_program_and_other_widths(cli, work):
    torch.export.save(torch.export.export(conv_net(), (torch.rand(4, 2, 4, 4),)), work / "net.pt2")
    done = cli("eval", "a.safetensors", "--arch", "net.pt2", "--samples", "s.npz", "--json")
    same = cli("eval", "a.safetensors", *LINE, "--json")
    assert done.code == 0, done.err
    one, other = (json.loads(r.out)["report"]["evaluation"] for r in (done, same))
    assert one["accuracy"] == other["accuracy"]
    assert one["cross-entropy"] == pytest.approx(other["cross-entropy"], rel=1e-5)
    wide = nn.Sequential(nn.Conv2d(2, 7, 3), nn.Tanh(), nn.Flatten(), nn.Linear(28, 3))
    save_file(state(wide), work / "wide.safetensors")
    assert cli("eval", "a.safetensors", "wide.safetensors", *LINE, "--ensemble").code == 0


def test_an_mlp_needs_no_code(cli, work):
    mlp = nn.Sequential(nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 3))
    torch.save(mlp.state_dict(), work / "mlp.pt")
    done = cli("eval", "mlp.pt", "--arch", "mlp", "--samples", "s.npz", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["report"]
    data = np.load("s.npz")
    with torch.no_grad():
        logits = mlp(torch.tensor(data["x"]).flatten(1))
    accuracy, loss = measured(logits, torch.tensor(data["y"]))
    assert report["evaluation"]["accuracy"]["mlp.pt"] == pytest.approx(accuracy)
    assert report["evaluation"]["cross-entropy"]["mlp.pt"] == pytest.approx(loss, rel=1e-5)
    assert report["warnings"] == []
    assumed = json.loads(cli("eval", "mlp.pt", "--samples", "s.npz", "--json").out)["report"]
    assert assumed["evaluation"] == report["evaluation"]
    assert "--arch mlp" in assumed["warnings"][0]


def test_token_models_have_a_perplexity_without_labels(cli, work):
    namespace = {}
    exec(NET, namespace)
    net = namespace["Words"]()
    torch.save(net.state_dict(), work / "w.pt")
    ids = np.random.default_rng(0).integers(9, size=(20, 6))
    np.savez(work / "ids.npz", input_ids=ids)
    done = cli(
        "eval",
        "w.pt",
        "w.pt",
        "--arch",
        "net.py:words",
        "--samples",
        "ids.npz",
        "--json",
        "--ensemble",
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)["report"]["evaluation"]
    with torch.no_grad():
        logits = net(torch.tensor(ids))["logits"]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(ids)[:, 1:].flatten())
    assert found["cross-entropy"]["w.pt"] == pytest.approx(loss.item(), rel=1e-5)
    for name in ("w.pt", "ensemble (logits)", "ensemble (probabilities)"):
        assert found["perplexity"][name] == pytest.approx(loss.exp().item(), rel=1e-4)


def test_in_memory():
    a, b = (state(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))) for _ in "ab")
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    report = otfuse_cli.evaluate(a, b, samples=(x, y), arch="mlp", average=True)
    assert list(report.evaluation["accuracy"]) == ["state dict 0", "state dict 1", "plain average"]
    assert report.recipe["samples"] == "memory"
    with pytest.raises(UsageError, match="without labels"):
        otfuse_cli.evaluate(a, samples=x, arch="mlp")


def test_outputs_that_overflow_have_no_loss(cli, work):
    huge = {
        n: t * 1e30
        for n, t in state(nn.Sequential(nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 3))).items()
    }
    torch.save(huge, work / "huge.pt")
    done = cli("eval", "huge.pt", "--arch", "mlp", "--samples", "s.npz", "--json")
    report = json.loads(done.out)["report"]
    assert done.code == 0
    assert report["evaluation"]["cross-entropy"] == {"huge.pt": None}
    assert "not finite" in report["warnings"][0]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("a.safetensors --arch net.py:net", 2, ["--samples"]),
        ("--arch net.py:net --samples s.npz", 2, ["CKPT"]),
        ("a.safetensors --arch net.py:net --samples s.npz --ensemble", 2, ["--ensemble", "two"]),
        ("a.safetensors --arch net.py:net --samples s.npz --average", 2, ["--average", "two"]),
        ("a.safetensors --arch net.py:net --samples s.npz --batch 0", 2, ["--batch 0"]),
        ("a.safetensors --arch net.py:net --samples s.npz --num-samples 0", 2, ["--num-samples 0"]),
        (
            "a.safetensors --arch net.yaml --samples s.npz",
            2,
            ["needs a network to run", "file.py:factory"],
        ),
        ("a.safetensors --arch net.py:net --samples none.npz", 3, ["no such file", "none.npz"]),
        ("a.safetensors --arch net.py:net --samples nan.npz", 3, ["NaN", "sample 4"]),
        ("a.safetensors --arch net.py:net --samples last.npz", 2, ["channels come last"]),
        ("a.safetensors --arch net.py:net --samples raw.npz", 2, ["raw pixels", "uint8"]),
        (
            "a.safetensors --arch net.py:net --samples bare.npz",
            2,
            ["without labels", "y or labels"],
        ),
        ("a.safetensors --arch net.py:net --samples many.npz", 2, ["label 3", "3 outputs"]),
        ("a.safetensors --arch net.py:net --samples few.npz", 2, ["different length", "[29]"]),
        ("none.safetensors --arch net.py:net --samples s.npz", 3, ["none.safetensors"]),
        ("a.safetensors deep.safetensors --arch net.py:net --samples s.npz", 4, ["deep"]),
    ],
)
def test_wrong_inputs(cli, work, line, code, words):
    data = dict(np.load("s.npz"))
    nan = data["x"].copy()
    nan[4, 0, 0, 0] = np.nan
    np.savez("nan.npz", x=nan, y=data["y"])
    np.savez("last.npz", x=np.repeat(data["x"], 2, 1).transpose(0, 2, 3, 1)[..., :2], y=data["y"])
    np.savez("raw.npz", x=(data["x"] * 9).astype(np.uint8), y=data["y"])
    np.savez("bare.npz", x=data["x"])
    np.savez("many.npz", x=data["x"], y=np.arange(30) % 4)
    np.savez("few.npz", x=data["x"], y=data["y"][:29])
    (work / "net.yaml").write_text("a <- in: ['0']\nout <- a * 4: ['3']\n")
    (work / "net.yaml").write_text("chain: ['*']\n")
    save_file({**state(conv_net()), "deep.weight": torch.ones(2)}, work / "deep.safetensors")
    done = cli("eval", *line.split())
    assert done.code == code, done.err
    assert done.out == ""
    for word in words:
        assert word in done.err, done.err


def test_a_module_says_the_widths_of_its_checkpoint():
    """A LayerNorm and grouped convolutions hold their width in the module too."""

    class Net(nn.Module):
        def __init__(self, wide=4):
            super().__init__()
            self.stem = nn.Conv2d(3, wide, 1)
            self.depth = nn.Conv2d(wide, wide, 3, groups=wide)
            self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, 2)

        def forward(self, x):
            return self.head(self.norm(self.depth(self.stem(x)).mean((2, 3))))

    torch.manual_seed(0)
    wide, x = Net(6).eval(), torch.randn(20, 3, 5, 5)
    with torch.no_grad():
        y = wide(x).argmax(1)
    report = otfuse_cli.evaluate(
        wide.state_dict(), Net().state_dict(), arch=lambda: (Net(), x[:2]), samples=(x, y)
    )
    assert next(iter(report.evaluation["accuracy"].values())) == 100
