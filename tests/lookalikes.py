"""Networks with the names and shapes of a bundled family and another forward pass.

`DISGUISES` are operations without tensors that treat units as a row, not as a set: put behind a
layer of any network, they can't be seen in a file. `LOOKALIKES` are whole networks that are met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import nets
from family_nets import CASES, DenseNet, MobileNetV2

# Operations on the units of the last axis


def _ramp(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, x.shape[-1], dtype=x.dtype)


def _half(x: Tensor) -> int:
    return x.shape[-1] // 2


def _pairs(x: Tensor, pick: Callable[[Tensor, Tensor], list[Tensor]]) -> Tensor:
    """Neighbours two by two; a last one without a neighbour is left as it is."""
    whole = x.shape[-1] // 2 * 2
    one, other = x[..., :whole:2], x[..., 1:whole:2]
    both = torch.stack(pick(one, other), -1).flatten(-2)
    return torch.cat([both, x[..., whole:]], -1)


def _gated_by_half(x: Tensor) -> Tensor:
    at = _half(x)
    return torch.cat([x[..., :at] * x[..., at : 2 * at].sigmoid(), x[..., at:]], -1)


def _group_norm(x: Tensor) -> Tensor:
    return torch.cat([functional.layer_norm(p, p.shape[-1:]) for p in x.tensor_split(2, -1)], -1)


def _response_norm(x: Tensor) -> Tensor:
    squares = functional.pad(x.square(), (1, 1)).unfold(-1, 3, 1).sum(-1)
    return x / (1 + squares).sqrt()


def _blurred(x: Tensor) -> Tensor:
    return (x + x.roll(1, -1) + x.roll(-1, -1)) / 3


def _winner_of_each_half(x: Tensor) -> Tensor:
    return torch.cat([p * (p == p.amax(-1, keepdim=True)) for p in x.tensor_split(2, -1)], -1)


def _spectrum(x: Tensor) -> Tensor:
    return torch.fft.fft(x, dim=-1).real


def _shuffled(x: Tensor) -> Tensor:
    order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(1))
    return x[..., order] * _ramp(x)


Disguise = Callable[[Tensor], Tensor]

DISGUISES: dict[str, Disguise] = {
    "GroupSort": lambda x: _pairs(x, lambda a, b: [torch.minimum(a, b), torch.maximum(a, b)]),
    "maxout of neighbours": lambda x: _pairs(x, lambda a, b: [torch.maximum(a, b), a]),
    "cumulative sum": lambda x: x.cumsum(-1),
    "cumulative maximum": lambda x: x.cummax(-1).values,
    "local response norm": _response_norm,
    "group norm without parameters": _group_norm,
    "softmax in two groups": lambda x: torch.cat(
        [p.softmax(-1) for p in x.tensor_split(2, -1)], -1
    ),
    "winner of each half": _winner_of_each_half,
    "channel shuffle and gains": _shuffled,
    "running difference": lambda x: x - x.roll(1, -1) * 0.5,
    "blur across units": _blurred,
    "a gain for each position": lambda x: x * _ramp(x),
    "an offset for each position": lambda x: x + _ramp(x),
    "an exponent for each position": lambda x: x.sign() * x.abs() ** _ramp(x),
    "one half gates the other": _gated_by_half,
    "ReLU on one half, tanh on the other": lambda x: torch.cat(
        [x[..., : _half(x)].relu(), x[..., _half(x) :].tanh()], -1
    ),
    "signs that alternate": lambda x: x * (1 - 2 * (torch.arange(x.shape[-1]) % 2)),
    "a mask on the first third": lambda x: x * (torch.arange(x.shape[-1]) >= x.shape[-1] // 3),
    "mirrored and added": lambda x: x + x.flip(-1).relu(),
    "the first unit gates all": lambda x: x * x[..., :1].sigmoid(),
    "the last unit added to all": lambda x: x + x[..., -1:],
    "Fourier transform": _spectrum,
    "steps that differ by position": lambda x: x + (x * _ramp(x)).sin(),
}


@contextmanager
def disguised(module: nn.Module, place: str, axis: int, disguise: Disguise) -> Iterator[None]:
    """Let `disguise` act on the units of axis `axis` behind the submodule `place`."""

    def behind(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return disguise(output.movedim(axis, -1)).movedim(-1, axis)

    handle = module.get_submodule(place).register_forward_hook(behind)
    try:
        yield
    finally:
        handle.remove()


# Where free units can be met in one network of each family: the submodule and the axis.
PLACES: dict[str, tuple[str, int]] = {
    "mlp": ("fc1", -1),
    "vgg-bn": ("features.1", 1),
    "lenet": ("conv1", 1),
    "resnet-basic-bn": ("layer1.0.bn1", 1),
    "resnet-bottleneck": ("layer2.1.bn2", 1),
    "densenet": ("features.denseblock1.denselayer1.norm2", 1),
    "mobilenet-v2": ("features.2.conv.0.1", 1),
    "convnext": ("features.1.0.block.3", -1),
    "bert-sequence": ("bert.encoder.layer.0.intermediate.dense", -1),
    "gpt2": ("transformer.h.0.mlp.c_fc", -1),
    "llama": ("model.layers.0.mlp.gate_proj", -1),
    "vit": ("vit.layers.0.mlp.fc1", -1),
}


def family_member(name: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """A real network of a family, in evaluation mode, with its inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, args, kwargs = CASES[name].make()
    return module.eval(), args, kwargs


# Whole networks


@dataclass(frozen=True)
class Lookalike:
    """A network that isn't what its names say.

    Attributes:
        family: What its names say.
        make: The module.
        shape: Of its inputs.
        words: What the refusal must say; none for one that can only be declared.
        config: What its config.json says.
        sorted: Its file lists the names alphabetically.
        harmless: Its function is kept all the same; names and shapes can't tell that either.
    """

    family: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    sorted: bool = False
    harmless: bool = False


class Forward(nn.Module):
    """Named layers and a function that runs them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def chain(run: Callable[[Any, Tensor], Tensor], **sizes: tuple[int, ...]) -> Callable[[], Forward]:
    """Layers by sizes: (in, out) a linear layer, (in, out, kernel) a padded convolution."""

    def layer(size: tuple[int, ...]) -> nn.Module:
        if len(size) == 2:
            return nn.Linear(*size)
        return nn.Conv2d(*size, padding=size[2] // 2)

    return lambda: Forward(run, **{name: layer(size) for name, size in sizes.items()})


def with_norm(
    module: nn.Module, make: Callable[[int], nn.Module], kind: type[nn.Module] = nn.BatchNorm2d
) -> nn.Module:
    """The network with another norm wherever it has one."""
    for name, child in list(module.named_children()):
        if isinstance(child, kind):
            setattr(module, name, make(child.num_features))
        else:
            with_norm(child, make, kind)
    return module


def groups(units: int) -> nn.Module:
    """GroupNorm of as few groups as divide the units, more than one."""
    return nn.GroupNorm(next(n for n in range(2, units + 1) if units % n == 0), units)


class Standardised(nn.Conv2d):
    """Weight standardisation: nothing of it is stored."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        std = self.weight.std((1, 2, 3), keepdim=True)
        weight = (self.weight - mean) / (std + 1e-5)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding)


class StandardisedByParts(nn.Conv2d):
    """The same over each half of the input channels."""

    def forward(self, x: Tensor) -> Tensor:
        halves = self.weight.tensor_split(2, 1)
        weight = torch.cat([w - w.mean((1, 2, 3), keepdim=True) for w in halves], 1)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding)


def standardised(module: nn.Module, kind: type[nn.Conv2d] = Standardised) -> nn.Module:
    for layer in module.modules():
        if type(layer) is nn.Conv2d and layer.in_channels > 3:
            layer.__class__ = kind
    return module


class Adding(nn.Sequential):
    """A Sequential that adds what goes in, wherever it fits."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            y = layer(x)
            x = x + y if x.shape == y.shape else y
        return x


class AddingMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()]
        self.net = Adding(*layers, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _classifier(factor: int, classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(7 * factor, 9), nn.ReLU(), nn.Linear(9, classes))


class Vgg(nn.Module):
    """Features and a classifier, and what lies between them."""

    def __init__(
        self, between: Callable[[Tensor], Tensor], factor: int, features: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.features = features or nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU(),
        )  # fmt: skip
        self.between = between
        self.classifier = _classifier(factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.between(self.features(x)))


def _max_and_mean(x: Tensor) -> Tensor:
    return torch.cat([x.amax((2, 3)), x.mean((2, 3))], 1)


def _pyramid(*sizes: int) -> Callable[[Tensor], Tensor]:
    pool = functional.adaptive_avg_pool2d
    return lambda x: torch.cat([pool(x, n).flatten(1) for n in sizes], 1)


def _four_statistics(x: Tensor) -> Tensor:
    parts = [x.amax((2, 3)), x.mean((2, 3)), x.amin((2, 3)), x.std((2, 3))]
    return torch.cat(parts, 1)


def _nhwc(x: Tensor) -> Tensor:
    return functional.adaptive_avg_pool2d(x, 2).permute(0, 2, 3, 1).flatten(1)


def _repeated(x: Tensor) -> Tensor:
    return x.mean((2, 3)).repeat(1, 4)


def _crelu_features() -> nn.Module:
    """A convolution whose positive and negative parts the next one reads."""

    class Rectified(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            return self[1](torch.cat([x.relu(), (-x).relu()], 1)).relu()

    return Rectified(nn.Conv2d(3, 6, 3), nn.Conv2d(12, 7, 3))


class PreActivation(nn.Module):
    """ResNet of one width with its norm in front of each convolution, the last one called bn1."""

    def __init__(self, width: int = 6, *, inner_first: bool = False) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        self.conv1 = conv(3, width)
        for stage in (1, 2):
            blocks = []
            for _ in range(2):
                block = nn.Module()
                parts = ["bn1", "conv1", "bn2", "conv2"]
                for name in parts if inner_first else ["conv1", "bn1", "conv2", "bn2"]:
                    block.add_module(
                        name, nn.BatchNorm2d(width) if name.startswith("bn") else conv(width, width)
                    )
                blocks.append(block)
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.bn1 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for block in (*self.layer1, *self.layer2):
            y = block.conv1(block.bn1(x).relu())
            x = x + block.conv2(block.bn2(y).relu())
        return self.fc(self.bn1(x).relu().mean((2, 3)))


class TwoHeads(nets.ResNet):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)


class TwoShortcuts(nets.ResNet):
    def __init__(self) -> None:
        super().__init__()
        for block in (self.layer2[0], self.layer3[0]):
            conv = block.downsample[0]
            block.shortcut = nn.Sequential(
                nn.Conv2d(conv.in_channels, conv.out_channels, 1, bias=False),
                nn.BatchNorm2d(conv.out_channels),
            )


def without_block() -> nn.Module:
    """Blocks 0 and 2 of a stage: what stood between them may still run."""
    net = nets.ResNet()
    children = dict(net.layer1.named_children())
    net.layer1 = nn.Sequential()
    net.layer1.add_module("0", children["0"])
    net.layer1.add_module("2", children["1"])
    return net


IMAGE = (2, 3, 16, 16)
GROUP_NORM = ("without running statistics", "BatchNorm")


def _vae(hidden: int, code: int) -> Callable[[], Forward]:
    def run(net: Any, x: Tensor) -> Tensor:
        h = net.fc1(x).relu()
        return net.fc4(net.fc3(net.fc21(h) + (0.5 * net.fc22(h)).exp()).relu()).sigmoid()

    sizes = {"fc1": (12, hidden), "fc21": (hidden, code), "fc22": (hidden, code)}
    return chain(run, **sizes, fc3=(code, hidden), fc4=(hidden, 12))


def _two_heads(net: Any, x: Tensor) -> Tensor:
    x = net.fc1(x).relu()
    return torch.cat([net.fc2(x), net.fc3(x)], 1)


def _named_heads(net: Any, x: Tensor) -> Tensor:
    x = net.fc1(net.conv1(x).relu().mean((2, 3))).relu()
    return torch.cat([net.fc_mu(x), net.fc_logvar(x)], 1)


def _paired(net: Any, x: Tensor) -> Tensor:
    one, other = (net.fc1(part).relu() for part in x.chunk(2, 1))
    return net.fc3(net.fc2(torch.cat([one, other], 1)).relu())


def _crelu(net: Any, x: Tensor) -> Tensor:
    x = net.fc1(x)
    return net.fc3(net.fc2(torch.cat([x.relu(), (-x).relu()], 1)).relu())


def _max_mean_lenet(net: Any, x: Tensor) -> Tensor:
    x = net.conv2(net.conv1(x).relu()).relu()
    return net.fc2(net.fc1(_max_and_mean(x)).relu())


def _parallel(net: Any, x: Tensor) -> Tensor:
    x = net.conv1(x).relu()
    x = net.conv2_a(x).relu() + net.conv2_b(x).relu()
    return net.fc1(x.mean((2, 3)))


def _in_turn(*names: str) -> Callable[[Any, Tensor], Tensor]:
    """Layers one after the other, each but the last followed by a cumulative sum."""

    def run(net: Any, x: Tensor) -> Tensor:
        for name in names[:-1]:
            layer = net.get_submodule(name)
            if isinstance(layer, nn.Linear) and x.dim() == 4:
                x = x.mean((2, 3))
            elif not isinstance(layer, nn.Linear) and x.dim() == 2:
                x = x[..., None, None]
            x = layer(x).relu().cumsum(1)
        x = x.mean((2, 3)) if x.dim() == 4 else x
        return net.get_submodule(names[-1])(x)

    return run


def _transformer(model: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, model)
        settings = {
            "vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 24, "pad_token_id": 0,
            "max_position_embeddings": 32, "head_dim": 8, **options,
        }  # fmt: skip
        return made(made.config_class(**settings))

    return make


def _groups_in_resnet(**options: Any) -> Callable[[], nn.Module]:
    return lambda: with_norm(nets.ResNet(**options), groups)


LOOKALIKES: dict[str, Lookalike] = {
    # Norms
    "ResNet with GroupNorm": Lookalike(
        "resnet-basic", _groups_in_resnet(), IMAGE, ("bn1.weight, bn1.bias", *GROUP_NORM)
    ),
    "CIFAR ResNet with GroupNorm": Lookalike(
        "resnet-basic", _groups_in_resnet(cifar=True), IMAGE, ("bn1.weight", *GROUP_NORM)
    ),
    "bottleneck ResNet with GroupNorm": Lookalike(
        "resnet-bottleneck",
        _groups_in_resnet(widths=(6, 9, 12), bottleneck=True, middle=4),
        IMAGE,
        ("bn1.weight", *GROUP_NORM),
    ),
    "features/classifier net with GroupNorm": Lookalike(
        "vgg",
        lambda: with_norm(nets.Vgg(widths=(6, 8, 9)), groups),
        IMAGE,
        ("features.1.weight", *GROUP_NORM),
    ),
    "VGG with InstanceNorm": Lookalike(
        "vgg",
        lambda: with_norm(nets.Vgg(), lambda n: nn.InstanceNorm2d(n, affine=True)),
        IMAGE,
        ("features.1.weight", *GROUP_NORM),
        harmless=True,
    ),
    "VGG with BatchNorm of the batch": Lookalike(
        "vgg",
        lambda: with_norm(nets.Vgg(), lambda n: nn.BatchNorm2d(n, track_running_stats=False)),
        IMAGE,
        ("features.1.weight", *GROUP_NORM),
        harmless=True,
    ),
    "DenseNet with GroupNorm": Lookalike(
        "densenet",
        lambda: with_norm(DenseNet(growth=4), groups),
        IMAGE,
        ("features.norm0.weight", *GROUP_NORM),
    ),
    "MobileNetV2 with GroupNorm": Lookalike(
        "mobilenet-v2",
        lambda: with_norm(MobileNetV2(), groups),
        IMAGE,
        ("features.0.1.weight", *GROUP_NORM),
    ),
    "weight-standardised ResNet": Lookalike(
        "resnet-basic", lambda: standardised(nets.ResNet()), IMAGE, harmless=True
    ),
    "weight-standardised VGG": Lookalike(
        "vgg", lambda: standardised(nets.Vgg()), IMAGE, harmless=True
    ),
    "ResNet standardised by parts": Lookalike(
        "resnet-basic", lambda: standardised(nets.ResNet(), StandardisedByParts), IMAGE
    ),
    "pre-activation ResNet, last norm bn1": Lookalike(
        "resnet-basic", PreActivation, IMAGE, ("bn1.weight is listed far behind conv1.weight",)
    ),
    "pre-activation ResNet, norms defined first": Lookalike(
        "resnet-basic", lambda: PreActivation(inner_first=True), IMAGE, ("bn1.weight is listed",)
    ),
    "pre-activation ResNet, sorted names": Lookalike(
        "resnet-basic", PreActivation, IMAGE, sorted=True
    ),
    # Heads and branches
    "PyTorch's VAE": Lookalike("mlp", _vae(10, 2), (4, 12), ("fc22.weight", "5 times the 2")),
    "VAE with a code as wide as it is deep": Lookalike(
        "mlp", _vae(6, 6), (4, 12), ("fc1.weight", "fc21", "not the number after fc1")
    ),
    "actor and critic": Lookalike(
        "mlp",
        chain(_two_heads, fc1=(4, 64), fc2=(64, 2), fc3=(64, 1)),
        (3, 4),
        ("fc3.weight", "32 times the 2"),
    ),
    "two heads of one width": Lookalike(
        "mlp",
        chain(_two_heads, fc1=(4, 6), fc2=(6, 6), fc3=(6, 6)),
        (3, 4),
        ("fc1.weight [6, 4], fc2.weight [6, 6]", "read the same units"),
    ),
    "heads with names": Lookalike(
        "lenet",
        chain(_named_heads, conv1=(3, 6, 3), fc1=(6, 8), fc_mu=(8, 8), fc_logvar=(8, 8)),
        IMAGE,
        ("fc_mu.weight", "no number"),
    ),
    "parallel convolutions _a and _b": Lookalike(
        "lenet",
        chain(_parallel, conv1=(3, 6, 3), conv2_a=(6, 6, 3), conv2_b=(6, 6, 3), fc1=(6, 5)),
        IMAGE,
        ("conv2_a.weight", "no number"),
    ),
    "ResNet with fc and linear": Lookalike(
        "resnet-basic", TwoHeads, IMAGE, ("fc and linear are both there",), harmless=True
    ),
    "ResNet with downsample and shortcut": Lookalike(
        "resnet-basic",
        TwoShortcuts,
        IMAGE,
        ("downsample.0", "shortcut.0", "both there"),
        harmless=True,
    ),
    "ResNet without block 1": Lookalike(
        "resnet-basic",
        without_block,
        IMAGE,
        ("layer1.2.conv2", "layer1.0.conv2", "missing"),
        harmless=True,
    ),
    "layers 1, 3 and 4": Lookalike(
        "mlp",
        chain(_in_turn("fc1", "fc3", "fc4"), fc1=(12, 9), fc3=(9, 8), fc4=(8, 5)),
        (4, 12),
        ("fc3.weight", "fc3 is not the number after fc1"),
    ),
    # Branches put together
    "max and mean pooling": Lookalike(
        "vgg", lambda: Vgg(_max_and_mean, 2), IMAGE, ("classifier.0.weight", "2 times the 7")
    ),
    "max and mean pooling, LeNet": Lookalike(
        "lenet",
        chain(_max_mean_lenet, conv1=(3, 6, 3), conv2=(6, 7, 3), fc1=(14, 9), fc2=(9, 5)),
        IMAGE,
        ("fc1.weight", "2 times the 7", "--arch lenet"),
    ),
    "spatial pyramid of 1 and 4": Lookalike(
        "vgg", lambda: Vgg(_pyramid(1, 2), 5), IMAGE, ("classifier.0.weight", "5 times the 7")
    ),
    "spatial pyramid of 1, 4 and 16": Lookalike(
        "vgg", lambda: Vgg(_pyramid(1, 2, 4), 21), IMAGE, ("classifier.0.weight", "21 times the 7")
    ),
    "Siamese pair": Lookalike(
        "mlp",
        chain(_paired, fc1=(6, 8), fc2=(16, 7), fc3=(7, 1)),
        (4, 12),
        ("fc2.weight", "2 times the 8"),
    ),
    "CReLU between linear layers": Lookalike(
        "mlp",
        chain(_crelu, fc1=(12, 8), fc2=(16, 7), fc3=(7, 5)),
        (4, 12),
        ("fc2.weight", "2 times the 8"),
    ),
    "CReLU between convolutions": Lookalike(
        "vgg",
        lambda: Vgg(lambda x: x.mean((2, 3)), 1, _crelu_features()),
        IMAGE,
        ("features.1.weight", "12 positions"),
    ),
    "four statistics": Lookalike("vgg", lambda: Vgg(_four_statistics, 4), IMAGE),
    "NHWC flatten": Lookalike("vgg", lambda: Vgg(_nhwc, 4), IMAGE),
    "repeated features": Lookalike("vgg", lambda: Vgg(_repeated, 4), IMAGE),
    "Sequential that adds its input, MLP": Lookalike("mlp", AddingMlp, (4, 12)),
    "Sequential that adds its input, VGG": Lookalike(
        "vgg",
        lambda: Vgg(
            lambda x: x.mean((2, 3)),
            1,
            Adding(
                nn.Conv2d(3, 7, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(7, 7, 3, padding=1),
                nn.ReLU(),
            ),
        ),
        IMAGE,
    ),
    # Chains read backwards, or that aren't chains
    "a convolution behind a linear layer": Lookalike(
        "mlp",
        lambda: Forward(
            _in_turn("0", "2", "4"),
            **{"0": nn.Linear(12, 6), "2": nn.Conv2d(6, 5, 1), "4": nn.Linear(5, 3)},
        ),
        (4, 12),
        ("2.weight", "a convolution behind the linear layer"),
    ),
    "an upsampling kernel": Lookalike(
        "vgg",
        lambda: Vgg(
            lambda x: x.mean((2, 3)),
            1,
            nn.Sequential(nn.Conv2d(3, 7, 3), nn.ReLU(), nn.ConvTranspose2d(7, 7, 2)),
        ),
        IMAGE,
        ("features.2.weight", "even kernel"),
    ),
    # What config.json says
    "Gemma": Lookalike(
        "llama",
        _transformer("GemmaForCausalLM"),
        (2, 7),
        ("gemma", "llama, mistral, qwen2"),
        {"model_type": "gemma"},
        harmless=True,
    ),
    "Cohere": Lookalike(
        "llama",
        _transformer("CohereForCausalLM"),
        (2, 7),
        ("cohere", "llama, mistral, qwen2"),
        {"model_type": "cohere"},
        harmless=True,
    ),
    "Olmo": Lookalike(
        "llama",
        _transformer("OlmoForCausalLM"),
        (2, 7),
        ("olmo", "llama, mistral, qwen2"),
        {"model_type": "olmo"},
        harmless=True,
    ),
}
