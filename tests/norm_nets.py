"""Small networks whose BatchNorms stand elsewhere than between a layer and its activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDE, NARROW = (12, 10), (8, 6)


class Behind(nn.Module):
    """Convolution, ReLU, BatchNorm, pooling; twice."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        first, second = widths
        self.conv1 = nn.Conv2d(3, first, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(first)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(second)
        self.head = nn.Linear(second, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm1(F.relu(self.conv1(x))), 2)
        x = self.norm2(F.relu(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class BehindPool(Behind):
    """Convolution, leaky ReLU, pooling, BatchNorm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(F.max_pool2d(F.leaky_relu(self.conv1(x)), 2))
        x = self.norm2(F.avg_pool2d(F.leaky_relu(self.conv2(x)), 2))
        return self.head(x.mean((2, 3)))


class Signal(nn.Module):
    """Of signals: convolution, ReLU, BatchNorm; a linear layer, ReLU, BatchNorm."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        first, second = widths
        self.conv1 = nn.Conv1d(3, first, 5)
        self.norm1 = nn.BatchNorm1d(first)
        self.conv2 = nn.Linear(first, second, bias=False)
        self.norm2 = nn.BatchNorm1d(second)
        self.head = nn.Linear(second, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.conv1(x.flatten(2)).relu()).mean(2)
        return self.head(self.norm2(self.conv2(x).relu()))


class Before(nn.Module):
    """Pre-activation: every BatchNorm reads the stream, or stands before its convolution."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        first, second = widths
        self.stem = nn.Conv2d(3, first, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(first)
        self.conv1 = nn.Conv2d(first, second, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(second)
        self.conv2 = nn.Conv2d(second, first, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(first)
        self.head = nn.Linear(first, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())
        return self.head(self.norm3(x).relu().mean((2, 3)))


class Dense(nn.Module):
    """Densely connected: a BatchNorm reads units of two layers side by side."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        first, second = widths
        self.stem = nn.Conv2d(3, first, 3, padding=1, bias=False)
        self.norm0 = nn.BatchNorm2d(first)
        self.norm1 = nn.BatchNorm2d(first)
        self.conv1 = nn.Conv2d(first, second, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(first + second)
        self.head = nn.Linear(first + second, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm0(self.stem(x)).relu(), 2)
        x = torch.cat([x, self.conv1(self.norm1(x).relu())], 1)
        return self.head(self.norm2(x).relu().mean((2, 3)))


class Sum(nn.Module):
    """A BatchNorm on the sum of two branches, and one behind its activation."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        first, second = widths
        self.near = nn.Conv2d(3, first, 3, padding=1, bias=False)
        self.far = nn.Conv2d(3, first, 5, padding=2, bias=False)
        self.norm1 = nn.BatchNorm2d(first)
        self.conv1 = nn.Conv2d(first, second, 3)
        self.norm2 = nn.BatchNorm2d(second)
        self.head = nn.Linear(second, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(F.relu(self.near(x) + self.far(x)))
        return self.head(self.norm2(F.relu(self.conv1(x))).mean((2, 3)))


NETS = {net.__name__: net for net in (Behind, BehindPool, Signal, Before, Dense, Sum)}


def _factory(net: type[nn.Module], widths: tuple[int, int]) -> tuple[nn.Module, torch.Tensor]:
    return net(widths), torch.randn(4, 3, 8, 8)


def narrow_behind() -> tuple[nn.Module, torch.Tensor]:
    """For `--arch`."""
    return _factory(Behind, NARROW)


def narrow_behindpool() -> tuple[nn.Module, torch.Tensor]:
    """For `--arch`."""
    return _factory(BehindPool, NARROW)


def narrow_signal() -> tuple[nn.Module, torch.Tensor]:
    """For `--arch`."""
    return _factory(Signal, NARROW)


def narrow_before() -> tuple[nn.Module, torch.Tensor]:
    """For `--arch`."""
    return _factory(Before, NARROW)


def narrow_dense() -> tuple[nn.Module, torch.Tensor]:
    """For `--arch`."""
    return _factory(Dense, NARROW)


def narrow_sum() -> tuple[nn.Module, torch.Tensor]:
    """For `--arch`."""
    return _factory(Sum, NARROW)
