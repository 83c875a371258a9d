"""`check`, traced architectures in `merge`, factories, saved programs."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

import otfuse_cli
import zoo
from nets import TWO_BRANCHES_SPEC, Mlp, TwoBranches, randomise, state
from otfuse_cli.errors import IncompatibleModels, SolveFailed, UnreadableInput
from otfuse_cli.running.architecture import architecture
from otfuse_cli.running.relabel import draw_maps, relabel_state
from test_twins import permuted

FACTORY = """
import sys
sys.path.insert(0, {tests!r})
import torch
from nets import Mlp, TwoBranches, ResNet, randomise

def two():
    return TwoBranches()

def wide():
    return Mlp((12, 18, 16, 14, 5))

def with_inputs():
    return Mlp(), torch.randn(3, 12)

def no_module():
    return 3

def fails():
    raise RuntimeError("no weights today")

class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 6)
        self.out = torch.nn.Linear(6, 2)

    def forward(self, x):
        h = self.fc(x)
        if h.sum() > 0:
            h = h * 2
        return self.out(h)

def branching():
    return Branching()

def backbone():
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 6, 3)
    return torch.nn.Sequential(*layers), torch.randn(2, 3, 8, 8)
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "factories.py"
    path.write_text(FACTORY.format(tests=str(Path(__file__).parent)))
    return path


@pytest.fixture
def two(tmp_path: Path) -> Path:
    torch.save(state(randomise(TwoBranches(), 0)), tmp_path / "two.pt")
    return tmp_path / "two.pt"


@pytest.mark.slow
def test_a_traced_graph_passes(cli, factory, two):
    done = cli("check", two, "--arch", f"{factory}:two", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["report"]
    assert report["checks"]["function"] == "kept"
    assert report["checks"]["max_error"] < 1e-10
    evaluation = report["evaluation"]
    assert evaluation["members detected"] == evaluation["members left out one by one"] == 16


def test_a_spec_is_proven_and_a_wrong_one_is_named(cli, factory, two, tmp_path):
    spec = tmp_path / "net.yaml"
    spec.write_text(TWO_BRANCHES_SPEC)
    done = cli("check", two, "--arch", f"{factory}:two", "--spec", spec)
    assert done.code == 0, done.err
    # Sizes agree, so nothing but running the network can tell that the branches are added.
    spec.write_text(TWO_BRANCHES_SPEC.replace("right_out: b <- r", "right_out: lost <- r"))
    wrong = cli("check", two, "--arch", f"{factory}:two", "--spec", spec, "--json")
    assert wrong.code == 7
    envelope = json.loads(wrong.out)
    assert envelope["report"]["checks"]["function"] == "failed"
    assert "space b" in envelope["error"]["where"]
    assert "left.weight" in envelope["error"]["where"]


@pytest.mark.quick_cases("fails-4-words2", "missing-2-words0", "no_module-4-words1")
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("missing", 2, ["no such factory"]),
        ("no_module", 4, ["returned no module", "int"]),
        ("fails", 4, ["factory failed", "no weights today"]),
        ("wide", 4, ["different tensors"]),
    ],
)
def test_a_wrong_factory_is_named(cli, factory, two, name, code, words):
    done = cli("check", two, "--arch", f"{factory}:{name}")
    assert done.code == code
    for word in words:
        assert word in done.err


def test_what_cannot_be_run_cannot_be_checked_against(cli, two):
    torch.save(state(randomise(Mlp(), 0)), two)
    done = cli("check", two, "--arch", "mlp")
    assert done.code == 2
    assert "--spec" in done.err
    assert cli("check", two, "--arch", "nowhere.py:f").code == 3
    assert cli("check", two, "--arch", "no.such.module:f").code == 3


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_missing_package_is_named(cli, two, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"{package}.models", raising=False)
    done = cli("check", two, "--arch", f"{package}:resnet18")
    assert done.code == 2
    assert f"pip install {package}" in done.err


@pytest.mark.slow
def test_control_flow_on_data_is_shown_where_it_stands(cli, factory, tmp_path):
    tensors = {"fc.weight": (6, 4), "fc.bias": (6,), "out.weight": (2, 6), "out.bias": (2,)}
    torch.save({n: torch.randn(s) for n, s in tensors.items()}, tmp_path / "b.pt")
    done = cli("check", tmp_path / "b.pt", "--arch", f"{factory}:branching")
    assert done.code == 4
    assert "if h.sum() > 0" in done.err
    assert "spec" in done.err


def test_merge_checks_the_function_on_the_real_maps(factory, two, tmp_path):
    original = torch.load(two, weights_only=True)
    spec = tmp_path / "net.yaml"
    spec.write_text(TWO_BRANCHES_SPEC)
    twin = permuted(original, 3, arch=str(spec))
    fused, report = otfuse_cli.merge(twin, original, arch=f"{factory}:two")
    assert report.checks.function == "kept"
    assert report.checks.max_error < 1e-10
    for name, tensor in original.items():
        assert torch.equal(fused[name], tensor), name


def test_free_outputs_let_a_headless_backbone_move(factory):
    """The outputs of the aligned source come in the anchor's order, which the check knows."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (8, 3, 3, 3), "0.bias": (8,), "2.weight": (6, 8, 3, 3), "2.bias": (6,)}
    original = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    twin = {n: t[order] if n.startswith("2") else t for n, t in original.items()}
    fused, report = otfuse_cli.merge(twin, original, arch=f"{factory}:backbone", free_outputs=True)
    assert report.checks.function == "kept"
    assert all(torch.equal(fused[n], t) for n, t in original.items())
    held, _ = otfuse_cli.merge(twin, original, arch=f"{factory}:backbone")
    assert not torch.equal(held["2.weight"], original["2.weight"])


def test_merge_refuses_maps_that_change_the_function(factory, two, monkeypatch):
    """A graph that lies about one axis is caught before anything is written."""
    from dataclasses import replace

    import otfuse_cli.session.find_architecture as finding
    from otfuse_cli.graph.model import Fixed, Role, TensorAxis

    def lying(*args, **kwargs):
        known = architecture(*args, **kwargs)
        honest = known.graph.tensors["norm.weight"]
        axis = TensorAxis(Fixed(8), frozenset({Role.FIXED}))
        tensors = {**known.graph.tensors, "norm.weight": replace(honest, axes=(axis,))}
        return replace(known, graph=replace(known.graph, tensors=tensors))

    monkeypatch.setattr(finding, "architecture", lying)
    original = torch.load(two, weights_only=True)
    other = state(randomise(TwoBranches(), 5))
    with pytest.raises(SolveFailed, match="computes something else"):
        otfuse_cli.merge(other, original, arch=f"{factory}:two")


@pytest.mark.slow
def test_different_widths_of_one_factory_match(factory):
    wide, narrow = state(randomise(Mlp((12, 18, 16, 14, 5)), 0)), state(randomise(Mlp(), 1))
    fused, report = otfuse_cli.merge(wide, narrow, arch=f"{factory}:with_inputs")
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in narrow.items()}
    assert report.spaces[0].sizes == (18, 9)
    deeper = state(randomise(Mlp((12, 9, 8, 8, 7, 5)), 0))
    with pytest.raises(IncompatibleModels, match="different tensors"):
        otfuse_cli.merge(deeper, narrow, arch=f"{factory}:with_inputs")


NETS = [
    *("densenet", "grouped", "lstm", "transformer"),
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("unet-bn", "mobilenet-se", "generator")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_a_permuted_twin_of_any_network_returns_the_original(name, tmp_path, monkeypatch):
    """U-Net, DenseNet, MobileNet with squeeze-excite, groups, LSTM, GAN, tied language model."""
    module, args, kwargs = zoo.make(name)
    path = tmp_path / "factory.py"
    path.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import zoo

        def make():
            module, args, kwargs = zoo.make({name!r})
            return module, (kwargs or args)
        """)
    )
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    original = {
        n: torch.randn(t.shape, generator=generator).abs() + 0.5
        if n.endswith("running_var")
        else torch.randn(t.shape, generator=generator)
        / max(1, t[0].numel() if t.dim() > 1 else 1) ** 0.5
        if t.is_floating_point()
        else t
        for n, t in module.state_dict().items()
    }
    from otfuse_cli.graph.trace.from_module import trace

    graph = trace(module, args, kwargs)
    for tensor in graph.tensors.values():
        for alias in tensor.aliases:
            original[alias] = original[tensor.name]
    maps = draw_maps(graph, generator)
    twin = relabel_state(original, graph, maps)
    for tensor in graph.tensors.values():
        for alias in tensor.aliases:
            twin[alias] = twin[tensor.name]
    assert shapes.keys() == twin.keys()
    fused, report = otfuse_cli.merge(twin, original, arch=f"{path}:make")
    assert report.checks.function == "kept"
    from otfuse_cli.running.function_change import function_change

    full = {**original, **fused}
    for tensor in graph.tensors.values():
        for alias in tensor.aliases:
            full[alias] = full[tensor.name]
    change = function_change(module, args, kwargs, original, full)
    assert change < 1e-4, f"{name}: {change}"


# Saved programs


@pytest.fixture
def program(tmp_path: Path) -> Path:
    module = randomise(Mlp(), 0)
    path = tmp_path / "graph.pt2"
    torch.export.save(torch.export.export(module, (torch.randn(3, 12),)), path)
    return path


@pytest.mark.slow
def test_a_saved_program_gives_graph_and_check_without_user_code(program):
    original = state(randomise(Mlp(), 0))
    fused, report = otfuse_cli.merge(permuted(original, 2), original, arch=str(program))
    assert report.checks.function == "kept"
    assert all(torch.equal(fused[n], t) for n, t in original.items())


class _Runs:
    def __reduce__(self):
        return os.system, ("touch hostile-ran",)


@pytest.mark.parametrize("member", ["data/sample_inputs/model.pt", "data/weights/weight_0"])
def test_a_hostile_pickle_in_a_program_is_refused_and_nothing_runs(
    program, member, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    hostile = tmp_path / "hostile.pt2"
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(hostile, "w") as target:
        for info in source.infolist():
            data = source.read(info)
            inner = info.filename.partition("/")[2]
            if inner == member:
                data = pickle.dumps(_Runs())
            if inner.endswith("weights_config.json"):
                data = data.replace(b'"use_pickle": false', b'"use_pickle": true')
            target.writestr(info.filename, data)
    with pytest.raises(UnreadableInput, match="pickle"):
        architecture(str(hostile), {"fc1.weight": (9, 12)})
    assert not (tmp_path / "hostile-ran").exists()


def test_what_is_no_program_is_refused(tmp_path):
    path = tmp_path / "x.pt2"
    with pytest.raises(UnreadableInput):
        architecture(str(path), {})
    path.write_bytes(b"no zip")
    with pytest.raises(UnreadableInput, match="not an exported program"):
        architecture(str(path), {})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/models/evil.so", b"\x7fELF")
    path.write_bytes(buffer.getvalue())
    with pytest.raises(UnreadableInput, match="more than data"):
        architecture(str(path), {})
