"""No network passes silently for another: what has a family's names is refused, or declared.

Each lookalike is shown to be one: its tensors have the family's names and shapes, and what the
family takes for interchangeable units is not, since a permutation changes the function.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from family_nets import CASES, HF
from lookalikes import (
    DISGUISES,
    LOOKALIKES,
    PLACES,
    Lookalike,
    disguised,
    family_member,
)
from otfuse_cli.errors import ExitCode, IncompatibleModels
from otfuse_cli.graph.model import LayerGraph
from otfuse_cli.graph.spec.bind import bind
from otfuse_cli.graph.spec.from_shapes import families, layer_graph
from otfuse_cli.graph.spec.grammar import Spec
from otfuse_cli.graph.spec.patterns import Pattern, Present
from otfuse_cli.graph.spec.stored_shapes import StoredShapes
from otfuse_cli.running.acid import acid_test
from otfuse_cli.running.architecture import architecture

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def stored(module: nn.Module, *, by_name: bool = False) -> StoredShapes:
    """Shapes as a file of the module holds them; `by_name`: as safetensors sorts them."""
    state = module.state_dict()
    dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in state.items()}
    names = sorted(state, key=lambda n: (dtypes[n] != "int64", n)) if by_name else list(state)
    return StoredShapes({n: tuple(state[n].shape) for n in names}, dtypes)


def is_declared(graph: LayerGraph) -> bool:
    """Whether the report says `assumed`, and what."""
    return graph.assumes is not None and len(graph.assumes.split()) > 5


# Operations that leave nothing in a file


QUICK = {"mlp", "vgg-bn", "lenet", "resnet-basic-bn"}


@pytest.mark.quick_cases("mlp")
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PLACES]
)
def test_what_no_file_shows_is_declared(name: str) -> None:
    if name in HF:
        pytest.importorskip("transformers")
    module, args, kwargs = family_member(name)
    shapes = stored(module)
    known = architecture("auto", shapes, config=CASES[name].config)
    assert known.graph.source == f"family {CASES[name].family}"
    assert is_declared(known.graph)
    assert acid_test(module, args, kwargs, known.graph, seed=0, draws=1).passed
    assert len(DISGUISES) >= 20
    for title, disguise in DISGUISES.items():
        place, axis = PLACES[name]
        with disguised(module, place, axis, disguise):
            assert dict(stored(module)) == dict(shapes)
            # One permutation may be among those that the operation allows.
            kept = all(
                acid_test(module, args, kwargs, known.graph, seed=seed, draws=1).passed
                for seed in (1, 2, 3)
            )
        assert not kept, title


def test_every_family_is_disguised() -> None:
    shown = families().keys() - {"mixtral"}  # whose disguises are Llama's
    assert {CASES[name].family for name in PLACES} == shown | {"mlp"}


# Networks that are met


def inputs_of(lookalike: Lookalike) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(lookalike.shape, generator=generator)


def claimed(lookalike: Lookalike, shapes: StoredShapes) -> LayerGraph | None:
    """The family's graph of these tensors, whatever speaks against it; None where none fits."""
    specs = families().get(lookalike.family) or (_numbered(shapes),)
    for spec in specs:
        if Present(shapes).all(spec.require):
            try:
                return bind(spec, shapes, where="claimed")
            except IncompatibleModels:
                continue
    return None


def _numbered(shapes: StoredShapes) -> Spec:
    modules = dict.fromkeys(name.rpartition(".")[0] for name in shapes)
    return Spec("mlp", chain=tuple(map(Pattern, modules)), act="relu")


@pytest.mark.parametrize("title", LOOKALIKES)
def test_a_lookalike_is_refused_or_declared(title: str) -> None:
    lookalike = LOOKALIKES[title]
    if lookalike.config:
        pytest.importorskip("transformers")
    module = lookalike.make().eval()
    shapes = stored(module, by_name=lookalike.sorted)
    graph = claimed(lookalike, shapes)
    if graph is not None and not lookalike.config:
        acid = acid_test(module, (inputs_of(lookalike),), {}, graph, seed=0, draws=2)
        assert acid.passed == lookalike.harmless, acid.max_error
    if not lookalike.words:
        known = layer_graph("auto", shapes)
        assert known.source == f"family {lookalike.family}"
        assert is_declared(known)
        return
    with pytest.raises(IncompatibleModels) as caught:
        layer_graph("auto", shapes, config=lookalike.config or None)
    assert caught.value.exit_code is ExitCode.INCOMPATIBLE
    for word in (*lookalike.words, "--arch net.py:make_net"):
        assert word in str(caught.value)


@pytest.mark.slow
def test_a_bound_graph_is_met_for_most_lookalikes() -> None:
    """The refusals are needed: without them, sizes fit."""
    graphs = [claimed(case, stored(case.make())) for case in LOOKALIKES.values() if not case.config]
    assert sum(graph is not None for graph in graphs) > 25


MERGED = [
    "ResNet with GroupNorm",
    "PyTorch's VAE",
    "max and mean pooling",
    "heads with names",
    "pre-activation ResNet, last norm bn1",
    "ResNet with fc and linear",
]


@pytest.mark.parametrize("title", MERGED)
def test_a_merge_of_lookalikes_ends_with_exit_code_4_and_no_file(cli, tmp_path, title) -> None:
    lookalike = LOOKALIKES[title]
    paths = [tmp_path / f"{n}.pt" for n in "ab"]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        torch.save(lookalike.make().state_dict(), path)
    run = cli("merge", *paths, "-o", tmp_path / "out.pt")
    assert run.code == 4, run.err
    for word in lookalike.words:
        assert word in " ".join(run.err.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.pt"]


# What a person says is believed, as far as it can be true


@pytest.mark.parametrize(
    ("title", "arch"),
    [
        ("max and mean pooling", "vgg"),
        ("max and mean pooling, LeNet", "lenet"),
        ("heads with names", "lenet"),
        ("two heads of one width", "mlp"),
        ("VAE with a code as wide as it is deep", "mlp"),
        ("layers 1, 3 and 4", "mlp"),
        ("Gemma", "llama"),
    ],
)
def test_what_is_named_by_hand_is_declared(title: str, arch: str) -> None:
    lookalike = LOOKALIKES[title]
    graph = layer_graph(arch, stored(lookalike.make()), config=lookalike.config or None)
    assert is_declared(graph)


@pytest.mark.parametrize(
    ("title", "arch"),
    [
        ("ResNet with GroupNorm", "resnet-basic"),
        ("features/classifier net with GroupNorm", "vgg"),
        ("DenseNet with GroupNorm", "densenet"),
        ("pre-activation ResNet, last norm bn1", "resnet-basic"),
        ("ResNet with downsample and shortcut", "resnet-basic"),
        ("ResNet without block 1", "resnet-basic"),
        ("PyTorch's VAE", "mlp"),
        ("Siamese pair", "mlp"),
        ("CReLU between linear layers", "mlp"),
    ],
)
def test_what_contradicts_a_family_does_so_by_any_name(title: str, arch: str, tmp_path) -> None:
    lookalike = LOOKALIKES[title]
    shapes = stored(lookalike.make())
    spec = tmp_path / "net.yaml"
    spec.write_text(f"family: {arch}" if arch != "mlp" else "chain: [fc*]")
    for said in (arch, str(spec)):
        with pytest.raises(IncompatibleModels) as caught:
            layer_graph(said, shapes)
        for word in lookalike.words:
            assert word in str(caught.value)
