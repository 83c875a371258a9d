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


class Graph(nn.Module):
    """Messages along edges, summed, averaged, weighed by attention; then one node of each graph.

    Units of the last hidden layer are taken in an order of their own: they stay in place.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.first, self.near = nn.Linear(4, 6 * k), nn.Linear(4, 6 * k)
        self.second = nn.Linear(6 * k, 5 * k)
        self.score = nn.Linear(10 * k, 1, bias=False)
        self.third = nn.Linear(5 * k, 7 * k)
        self.fourth = nn.Linear(7 * k, 8)
        self.register_buffer("order", torch.arange(8).flip(0))
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor, last: Tensor) -> Tensor:
        start, end = edges
        h = self.first(x)
        h = F.relu(torch.zeros_like(h).index_add(0, end, h[start]) + self.near(x))
        h = self.second(h)
        place = end[:, None].expand(-1, h.shape[1])
        mean = h.scatter_reduce(0, place, h.index_select(0, start), "mean")
        most = torch.zeros_like(h).index_reduce(0, end, h[start], "amax")
        h = F.elu(mean + most)
        score = self.score(torch.cat([h[start], h[end]], 1)).exp()
        total = x.new_zeros(len(x), 1).index_add(0, end, score)
        h = h.scatter_add(0, place, h[start] * score / total[end])
        h = F.elu(self.third(h))
        swapped = torch.zeros_like(h)
        swapped[last] = h.gather(0, last[:, None].expand(-1, h.shape[1]))
        h = F.elu(self.fourth(swapped + h.take_along_dim(last[:, None], 0).sum(0)))
        return self.out(h.gather(1, self.order.expand(len(h), -1)))


class Dora(nn.Module):
    """Directions and magnitudes apart, adapted by low-rank factors (Liu et al. 2024)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.base = nn.Linear(4, 6 * k)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(6 * k, 2))
        self.magnitude = nn.Parameter(torch.rand(6 * k) + 0.5)
        self.inner = nn.Linear(6 * k, 5 * k)
        self.out = nn.Linear(5 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.b @ self.a
        weight = (self.magnitude / torch.linalg.norm(weight, dim=1)).view(-1, 1) * weight
        x = F.relu(F.linear(x, weight, self.base.bias))
        whole = self.inner.weight / torch.linalg.matrix_norm(self.inner.weight, 2)
        return self.out(F.relu(F.linear(x, whole, self.inner.bias).cumsum(0)))


def edges() -> tuple[Tensor, ...]:
    """Features of nodes, where edges begin and end, a node of each graph."""
    return torch.randn(6, 4), torch.randint(0, 6, (2, 11)), torch.tensor([1, 4, 2, 0, 5, 3])


class Spectral(nn.Module):
    """Global filters on a grid (Rao et al. 2021), a Fourier operator in time, mixing as in FNet."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6 * k, 2, 2)
        self.filters = nn.Parameter(torch.randn(8, 5, 6 * k, 2))
        self.mix = nn.Linear(6 * k, 5 * k)
        self.real, self.imaginary = (nn.Parameter(torch.randn(5 * k, 7 * k)) for _ in range(2))
        self.inner, self.outer = nn.Linear(7 * k, 8 * k), nn.Linear(8 * k, 7 * k)
        self.still = nn.Linear(7 * k, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        f = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * torch.view_as_complex(self.filters)
        x = F.gelu(x + torch.fft.irfft2(f, s=x.shape[1:3], dim=(1, 2), norm="ortho"))
        x = F.gelu(self.mix(x)).flatten(1, 2)
        f = torch.fft.rfft(x, dim=1)
        f = torch.einsum("nti,io->nto", f, torch.complex(self.real, self.imaginary))
        x = F.gelu(torch.fft.irfft(f, n=x.shape[1], dim=1))
        x = x + self.outer(F.relu(self.inner(torch.fft.fft(x, dim=1).imag)))
        x = self.still(x.mean(1))
        return self.out(x * torch.fft.fft(x).real)


class Warped(nn.Module):
    """A spatial transformer on feature maps, then patches as columns and back."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5 * k, 3, padding=1)
        self.place = nn.Linear(5 * k, 6)
        self.patches = nn.Linear(5 * k * 4, 6 * k)
        self.whole = nn.Linear(6 * k, 7 * k * 4)
        self.out = nn.Conv2d(7 * k, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        place = self.place(x.mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(place, list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        side = x.shape[2:]
        columns = self.whole(F.relu(self.patches(F.unfold(x, 2, stride=2).transpose(1, 2))))
        return self.out(F.relu(F.fold(columns.transpose(1, 2), side, 2, stride=2)))


class Quantised(nn.Module):
    """Weights rounded by row or by column, activations by one grid or by one for each unit."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6 * k), nn.Linear(6 * k, 5 * k)
        for name, n in (("rows", 6 * k), ("columns", 6 * k), ("units", 5 * k), ("grid", 1)):
            self.register_buffer(name, torch.rand(n) + 0.1)
            self.register_buffer(f"{name}_zero", torch.randint(-3, 3, (n,), dtype=torch.int32))
        self.out = nn.Linear(5 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        by_channel = torch.fake_quantize_per_channel_affine
        weight = by_channel(self.first.weight, self.rows, self.rows_zero, 0, -128, 127)
        x = F.relu(F.linear(x, weight, self.first.bias))
        x = torch.fake_quantize_per_tensor_affine(x, self.grid, self.grid_zero, -128, 127)
        weight = by_channel(self.second.weight, self.columns, self.columns_zero, 1, -128, 127)
        x = F.silu(F.linear(x, weight, self.second.bias))
        return self.out(by_channel(x, self.units, self.units_zero, 1, -128, 127))


class Orthogonal(nn.Module):
    """A rotation of hidden units as a matrix exponential, an inverse, and factors that stay."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6 * k)
        self.turn = nn.Parameter(torch.randn(6 * k, 6 * k) * 0.3)
        self.mix = nn.Parameter(torch.randn(6 * k, 6 * k))
        self.second = nn.Linear(6 * k, 4)
        self.basis = nn.Parameter(torch.randn(4, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x) @ torch.linalg.matrix_exp(self.turn - self.turn.T))
        x = F.relu(x @ torch.linalg.inv(self.mix))
        return self.out(F.relu(self.second(x) @ torch.linalg.qr(self.basis)[0]))
