"""Real members of the bundled families: nothing that speaks against a lookalike speaks here.

Networks of the libraries are built without weights, and their names are listed both as torch saves
them and as safetensors does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import libraries
import nets
from otfuse_cli.errors import IncompatibleModels
from otfuse_cli.graph.spec.from_shapes import families, layer_graph
from otfuse_cli.graph.spec.stored_shapes import StoredShapes
from test_lookalikes import stored

pytestmark = pytest.mark.usefixtures("kept_graphs")

TORCHVISION = {
    "alexnet": "vgg",
    "vgg11": "vgg",
    "vgg11_bn": "vgg",
    "vgg16": "vgg",
    "vgg19_bn": "vgg",
    "resnet18": "resnet-basic",
    "resnet34": "resnet-basic",
    "resnet50": "resnet-bottleneck",
    "wide_resnet50_2": "resnet-bottleneck",
    "densenet121": "densenet",
    "mobilenet_v2": "mobilenet-v2",
    "convnext_tiny": "convnext",
}


def _recognised_in_both_orders(module: nn.Module) -> set[str]:
    return {layer_graph("auto", stored(module, by_name=b)).source for b in (False, True)}


@pytest.mark.quick_cases("alexnet", "vgg11", "vgg11_bn", "resnet18", "convnext_tiny")
@pytest.mark.parametrize("name", TORCHVISION)
def test_networks_of_torchvision(name: str) -> None:
    models = libraries.torchvision_models()
    with torch.device("meta"):
        module = getattr(models, name)(weights=None)
    assert _recognised_in_both_orders(module) == {f"family {TORCHVISION[name]}"}


TIMM = {
    "resnet18": "resnet-basic",
    "resnet26": "resnet-bottleneck",
    "resnet50": "resnet-bottleneck",
    "densenet121": "densenet",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_networks_of_timm(name: str) -> None:
    timm = libraries.timm()
    with torch.device("meta"):
        module = timm.create_model(name)
    assert _recognised_in_both_orders(module) == {f"family {TIMM[name]}"}


TRANSFORMERS = {
    "BertForSequenceClassification": "bert",
    "BertForMaskedLM": "bert",
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "llama",
    "GraniteForCausalLM": "llama",
    "SmolLM3ForCausalLM": "llama",
    "SeedOssForCausalLM": "llama",
    "ViTForImageClassification": "vit",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_networks_of_transformers_with_their_own_config(name: str) -> None:
    """Of the right size, and whatever else config.json says, the type of the model among it."""
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, name)
    with torch.device("meta"):
        module = made(made.config_class(num_hidden_layers=2))
    config = module.config.to_dict()
    assert config["model_type"] in families()[TRANSFORMERS[name]][0].models
    for by_name in (False, True):
        graph = layer_graph("auto", stored(module, by_name=by_name), config=config)
        assert graph.source == f"family {TRANSFORMERS[name]}"


def _lenet(*sizes: tuple[int, ...], names: str = "conv conv fc fc fc") -> Callable[[], nn.Module]:
    """Layers by sizes, numbered by kind: conv1, conv2, fc1, ..."""

    def make() -> nn.Module:
        net = nn.Module()
        kinds = names.split()
        for at, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
            number = kinds[: at + 1].count(kind)
            name = kind if kinds.count(kind) == 1 else f"{kind}{number}"
            net.add_module(name, nn.Linear(*size) if len(size) == 2 else nn.Conv2d(*size))
        return net

    return make


def _features(*layers: nn.Module, classifier: nn.Module) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = nn.Module()
        net.features = nn.Sequential(*layers)
        net.classifier = classifier
        return net

    return make


def _convs(*widths: int, kernel: int = 3, norm: bool = False) -> list[nn.Module]:
    layers: list[nn.Module] = []
    before = 3
    for width in widths:
        layers.append(nn.Conv2d(before, width, kernel))
        layers += [nn.BatchNorm2d(width)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        before = width
    return layers


def _classifier(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 10))


VARIANTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "LeNet-5, 5 x 5": (
        _lenet((1, 6, 5), (6, 16, 5), (16 * 25, 120), (120, 84), (84, 10)), "lenet"
    ),
    "LeNet-5 for MNIST, 4 x 4": (
        _lenet((1, 6, 5), (6, 16, 5), (16 * 16, 120), (120, 84), (84, 10)), "lenet"
    ),
    "PyTorch's MNIST example, 12 x 12": (
        _lenet((1, 32, 3), (32, 64, 3), (9216, 128), (128, 10), names="conv conv fc fc"), "lenet"
    ),
    "one convolution and one layer": (_lenet((1, 6, 5), (6 * 4, 10), names="conv fc"), "lenet"),
    "three convolutions, pooled": (
        _lenet((3, 16, 3), (16, 32, 3), (32, 64, 3), (64, 10), names="conv conv conv fc"), "lenet"
    ),
    "AlexNet for CIFAR, 2 x 2": (
        _features(*_convs(64, 192, 384, 256), classifier=_classifier(256 * 4)), "vgg"
    ),
    "VGG for CIFAR, one linear layer": (
        _features(*_convs(64, 64, 128, 128, norm=True), classifier=nn.Linear(128, 10)), "vgg"
    ),
    "VGG with BatchNorm, 6 x 6": (
        _features(*_convs(64, 128, norm=True), classifier=_classifier(128 * 36)), "vgg"
    ),
    "VGG with PReLU for each channel": (
        _features(
            nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 9, 3), nn.PReLU(9),
            classifier=_classifier(9 * 49),
        ),
        "vgg",
    ),
    "VGG of named layers": (
        lambda: _named_vgg(), "vgg"
    ),
    "VGG of 12 layers of one width": (
        _features(*_convs(*[8] * 12, norm=True), classifier=nn.Linear(8, 10)), "vgg"
    ),
    "CIFAR ResNet": (lambda: nets.ResNet(cifar=True), "resnet-basic"),
    "ResNet-20, identity shortcuts": (lambda: nets.ResNet((16, 16, 16, 16)), "resnet-basic"),
    "ResNet without norms": (lambda: nets.ResNet(norm=False, bias=True), "resnet-basic"),
    "norms defined behind all layers of a block": (lambda: _convs_then_norms(), "resnet-basic"),
    "MLP with BatchNorm": (
        lambda: _named("net", nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)),
        "mlp",
    ),
    "MLP with LayerNorm": (
        lambda: _named("net", nn.Linear(4, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 3)),
        "mlp",
    ),
    "MLP of 12 layers of one width": (
        lambda: _named(
            "layers", *[m for _ in range(12) for m in (nn.Linear(9, 9), nn.ReLU())], nn.Linear(9, 3)
        ),
        "mlp",
    ),
    "C3D, a flattened 1 x 4 x 4": (
        _features(nn.Conv3d(3, 8, 3), nn.ReLU(), classifier=_classifier(8 * 16)), "vgg"
    ),
}  # fmt: skip


def _named(name: str, *layers: nn.Module) -> nn.Module:
    net = nn.Module()
    net.add_module(name, nn.Sequential(*layers))
    return net


def _named_vgg() -> nn.Module:
    net = _features(classifier=_classifier(9 * 4))()
    for at, (inner, outer) in enumerate([(3, 7), (7, 8), (8, 9)], start=1):
        net.features.add_module(f"conv{at}", nn.Conv2d(inner, outer, 3))
        net.features.add_module(f"bn{at}", nn.BatchNorm2d(outer))
    return net


def _convs_then_norms() -> nn.Module:
    net = nets.ResNet()
    for stage in (net.layer1, net.layer2, net.layer3):
        for block in stage:
            for name in ("bn1", "bn2"):
                norm = getattr(block, name)
                delattr(block, name)
                block.add_module(name, norm)
    return net


@pytest.mark.parametrize("title", VARIANTS)
def test_variants_that_people_train(title: str) -> None:
    make, family = VARIANTS[title]
    assert layer_graph("auto", stored(make())).source == f"family {family}"


def test_a_map_that_is_no_square_may_be_said_to_be_one_by_hand() -> None:
    net = _features(*_convs(8, 9), classifier=_classifier(9 * 7 * 5))()
    with pytest.raises(IncompatibleModels, match=r"35 times the 9.*--arch vgg"):
        layer_graph("auto", stored(net))
    graph = layer_graph("vgg", stored(net))
    assert str(graph.tensors["classifier.0.weight"].axes[1].expr) == "features.3 * 35"
    assert "channels first" in graph.assumes


def test_a_norm_without_statistics_behind_a_linear_layer_is_declared() -> None:
    make, _ = VARIANTS["MLP with LayerNorm"]
    graph = layer_graph("auto", stored(make()))
    assert graph.assumes.endswith("no skips, net.1 a LayerNorm over all units")


@pytest.mark.parametrize(
    "title", ["VGG of 12 layers of one width", "MLP of 12 layers of one width"]
)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_layers_of_one_width_run_by_their_numbers_however_files_list_them(title, parts) -> None:
    """Sorted by name, 10 comes before 2; in parts, each part is sorted. Sizes fit either way."""
    make, _ = VARIANTS[title]
    shapes = stored(make())
    by_number = [t.name for t in layer_graph("auto", shapes).ops if t.kind in ("linear", "conv")]
    names = list(shapes)
    size = -(-len(names) // parts)
    cut = [sorted(names[at : at + size]) for at in range(0, len(names), size)]
    listed = [name for part in cut for name in part]
    mixed = StoredShapes({n: shapes[n] for n in listed}, shapes.dtypes)
    graph = layer_graph("auto", mixed)
    assert [op.name for op in graph.ops if op.kind in ("linear", "conv")] == by_number
