"""Tensors that are a function of weights: recomputed, so that the fused layer is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as hook
from torch.nn.utils.parametrizations import spectral_norm as parametrised

import otfuse_cli
from nets import ResNet, Vgg
from otfuse_cli.errors import SolveFailed
from otfuse_cli.fusion import recompute as numerics
from otfuse_cli.graph.derived_tensors import power_vectors
from otfuse_cli.graph.model import Role
from otfuse_cli.graph.spec.from_shapes import layer_graph
from otfuse_cli.graph.spec.write_spec import write_spec
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running.acid import acid_test
from otfuse_cli.running.relabel import draw_maps, relabel_state
from otfuse_cli.session.bench import Bench
from spectral_nets import KINDS, linear, make, norms, trained

pytestmark = pytest.mark.usefixtures("kept_graphs")
State = dict[str, Tensor]
VECTORS = ("_u", "_v", "u0")
QUICK = {
    "linear-hook",
    "image-parametrised",
    "up-hook",
    "words-hook",
    "sagan",
}
MERGED = [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]


def state_of(module: nn.Module) -> State:
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


def negated(state: State) -> State:
    """The same function: u W v has two signs to lose."""
    return {n: -t if n.endswith(VECTORS) else t for n, t in state.items()}


def arch_of(kind: str, folder: Path) -> str:
    path = folder / "net.py"
    path.write_text(f"from spectral_nets import make\n\ndef net():\n    return make({kind!r})\n")
    return f"{path}:net"


def loaded(kind: str, state: State) -> tuple[nn.Module, tuple[Tensor, ...]]:
    module, inputs = make(kind)
    module.load_state_dict(state)
    return module, inputs


@pytest.mark.quick_cases("sagan")
@pytest.mark.parametrize("kind", MERGED)
def test_fused_layers_have_norm_one(kind, tmp_path):
    """Whatever sign the vectors of either model have."""
    arch = arch_of(kind, tmp_path)
    one, two = (state_of(trained(kind, seed)) for seed in (0, 1))
    fused, report = otfuse_cli.merge(one, two, arch=arch)
    assert report.checks.max_error < 1e-4
    found = norms(*loaded(kind, fused))
    assert found == pytest.approx([1.0] * len(found), abs=1e-5)
    assert len(found) > 0
    again, _ = otfuse_cli.merge(negated(one), two, arch=arch)
    assert all(torch.equal(fused[n], again[n]) for n in fused)
    other, _ = otfuse_cli.merge(one, negated(two), arch=arch)
    for name, values in other.items():
        sign = -1 if name.endswith(VECTORS) else 1
        torch.testing.assert_close(values, sign * fused[name])


@pytest.mark.quick_cases("sagan")
@pytest.mark.parametrize("kind", MERGED)
def test_a_model_and_its_twin_are_the_model(kind, tmp_path):
    """Vectors of its own stay, converged or not; those of an endpoint are moved with it."""
    arch = arch_of(kind, tmp_path)
    module, inputs = make(kind)
    own = state_of(trained(kind, 0, steps=1))
    graph = trace(module, inputs)
    twin = relabel_state(own, graph, draw_maps(graph, torch.Generator().manual_seed(3)))
    for other in (own, twin):
        fused, _ = otfuse_cli.merge(other, own, arch=arch)
        assert all(torch.equal(fused[n], own[n]) for n in own)
    other = state_of(trained(kind, 1, steps=1))
    fused, report = otfuse_cli.merge(twin, other, arch=arch, weights=(1, 0))
    assert report.checks.max_error < 1e-4
    with torch.no_grad():
        wanted = loaded(kind, own)[0].eval()(*inputs)
        torch.testing.assert_close(
            loaded(kind, fused)[0].eval()(*inputs), wanted, rtol=1e-4, atol=1e-5
        )


@pytest.mark.quick_cases("sagan")
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_say_nothing_about_units(kind):
    module, inputs = make(kind)
    graph = trace(module, inputs)
    derived = {n for d in graph.derived for n in d.tensors}
    assert {n for n in graph.tensors if n.endswith(VECTORS)} <= derived
    for name in derived:
        assert all(axis.roles == {Role.DERIVED} for axis in graph.tensors[name].axes)
    for found in graph.derived:
        roles = [axis.roles for axis in graph.tensors[found.source].axes]
        assert not any({Role.PRODUCE, Role.CONSUME} <= r for r in roles)
        assert Role.PRODUCE in roles[found.dim] or kind.startswith("words")
    assert acid_test(module, inputs, {}, graph, seed=0).passed


FAMILIES = {
    "mlp": (lambda: linear(lambda layer: layer), (5, 6)),
    "vgg": (lambda: Vgg(norm=True), (2, 3, 32, 32)),
    "resnet": (lambda: ResNet(), (2, 3, 16, 16)),
    "resnet-cifar": (lambda: ResNet(cifar=True, norm=False, bias=True), (2, 3, 16, 16)),
    "resnet-bottleneck": (lambda: ResNet(widths=(6, 9, 12), bottleneck=True), (2, 3, 16, 16)),
}  # fmt: skip


def of_family(name: str, wrap) -> tuple[nn.Module, Tensor]:
    net, shape = FAMILIES[name]
    module = net()
    for layer in list(module.modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            wrap(layer)
    return module, torch.randn(shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("mlp", hook), ("mlp", parametrised), ("vgg", hook), ("resnet", parametrised),
        ("resnet-cifar", hook),
        pytest.param("resnet-bottleneck", hook, marks=pytest.mark.slow),
        pytest.param("resnet-bottleneck", parametrised, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_names_and_shapes_tell_it_too(name, wrap):
    """A family sees the plain network; what it says of the weight holds for the vectors."""
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        module, x = of_family(name, wrap)
        module(x)
        states.append(state_of(module.eval()))
    graph = layer_graph(
        "mlp" if name == "mlp" else "auto", {n: t.shape for n, t in states[0].items()}
    )
    traced = trace(module, (x,))
    assert list(graph.tensors) == list(states[0])
    assert {d.source: (d.dim, d.parts) for d in graph.derived} == {
        d.source: (d.dim, d.parts) for d in traced.derived
    }
    maps = draw_maps(graph, torch.Generator().manual_seed(0))
    twin = relabel_state(states[1], graph, maps)
    with torch.no_grad():
        wanted = module(x)
        module.load_state_dict(twin)
        torch.testing.assert_close(module.eval()(x), wanted, rtol=1e-4, atol=1e-4)
    arch = "mlp" if name == "mlp" else "auto"
    fused, _ = otfuse_cli.merge(states[0], states[1], arch=arch)
    module.load_state_dict(fused)
    module.eval()(x)
    found = norms(module, (x,))
    assert found == pytest.approx([1.0] * len(found), abs=1e-5)


@pytest.mark.quick_cases("sagan", "linear-hook")
@pytest.mark.parametrize("kind", ["linear-hook", "linear-parametrised", "up-hook", "sagan"])
def test_a_written_spec_is_read_again(kind, tmp_path):
    """Vectors are in no line of it: names and shapes tell them."""
    module, inputs = make(kind)
    traced = trace(module, inputs)
    path = tmp_path / "net.yaml"
    path.write_text(write_spec(traced))
    own = state_of(trained(kind, 0))
    graph = layer_graph(str(path), {n: t.shape for n, t in own.items()})
    assert graph.derived == traced.derived
    twin = relabel_state(own, graph, draw_maps(graph, torch.Generator().manual_seed(0)))
    with torch.no_grad():
        wanted, found = (loaded(kind, s)[0].eval()(*inputs) for s in (own, twin))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear-hook", "image-parametrised", "residual-hook"])
def test_with_inputs_as_well(kind, tmp_path):
    inputs = make(kind)[1]
    samples = torch.randn((40, *inputs[0].shape[1:]), generator=torch.Generator().manual_seed(0))
    states = [state_of(trained(kind, seed)) for seed in (0, 1)]
    fused, _ = otfuse_cli.merge(*states, arch=arch_of(kind, tmp_path), samples=samples)
    found = norms(*loaded(kind, fused))
    assert found == pytest.approx([1.0] * len(found), abs=1e-5)


HEAD = """
from torch import nn
from torch.nn.utils import spectral_norm
import torch

def net():
    head = spectral_norm(nn.Linear(9, 4))
    layers = nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), head
    return nn.Sequential(*layers), torch.randn(5, 6)
"""


@pytest.mark.slow
def test_joint_fusion_of_a_network_with_such_a_layer(tmp_path, monkeypatch):
    """What it is judged by is the network that is written."""
    judged = []
    verdict = Bench.verdict
    monkeypatch.setattr(
        Bench, "verdict", lambda self, w: judged.append(dict(w)) or verdict(self, w)
    )
    (tmp_path / "net.py").write_text(HEAD)
    namespace: dict = {}
    exec(HEAD, namespace)
    nets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net, x = namespace["net"]()
        net(x)
        nets.append(net.eval())
    samples = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    arch = f"{tmp_path / 'net.py'}:net"
    states = [state_of(n) for n in nets]
    fused, _ = otfuse_cli.merge(*states, arch=arch, samples=samples, blend="joint")
    nets[0].load_state_dict(fused)
    assert norms(nets[0], (samples,)) == pytest.approx([1.0], abs=1e-5)
    assert len(judged) > 1
    for tensors in judged:
        weight, u, v = (tensors[f"4.weight_{n}"].double() for n in ("orig", "u", "v"))
        sigma = torch.linalg.matrix_norm(weight, 2)
        torch.testing.assert_close(u @ weight @ v, sigma, rtol=1e-5, atol=0)


@pytest.mark.quick_cases("dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_it_is_the_norm_of_what_is_stored(dtype, tmp_path):
    states = [state_of(trained("linear-hook", seed)) for seed in (0, 1)]
    states = [{n: t.to(dtype) for n, t in state.items()} for state in states]
    fused, _ = otfuse_cli.merge(*states, arch=arch_of("linear-hook", tmp_path))
    for layer in (0, 2):
        weight, u, v = (fused[f"{layer}.weight_{n}"] for n in ("orig", "u", "v"))
        assert {weight.dtype, u.dtype, v.dtype} == {dtype}
        sigma = float(u.double() @ weight.double() @ v.double())
        wanted = float(torch.linalg.matrix_norm(weight.double(), 2))
        assert sigma == pytest.approx(wanted, rel=4 * torch.finfo(dtype).eps)


def test_different_widths(tmp_path):
    """The anchor's units get vectors of their own length."""
    nets = []
    for seed, width in enumerate((14, 9)):
        torch.manual_seed(seed)
        net = nn.Sequential(hook(nn.Linear(6, width)), nn.ReLU(), hook(nn.Linear(width, 4)))
        net(torch.randn(3, 6))
        nets.append(net.eval())
    fused, _ = otfuse_cli.merge(*(state_of(n) for n in nets), arch="mlp")
    nets[1].load_state_dict(fused)
    assert norms(nets[1], (torch.randn(3, 6),)) == pytest.approx([1.0, 1.0], abs=1e-5)


@pytest.mark.slow
def test_skipping_a_vector_keeps_no_stale_one(tmp_path):
    """They belong to their weight: what is averaged of it is what they are of."""
    arch = arch_of("linear-hook", tmp_path)
    states = [state_of(trained("linear-hook", seed)) for seed in (0, 1)]
    wanted, _ = otfuse_cli.merge(*states, arch=arch)
    found, _ = otfuse_cli.merge(*states, arch=arch, skip=("*_u", "*_v"))
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    found, _ = otfuse_cli.merge(*states, arch=arch, skip=("0.weight_orig",))
    assert torch.equal(found["0.weight_u"], states[1]["0.weight_u"])
    assert torch.equal(found["2.weight_u"], wanted["2.weight_u"])


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        ({"a.weight_orig": (4, 3), "a.weight_u": (4,), "a.weight_v": (3,)}, True),
        ({"a.weight_orig": (4, 3), "a.weight_u": (4,)}, True),
        ({"a.weight_orig": (4, 3, 2), "a.weight_u": (3,), "a.weight_v": (8,)}, True),
        ({"p.parametrizations.k.original": (4, 3), "p.parametrizations.k.0._u": (4,),
          "p.parametrizations.k.0._v": (3,)}, True),
        ({"weight": (4, 3), "u0": (1, 4), "sv0": (1,)}, True),
        ({"a.weight_orig": (4, 3), "a.weight_u": (4,), "a.weight_v": (4,)}, False),
        ({"a.weight_orig": (4, 3), "a.weight_u": (4, 2), "a.weight_v": (3, 2)}, False),
        ({"a.weight": (4, 3), "a.weight_u": (4,), "a.weight_v": (3,)}, False),
        ({"a.weight_orig": (4, 3), "a.weight_mask": (4, 3)}, False),
        ({"weight": (4, 3), "u0": (1, 4)}, False),
        ({"a.b_orig": (4,), "a.b_u": (4,), "a.b_v": (1,)}, False),
    ],
)  # fmt: skip
def test_what_counts_as_power_iteration(shapes, found):
    assert bool(power_vectors(shapes)) is found


@pytest.mark.parametrize("shape", [(5, 5), (3, 40), (40, 3), (1, 7), (7, 1), (30, 31)])
@pytest.mark.parametrize("whole", [1024, 0])
def test_leading_vectors_against_svd(shape, whole, monkeypatch):
    monkeypatch.setattr(numerics, "_WHOLE", whole)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, v = numerics.leading(matrix)
    left, sigma, right = torch.linalg.svd(matrix)
    assert float(u @ matrix @ v) == pytest.approx(float(sigma[0]), rel=1e-12)
    assert abs(float(u @ left[:, 0])) == pytest.approx(1, abs=1e-5)
    assert abs(float(v @ right[0])) == pytest.approx(1, abs=1e-5)
    assert u[u.abs().argmax()] > 0
    with pytest.raises(ValueError, match="not finite"):
        numerics.leading(matrix * torch.inf)


@pytest.mark.slow
def test_a_weight_of_zeros_keeps_its_vectors(tmp_path):
    states = [state_of(trained("linear-hook", seed)) for seed in (0, 1)]
    states[0]["0.weight_orig"] = -states[1]["0.weight_orig"]
    # A weight of zeros has no norm to divide by.
    with pytest.raises(SolveFailed, match="not finite"):
        otfuse_cli.merge(*states, arch=arch_of("linear-hook", tmp_path), align="none")
    fused, _ = otfuse_cli.merge(*states, align="none")
    assert not fused["0.weight_orig"].any()
    assert torch.equal(fused["0.weight_u"], states[1]["0.weight_u"])


@pytest.mark.slow
def test_a_spectral_norm_behind_another_parametrisation_is_told():
    """The weight that is normed is no tensor of the file: its vectors can't be made anew."""

    def net(seed: int = 0):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 9))
            nn.utils.parametrizations.spectral_norm(first)
            return nn.Sequential(first, nn.ReLU(), nn.Linear(9, 3)), torch.randn(4, 6)

    _, report = otfuse_cli.merge(net(0)[0], net(1)[0], arch=net, matcher="sweep")
    assert any("parametrised before it" in w and "training mode" in w for w in report.warnings)
