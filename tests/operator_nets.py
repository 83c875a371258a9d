"""Small networks around single operators, for the zoo: each with units that may be exchanged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Standardised(nn.Module):
    """Weight standardisation with and without a gain, as timm writes it; and a norm of the batch."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5 * k, 3)
        self.body = nn.Conv2d(5 * k, 6 * k, 3)
        self.gain = nn.Parameter(torch.rand(6 * k, 1, 1, 1))
        self.norm = nn.BatchNorm2d(6 * k, track_running_stats=False)
        self.out = nn.Linear(6 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        stem = F.batch_norm(
            self.stem.weight.reshape(1, self.stem.out_channels, -1), None, None, training=True
        )
        x = F.relu(F.conv2d(x, stem.reshape_as(self.stem.weight), self.stem.bias))
        body = F.batch_norm(
            self.body.weight.reshape(1, self.body.out_channels, -1), None, None,
            weight=(self.gain * 0.7).view(-1), training=True,
        )  # fmt: skip
        x = F.silu(F.conv2d(x, body.reshape_as(self.body.weight), self.body.bias))
        return self.out(self.norm(x).mean((2, 3)))
