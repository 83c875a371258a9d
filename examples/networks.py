"""Factories for --arch: the networks of the real pairs that the tests and benchmarks measure.

otfuse check cifar10-vit-0.safetensors --arch examples/networks.py:vit
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def vit(hidden: int = 160, layers: int = 6) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The small CIFAR-10 ViT (needs transformers), heads of 32, and an input."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=2 * hidden,
        image_size=32,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(4, 3, 32, 32)}


def vit4() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The same with two blocks fewer."""
    return vit(layers=4)


def mlpnet() -> tuple[nn.Module, torch.Tensor]:
    """The MNIST network of the paper."""
    widths = (784, 400, 200, 100, 10)
    net = nn.Sequential()
    for at in range(1, 5):
        net.add_module(f"fc{at}", nn.Linear(widths[at - 1], widths[at], bias=False))
        if at < 4:
            net.add_module(f"relu{at}", nn.ReLU())
    return net, torch.randn(4, 784)


VGG11 = (64, "pool", 64, "pool", 128, 128, "pool", 256, 256, "pool", 256, 512, "pool")
VGG9 = (64, "pool", 64, "pool", 128, 128, "pool", 256, "pool", 512, "pool")


class Vgg(nn.Module):
    """A VGG for 32x32 images, without biases; its widths are the `part`th part of what is given."""

    def __init__(self, widths: Sequence[int | str], part: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for given in widths:
            if isinstance(given, str):
                layers.append(nn.MaxPool2d(2))
            else:
                width = given // part
                layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.ReLU()]
                before = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        return self.classifier(self.features(x).flatten(1))


def vgg11half() -> tuple[nn.Module, torch.Tensor]:
    """The CIFAR-10 VGG11, at half the usual widths."""
    return Vgg(VGG11), torch.randn(4, 3, 32, 32)


def vgg11quarter() -> tuple[nn.Module, torch.Tensor]:
    """At half the widths of that."""
    return Vgg(VGG11, 2), torch.randn(4, 3, 32, 32)


def vgg9half() -> tuple[nn.Module, torch.Tensor]:
    """The CIFAR-10 VGG11 with two convolutions fewer."""
    return Vgg(VGG9), torch.randn(4, 3, 32, 32)


class Block(nn.Module):
    """A basic residual block."""

    def __init__(
        self, before: int, width: int, stride: int, norm: type[nn.Module] = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), norm(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """ReLU after the add."""
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (out + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """A CIFAR ResNet of a base width; with two blocks in every stage it is ResNet18."""

    def __init__(
        self, width: int = 16, blocks: int = 2, norm: type[nn.Module] = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = norm(width)
        before = width
        for at in range(4):
            stage = width << at
            stride = 2 if at else 1
            layers = [Block(before, stage, stride, norm)]
            layers += [Block(stage, stage, 1, norm) for _ in range(blocks - 1)]
            self.add_module(f"layer{at + 1}", nn.Sequential(*layers))
            before = stage
        self.linear = nn.Linear(before, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        x = self.bn1(self.conv1(x)).relu()
        for at in range(1, 5):
            x = getattr(self, f"layer{at}")(x)
        return self.linear(x.mean((2, 3)))


def resnet18w16() -> tuple[nn.Module, torch.Tensor]:
    """The CIFAR-10 ResNet18."""
    return ResNet(), torch.randn(4, 3, 32, 32)


def resnet10w16() -> tuple[nn.Module, torch.Tensor]:
    """The same with one block in every stage."""
    return ResNet(blocks=1), torch.randn(4, 3, 32, 32)


def resnet18w16plain() -> tuple[nn.Module, torch.Tensor]:
    """ResNet18 without BatchNorm, as the paper has it."""
    return ResNet(norm=nn.Identity), torch.randn(4, 3, 32, 32)


def resnet18w8plain() -> tuple[nn.Module, torch.Tensor]:
    """At half its widths."""
    return ResNet(8, norm=nn.Identity), torch.randn(4, 3, 32, 32)


def resnet18w32plain() -> tuple[nn.Module, torch.Tensor]:
    """At twice its widths."""
    return ResNet(32, norm=nn.Identity), torch.randn(4, 3, 32, 32)
