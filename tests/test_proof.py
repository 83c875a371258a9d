"""Proven, assumed or refused: what is said of the function, and `--require-proof`."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
from torch import nn

import nets
import otfuse_cli
from otfuse_cli.errors import GateFailed, IncompatibleModels, SolveFailed, UsageError

pytestmark = pytest.mark.usefixtures("kept_graphs")

NETS = '''
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, width), nn.Linear(width, 3)
    def forward(self, x):
        return self.fc2(self.fc1(x).relu())

class Marked(Net):
    """Rules one of its outputs out."""
    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y[:, :1] - float("inf"), y[:, 1:]], 1)

class Steep(Net):
    """Finite for the parents, not for what lies between them."""
    def forward(self, x):
        return super().forward(x) + 1 / self.fc2.bias

def plain(): return Net(), torch.randn(4, 5)
def marked(): return Marked(), torch.randn(4, 5)
def steep(): return Steep(), torch.randn(4, 5)
'''


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, width), nn.Linear(width, 3)


@pytest.fixture
def nets_file(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(textwrap.dedent(NETS))
    return path


@pytest.fixture
def pair(tmp_path):
    paths = []
    for seed, name in enumerate("ab"):
        path = tmp_path / f"{name}.pt"
        torch.save(nets.state(nets.randomise(Net(), seed)), path)
        paths.append(path)
    return paths


SPEC = "layers:\n  fc1: h <- in\n  fc2: out <- h\n"

# arch, and a word of what is then assumed; None: proven
ARCHS = [
    ("auto", "chain"),
    ("mlp", "linear layers"),
    ("spec", "net.yaml"),
    ("net", None),
    ("program", None),
]


def resolve(arch, folder, nets_file):
    if arch == "spec":
        (folder / "net.yaml").write_text(SPEC)
        return str(folder / "net.yaml")
    if arch == "program":
        program = torch.export.export(nets.Mlp((5, 6, 3)).eval(), (torch.randn(4, 5),))
        torch.export.save(program, folder / "graph.pt2")
        return str(folder / "graph.pt2")
    return f"{nets_file}:plain" if arch == "net" else arch


@pytest.mark.slow_cases("program-None")
@pytest.mark.parametrize(("arch", "words"), ARCHS)
def test_what_was_run_decides_the_word(cli, pair, nets_file, tmp_path, arch, words):
    if arch == "program":
        for path, seed in zip(pair, (0, 1), strict=True):
            torch.save(nets.state(nets.randomise(nets.Mlp((5, 6, 3)), seed)), path)
    said = resolve(arch, tmp_path, nets_file)
    run = cli("merge", *pair, "-o", tmp_path / "f.pt", "--arch", said)
    assert run.code == 0, run.err
    checks = json.loads((tmp_path / "f.report.json").read_text())["checks"]
    if words is None:
        assert (checks["function"], checks["assumption"]) == ("kept", None)
        assert checks["max_error"] < 1e-10
        assert "function  kept (error" in run.out
        assert "assumed" not in run.err
        return
    assert checks["function"] == "assumed"
    assert words in checks["assumption"]
    assert f"function  assumed, not proven: {checks['assumption']}" in run.out
    (line,) = [line for line in run.err.splitlines() if line.startswith("assumed: ")]
    assert checks["assumption"] in line
    assert "--arch net.py:make_net" in line


@pytest.mark.slow_cases("net-None")
@pytest.mark.parametrize(("arch", "words"), ARCHS[:4])
def test_proof_is_required_before_anything_is_written(cli, pair, nets_file, tmp_path, arch, words):
    said = resolve(arch, tmp_path, nets_file)
    for command in (
        ("merge", *pair, "-o", tmp_path / "out.pt"),
        ("prune-fuse", *pair, "-o", tmp_path / "out.pt"),
        ("prune", pair[0], "-o", tmp_path / "out.pt", "--amount", "0.5"),
    ):
        before = sorted(tmp_path.iterdir())
        run = cli(*command, "--arch", said, "--require-proof")
        if words is None:
            assert run.code == 0, run.err
            (tmp_path / "out.pt").unlink()
            (tmp_path / "out.report.json").unlink()
            continue
        assert run.code == 7
        assert "not proven (--require-proof)" in run.err
        assert words in run.err
        assert "--arch net.py:make_net" in run.err
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"align": "none"}, "nothing is aligned"),
        ({"weights": (0.0, 1.0)}, "no source was aligned"),
    ],
)
def test_what_is_not_run_is_not_proven(pair, nets_file, options, words):
    with pytest.raises(GateFailed) as raised:
        otfuse_cli.merge(*pair, arch=f"{nets_file}:plain", require_proof=True, **options)
    assert words in raised.value.why


@pytest.mark.parametrize("width", [4, 9])
def test_merged_units_are_proven_on_the_anchor(nets_file, width):
    a, b = (nets.state(nets.randomise(Net(w), s)) for s, w in enumerate((width, 6)))
    _, report = otfuse_cli.merge(a, b, arch=f"{nets_file}:plain", require_proof=True)
    assert report.checks.function == "kept"
    assert report.checks.max_error < 1e-10


def test_a_wrong_graph_of_merged_units_is_refused(nets_file, tmp_path, monkeypatch):
    from otfuse_cli.running import architecture

    (tmp_path / "wrong.yaml").write_text(SPEC)
    (tmp_path / "skip.py").write_text(
        NETS.replace(
            "return self.fc2(self.fc1(x).relu())", "return self.fc2(self.fc1(x).cumsum(1))"
        )
    )
    spec = architecture.layer_graph(
        str(tmp_path / "wrong.yaml"), {n: tuple(t.shape) for n, t in Net().state_dict().items()}
    )
    a, b = (nets.state(nets.randomise(Net(w), s)) for s, w in enumerate((9, 6)))

    def claims(graph, shapes, label):  # a trace with a wrong rule
        return spec

    monkeypatch.setattr(architecture, "_held", claims)
    with pytest.raises(SolveFailed, match="computes something else"):
        otfuse_cli.merge(a, b, arch=f"{tmp_path / 'skip.py'}:plain")


def test_infinities_of_the_parents_are_no_failure(pair, nets_file):
    _, report = otfuse_cli.merge(*pair, arch=f"{nets_file}:marked", matcher="sweep")
    assert any("not finite" in w for w in report.warnings)


@pytest.mark.parametrize("container", [".pt", ".safetensors"])
def test_a_fused_network_that_breaks_is_not_written(cli, pair, nets_file, tmp_path, container):
    states = [torch.load(p, weights_only=True) for p in pair]
    states[0]["fc2.bias"] = -states[1]["fc2.bias"]  # their average is zero
    torch.save(states[0], pair[0])
    out = tmp_path / f"f{container}"
    before = sorted(tmp_path.iterdir())
    run = cli("merge", *pair, "-o", out, "--arch", f"{nets_file}:steep", "--repair", "none")
    assert run.code == 5
    assert "outputs are not finite" in run.err
    assert sorted(p for p in tmp_path.iterdir() if p.name != "__pycache__") == before


UNKNOWN = {
    "odd names": lambda: nn.ModuleDict({"alpha": nn.Linear(3, 4), "beta": nn.Conv2d(2, 3, 3)}),
    "recurrent": lambda: nn.GRU(3, 4, num_layers=2),
    "two heads": lambda: nn.ModuleDict(
        {"fc1": nn.Linear(4, 8), "fc2": nn.Linear(8, 2), "fc3": nn.Linear(8, 1)}
    ),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "norms": lambda: nn.ModuleDict({"x": nn.GroupNorm(2, 4), "y": nn.BatchNorm1d(4)}),
}


@pytest.mark.slow_cases("odd names")
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_plain_average_needs_no_graph(cli, tmp_path, name):
    states = [nets.state(nets.randomise(UNKNOWN[name](), seed)) for seed in (0, 1)]
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    assert cli("merge", *paths, "-o", tmp_path / "f.pt").code == 4
    run = cli("merge", *paths, "-o", tmp_path / "f.pt", "--align", "none", "--weights", ".25,.75")
    assert run.code == 0, run.err
    fused = torch.load(tmp_path / "f.pt", weights_only=True)
    for key, tensor in fused.items():
        a, b = (s[key] for s in states)
        expected = torch.maximum(a, b) if a.dtype == torch.int64 else 0.25 * a + 0.75 * b
        assert torch.allclose(tensor, expected, atol=1e-6), key
    report = json.loads((tmp_path / "f.report.json").read_text())
    assert report["checks"]["function"] is None


def test_a_plain_average_of_different_widths_is_refused():
    a, b = ({"alpha": torch.zeros(4, n), "beta": torch.zeros(n, 7, n)} for n in (3, 5))
    with pytest.raises(IncompatibleModels) as raised:
        otfuse_cli.merge(a, b, align="none")
    assert "alpha" in str(raised.value)
    with pytest.raises((UsageError, IncompatibleModels)):
        otfuse_cli.merge(a, b, align="none", arch="resnet-basic")


def test_inspect_declares_what_its_costs_rest_on(cli, pair):
    run = cli("inspect", *pair, "--ot-costs")
    assert "function  assumed, not proven" in run.out
    assert sum(line.startswith("assumed: ") for line in run.err.splitlines()) == 1


@pytest.mark.slow
def test_older_reports_are_read(cli, pair, tmp_path):
    cli("merge", *pair, "-o", tmp_path / "f.pt")
    report = json.loads((tmp_path / "f.report.json").read_text())
    for old, new in ((True, "kept"), (False, "NOT kept"), (None, None)):
        report["checks"] = {"function_preserved": old, "max_error": 0.5}
        run = cli("inspect", stdin=json.dumps(report))
        assert run.code == 0, run.err
        assert (f"function  {new}" in run.out) if new else ("function " not in run.out)
