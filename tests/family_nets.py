"""Small modules with torchvision's key names, and transformers' models, for the family proofs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import nets


class DenseLayer(nn.Module):
    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inner), nn.Conv2d(inner, 5, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        y = self.conv1(self.norm1(torch.cat(features, 1)).relu())
        return self.conv2(self.norm2(y).relu())


class DenseBlock(nn.ModuleDict):
    def __init__(self, inner: int, growth: int, depth: int) -> None:
        super().__init__()
        for j in range(depth):
            self[f"denselayer{j + 1}"] = DenseLayer(inner + j * growth, growth)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self, depths: tuple[int, ...] = (2, 3, 1), growth: int = 4) -> None:
        super().__init__()
        width = 6
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, width, 3, 2, 1, bias=False),
            norm0=nn.BatchNorm2d(width),
            relu0=nn.ReLU(),
        )
        for i, depth in enumerate(depths, start=1):
            layers[f"denseblock{i}"] = DenseBlock(width, growth, depth)
            width += depth * growth
            if i < len(depths):
                layers[f"transition{i}"] = nn.Sequential(
                    OrderedDict(
                        norm=nn.BatchNorm2d(width),
                        relu=nn.ReLU(),
                        conv=nn.Conv2d(width, width // 2, 1, bias=False),
                    )
                )
                width //= 2
        layers["norm5"] = nn.BatchNorm2d(width)
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).relu().mean((2, 3)))


def _conv_norm(i: int, o: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    conv = nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU6())


class Inverted(nn.Module):
    def __init__(self, i: int, o: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = i * expand
        layers = [] if expand == 1 else [_conv_norm(i, wide, 1)]
        layers += [_conv_norm(wide, wide, 3, stride, wide), nn.Conv2d(wide, o, 1, bias=False)]
        self.conv = nn.Sequential(*layers, nn.BatchNorm2d(o))
        self.skip = stride == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.skip else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 4, 6, 6, 6, 10, 10, 12)) -> None:
        super().__init__()
        layers = [_conv_norm(3, widths[0], 3, 2), Inverted(widths[0], widths[1], 1, 1)]
        for i, o in pairwise(widths[1:]):
            layers.append(Inverted(i, o, 1 if i == o else 2, 3))
        layers.append(_conv_norm(widths[-1], 16, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width), Permute(0, 2, 3, 1),
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width), Permute(0, 3, 1, 2),
        )  # fmt: skip
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale * self.block(x)


class ConvNext(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (4, 6, 8), depths: tuple[int, ...] = (2, 1, 2)):
        super().__init__()
        stages: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, widths[0], 2, 2), LayerNorm2d(widths[0]))
        ]
        for at, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if at:
                before = widths[at - 1]
                stages.append(nn.Sequential(LayerNorm2d(before), nn.Conv2d(before, width, 2, 2)))
            stages.append(nn.Sequential(*(ConvNextBlock(width) for _ in range(depth))))
        self.features = nn.Sequential(*stages)
        self.classifier = nn.Sequential(
            LayerNorm2d(widths[-1]), nn.Flatten(1), nn.Linear(widths[-1], 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3), keepdim=True))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 8, 5)
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        pool = nn.functional.max_pool2d
        x = pool(self.conv2(pool(self.conv1(x).relu(), 2)).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


@dataclass(frozen=True)
class Case:
    """A network that a family must explain.

    Attributes:
        family: Which.
        make: Module, args and kwargs.
        config: What its config.json would say.
        rename: Old to new pieces of key names, in order: files that were written by others.
    """

    family: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]]
    config: Mapping[str, Any] = field(default_factory=dict)
    rename: tuple[tuple[str, str], ...] = ()


IMAGE = (2, 3, 16, 16)


def _own(family: str, make: Callable[[], nn.Module], shape: tuple[int, ...] = IMAGE) -> Case:
    return Case(family, lambda: (make(), (torch.randn(shape),), {}))


def _resnet(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nets.ResNet(**options)


OWN = {
    "mlp": _own("mlp", nets.Mlp, (4, 12)),
    "mlp-nobias": _own("mlp", lambda: nets.Mlp(bias=False), (4, 12)),
    "vgg": _own("vgg", lambda: nets.Vgg(norm=False)),
    "vgg-bn": _own("vgg", nets.Vgg),
    "lenet": _own("lenet", LeNet),
    "resnet-basic": _own("resnet-basic", _resnet(norm=False, bias=True)),
    "resnet-basic-bn": _own("resnet-basic", _resnet()),
    "resnet-basic-cifar": _own("resnet-basic", _resnet(cifar=True)),
    "resnet-bottleneck": _own("resnet-bottleneck", _resnet(widths=(6, 9, 12), bottleneck=True)),
    "resnet-bottleneck-same": _own("resnet-bottleneck", _resnet(bottleneck=True, cifar=True)),
    "densenet": _own("densenet", DenseNet),
    "densenet-single": _own("densenet", lambda: DenseNet((2,))),
    "mobilenet-v2": _own("mobilenet-v2", MobileNetV2),
    "mobilenet-v2-narrow": _own("mobilenet-v2", lambda: MobileNetV2((4, 4, 6, 8, 8))),
    "convnext": _own("convnext", ConvNext),
    "convnext-single": _own("convnext", lambda: ConvNext((4,), (3,))),
}
OWN["densenet-first-files"] = Case(
    "densenet",
    OWN["densenet"].make,
    rename=tuple((f".{part}{n}.", f".{part}.{n}.") for part in ("norm", "conv") for n in (1, 2)),
)


def _hf(family: str, model: str, rename: tuple[tuple[str, str], ...] = (), **options: Any) -> Case:
    settings = {**_SETTINGS[family], **options}

    def make() -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
        import transformers

        made = getattr(transformers, model)
        module = made(made.config_class(**settings))
        inputs: dict[str, Tensor] = {"input_ids": torch.randint(0, 19, (2, 7))}
        if family == "vit":
            inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
        return module, (), inputs

    return Case(family, make, {**settings, "architectures": [model]}, rename)


_COMMON = {
    "vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "pad_token_id": 0,
}  # fmt: skip
_SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {**_COMMON, "max_position_embeddings": 32},
    "gpt2": {"vocab_size": 19, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4,
             "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "llama": {**_COMMON, "max_position_embeddings": 32, "num_key_value_heads": 2,
              "bos_token_id": 1, "eos_token_id": 2},
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 24, "image_size": 16, "patch_size": 4, "num_labels": 3},
}  # fmt: skip

OLD_VIT = (
    ("layers.", "encoder.layer."),
    ("attention.q_proj", "attention.attention.query"),
    ("attention.k_proj", "attention.attention.key"),
    ("attention.v_proj", "attention.attention.value"),
    ("attention.o_proj", "attention.output.dense"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
)
OLD_NORMS = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))

HF = {
    "bert-sequence": _hf("bert", "BertForSequenceClassification"),
    "bert-tokens": _hf("bert", "BertForTokenClassification"),
    "bert-answers": _hf("bert", "BertForQuestionAnswering"),
    "bert-masked": _hf("bert", "BertForMaskedLM"),
    "bert-masked-untied": _hf("bert", "BertForMaskedLM", tie_word_embeddings=False),
    "bert-pretraining": _hf("bert", "BertForPreTraining"),
    "bert-backbone": _hf("bert", "BertModel"),
    "bert-gamma-beta": _hf("bert", "BertForSequenceClassification", OLD_NORMS),
    "gpt2": _hf("gpt2", "GPT2LMHeadModel"),
    "gpt2-untied": _hf("gpt2", "GPT2LMHeadModel", tie_word_embeddings=False),
    "gpt2-sequence": _hf("gpt2", "GPT2ForSequenceClassification"),
    "gpt2-backbone": _hf("gpt2", "GPT2Model"),
    "llama": _hf("llama", "LlamaForCausalLM"),
    "llama-tied": _hf("llama", "LlamaForCausalLM", tie_word_embeddings=True),
    "llama-all-heads": _hf("llama", "LlamaForCausalLM", num_key_value_heads=4),
    "llama-one-head": _hf("llama", "LlamaForCausalLM", num_key_value_heads=1),
    "llama-sequence": _hf("llama", "LlamaForSequenceClassification"),
    "llama-backbone": _hf("llama", "LlamaModel"),
    "mistral": _hf("llama", "MistralForCausalLM"),
    "qwen2": _hf("llama", "Qwen2ForCausalLM"),
    "qwen2-tied": _hf("llama", "Qwen2ForCausalLM", tie_word_embeddings=True),
    "vit": _hf("vit", "ViTForImageClassification"),
    "vit-backbone": _hf("vit", "ViTModel"),
    "vit-old-names": _hf("vit", "ViTForImageClassification", OLD_VIT),
    "vit-old-names-backbone": _hf("vit", "ViTModel", OLD_VIT),
}

CASES = {**OWN, **HF}
