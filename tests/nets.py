"""Small real modules with the key names that the bundled families know, and twins of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

StateDict = dict[str, torch.Tensor]


class Mlp(nn.Module):
    """fc1..fc4 with ReLU, with or without biases."""

    def __init__(self, widths: tuple[int, ...] = (12, 9, 8, 7, 5), bias: bool = True) -> None:
        super().__init__()
        for at, (i, o) in enumerate(pairwise(widths), start=1):
            self.add_module(f"fc{at}", nn.Linear(i, o, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self.children())
        for layer in layers[:-1]:
            x = layer(x).relu()
        return layers[-1](x)


class Vgg(nn.Module):
    """torchvision's names: features.N, classifier.N, flatten of 7x7."""

    def __init__(self, widths: tuple[int, ...] = (6, 8, 7), norm: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in widths:
            layers.append(nn.Conv2d(before, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width)] if norm else []
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            before = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(before * 49, 11), nn.ReLU(), nn.Dropout(), nn.Linear(11, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class Block(nn.Module):
    """A basic or bottleneck residual block, torchvision's or the CIFAR nets' names."""

    def __init__(
        self, i: int, o: int, middle: int, *, bottleneck: bool, norm: bool, bias: bool, short: str
    ) -> None:
        super().__init__()
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        widths = (i, *(middle,) * (len(kernels) - 1), o)
        self.depth = len(kernels)
        for at, kernel in enumerate(kernels, start=1):
            conv = nn.Conv2d(widths[at - 1], widths[at], kernel, padding=kernel // 2, bias=bias)
            self.add_module(f"conv{at}", conv)
            if norm:
                self.add_module(f"bn{at}", nn.BatchNorm2d(widths[at]))
        self.short = short
        if i != o:
            parts: list[nn.Module] = [nn.Conv2d(i, o, 1, bias=bias)]
            parts += [nn.BatchNorm2d(o)] if norm else []
            self.add_module(short, nn.Sequential(*parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for at in range(1, self.depth + 1):
            out = getattr(self, f"conv{at}")(out)
            if hasattr(self, f"bn{at}"):
                out = getattr(self, f"bn{at}")(out)
            out = out.relu() if at < self.depth else out
        side = getattr(self, self.short)(x) if hasattr(self, self.short) else x
        return (out + side).relu()


class ResNet(nn.Module):
    """Three stages of two blocks; `cifar` chooses the names shortcut/linear over downsample/fc."""

    def __init__(
        self,
        widths: tuple[int, ...] = (6, 6, 9, 12),
        middle: int = 5,
        *,
        bottleneck: bool = False,
        norm: bool = True,
        bias: bool = False,
        cifar: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=bias)
        if norm:
            self.bn1 = nn.BatchNorm2d(widths[0])
        short = "shortcut" if cifar else "downsample"
        options = {"bottleneck": bottleneck, "norm": norm, "bias": bias, "short": short}
        for at, (i, o) in enumerate(pairwise(widths), start=1):
            blocks = [Block(i, o, middle, **options), Block(o, o, middle, **options)]
            self.add_module(f"layer{at}", nn.Sequential(*blocks))
        self.stages = len(widths) - 1
        self.head = "linear" if cifar else "fc"
        self.add_module(self.head, nn.Linear(widths[-1], 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        x = (self.bn1(x) if hasattr(self, "bn1") else x).relu()
        for at in range(1, self.stages + 1):
            x = getattr(self, f"layer{at}")(x)
        return getattr(self, self.head)(x.mean((2, 3)))


class TwoBranches(nn.Module):
    """A net no family knows: two convolution branches, added, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.left = nn.Conv2d(6, 8, 3, padding=1)
        self.right_in = nn.Conv2d(6, 7, 1)
        self.right_out = nn.Conv2d(7, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = self.left(x) + self.right_out(self.right_in(x).relu())
        x = nn.functional.adaptive_avg_pool2d(self.norm(x).relu(), 2)
        return self.head(x.flatten(1))


TWO_BRANCHES_SPEC = """\
act: relu
layers:
  stem: s <- in
  left: b <- s
  right_in: r <- s
  right_out: b <- r
  norm: b
  head: out <- b * 4
"""

IMAGE = (2, 3, 16, 16)


def zoo() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Name to (module with random weights and statistics, input shape)."""
    nets: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "mlp": (Mlp(), (4, 12)),
        "mlp-nobias": (Mlp(bias=False), (4, 12)),
        "vgg": (Vgg(norm=False), IMAGE),
        "vgg-bn": (Vgg(), IMAGE),
    }
    for bottleneck in (False, True):
        for norm in (False, True):
            widths = (6, 9, 12) if bottleneck else (6, 6, 9, 12)
            name = f"resnet-{'bottleneck' if bottleneck else 'basic'}{'-bn' if norm else ''}"
            net = ResNet(widths, bottleneck=bottleneck, norm=norm, bias=not norm, cifar=norm)
            nets[name] = (net, IMAGE)
    for at, (net, _) in enumerate(nets.values()):
        randomise(net, at)
    return nets


def randomise(net: nn.Module, seed: int) -> nn.Module:
    """O(1) weights and non-trivial statistics, so that a wrong axis can't hide."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in net.state_dict().items():
        if not tensor.is_floating_point():
            tensor.fill_(7)
        elif name.endswith("running_var"):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
        elif tensor.dim() > 1:
            fan = tensor[0].numel()
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (2 / fan) ** 0.5)
        else:
            tensor.copy_(0.7 + 0.5 * torch.randn(tensor.shape, generator=generator))
    return net.eval()


def state(net: nn.Module) -> StateDict:
    return OrderedDict((k, v.clone()) for k, v in net.state_dict().items())


def run(
    net: nn.Module, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> torch.Tensor:
    """Output of the architecture with other weights, on fixed inputs."""
    before = state(net)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(99))
    try:
        net.load_state_dict(dict(tensors))
        with torch.no_grad():
            return net.eval()(inputs)
    finally:
        net.load_state_dict(before)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())


def from_factory(arch, seed):
    """The network of `file.py:factory` with weights by seed, its BatchNorms as if trained."""
    from otfuse_cli.running.factory import build

    torch.manual_seed(seed)
    module = build(arch, device="cpu").module
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.2)
            norm.running_mean.normal_(std=0.2)
            norm.running_var.uniform_(0.5, 2)
    return module.eval()
