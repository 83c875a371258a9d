"""The network of otfuse's bundled pair, for `--arch`: yours goes here."""

from __future__ import annotations

import torch
from torch import nn


class Digits(nn.Module):
    """Linear layers with ReLU between them, on 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.flatten(1))


def make_net() -> tuple[nn.Module, torch.Tensor]:
    """A network and example inputs; its weights don't matter."""
    return Digits(), torch.rand(4, 64)
