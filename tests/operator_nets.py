"""Small networks around single operators, for the zoo: each with units that may be exchanged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Standardised(nn.Module):
    """Weight standardisation with and without a gain, as timm does; a norm of the batch."""

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


class Cells(nn.Module):
    """Recurrent cells in a loop: one begins at zero, one at what another layer made."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.first = nn.LSTMCell(4, 5 * k)
        self.start = nn.Linear(4, 6 * k)
        self.second = nn.GRUCell(5 * k, 6 * k)
        self.third = nn.RNNCell(6 * k, 3 * k, nonlinearity="relu", bias=False)
        self.out = nn.Linear(3 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.first.hidden_size)
        g = self.start(x[:, 0])
        r = None
        for t in range(x.shape[1]):
            h, c = self.first(x[:, t], (h, c))
            g = self.second(h, g)
            r = self.third(g, r)
        return self.out(r)


class SlotAttention(nn.Module):
    """Slots compete for inputs, and a GRU cell updates them (Locatello et al. 2020)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 4, 6 * k))
        self.q, self.k, self.v = (nn.Linear(w, 6 * k, bias=False) for w in (6 * k, 5, 5))
        self.update = nn.GRUCell(6 * k, 6 * k)
        self.norm = nn.LayerNorm(6 * k)
        self.inner, self.outer = nn.Linear(6 * k, 7 * k), nn.Linear(7 * k, 6 * k)
        self.out = nn.Linear(6 * k, 2)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots.expand(len(x), -1, -1)
        keys, values = self.k(x), self.v(x)
        for _ in range(2):
            shares = (keys @ self.q(self.norm(slots)).transpose(1, 2)).softmax(-1) + 1e-8
            seen = (shares / shares.sum(1, keepdim=True)).transpose(1, 2) @ values
            d = slots.shape[-1]
            slots = self.update(seen.reshape(-1, d), slots.reshape(-1, d)).reshape(slots.shape)
            slots = slots + self.outer(F.relu(self.inner(self.norm(slots))))
        return self.out(slots).mean(1)
