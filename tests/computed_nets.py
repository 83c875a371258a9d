"""Networks with tensors that follow from their weights, kept beside them; `refresh` makes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Hidden(nn.Module):
    """Two layers whose hidden units may be exchanged; what lies beside the first one differs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())

    def keep(self, owner: nn.Module, name: str, value: Tensor) -> None:
        """A buffer with this value, new or in place."""
        if name in owner._buffers:
            owner._buffers[name].copy_(value)
        else:
            owner.register_buffer(name, value.detach().clone())

    def refresh(self) -> None:
        """Compute what is kept."""


class Copy(Hidden):
    def refresh(self) -> None:
        self.keep(self.first, "weight_copy", self.first.weight)


class Turned(Hidden):
    def refresh(self) -> None:
        self.keep(self.first, "cached", self.first.weight.T.contiguous())


class Norms(Hidden):
    def refresh(self) -> None:
        self.keep(self.first, "row_norm", self.first.weight.norm(dim=1))


class Squares(Hidden):
    def refresh(self) -> None:
        self.keep(self.last, "length2", self.last.weight.square().sum(0))


class Units(Hidden):
    def refresh(self) -> None:
        self.keep(self.first, "direction", nn.functional.normalize(self.first.weight, dim=1))


class Gained(nn.Module):
    """Weight normalisation with the weight that it makes kept as a buffer."""

    keep = Hidden.keep

    def __init__(self) -> None:
        super().__init__()
        self.g, self.v = nn.Parameter(torch.rand(10, 1) + 0.5), nn.Parameter(torch.randn(10, 6))
        self.last = nn.Linear(10, 4)

    def made(self) -> Tensor:
        return self.v * (self.g / self.v.norm(dim=1, keepdim=True))

    def refresh(self) -> None:
        self.keep(self, "weight", self.made())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.linear(x, self.made()).relu())


class Cached(Gained):
    """The same, run on what is kept: gain and direction are for training."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.linear(x, self.weight).relu())


class Folded(nn.Module):
    """A convolution, its BatchNorm, and both in one for deployment."""

    keep = Hidden.keep

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 4)

    def refresh(self) -> None:
        gain = self.bn.weight / (self.bn.running_var + self.bn.eps).sqrt()
        self.keep(self, "fused_weight", self.conv.weight * gain[:, None, None, None])
        self.keep(self, "fused_shift", self.bn.bias - self.bn.running_mean * gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bn(self.conv(x)).relu().mean((2, 3)))


class Codebook(nn.Module):
    """Vector quantisation (van den Oord et al. 2017): codes are sums by uses, both kept."""

    keep = Hidden.keep

    def __init__(self, *, columns: bool) -> None:
        super().__init__()
        self.columns = columns
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("embed", torch.randn(8, 7) if columns else torch.randn(1, 7, 8))
        self.register_buffer(
            "cluster_size", torch.rand(7) + 0.5 if columns else torch.rand(1, 7) + 0.5
        )

    def refresh(self) -> None:
        uses = self.cluster_size if self.columns else self.cluster_size[..., None]
        self.keep(self, "embed_avg", self.embed * uses)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        codes = self.embed.T if self.columns else self.embed[0]
        far = h.square().sum(1, keepdim=True) - 2 * h @ codes.T + codes.square().sum(1)
        return self.decode(nn.functional.embedding((-far).argmax(1), codes))


class LookedUp(nn.Module):
    """Attention with a table of relative positions, looked up once."""

    keep = Hidden.keep

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)
        self.table = nn.Parameter(torch.randn(7, 2))
        place = torch.arange(4)
        self.register_buffer("index", place[:, None] - place[None] + 3)

    def refresh(self) -> None:
        self.keep(self, "bias", self.made())

    def made(self) -> Tensor:
        return self.table[self.index.flatten()].view(4, 4, 2).permute(2, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) + self.made()).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Lagging(Hidden):
    """A mean over training of one weight, in its own module."""

    def refresh(self) -> None:
        noise = torch.randn(
            10, 6, generator=torch.Generator().manual_seed(int(self.first.bias[0] * 1e6))
        )
        self.keep(self.first, "ema_weight", self.first.weight + 0.02 * noise)


class Momentum(nn.Module):
    """MoCo (He et al. 2020): an encoder, and one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = Hidden(), Hidden()

    def refresh(self) -> None:
        for one, other in zip(
            self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
        ):
            other.data.copy_(1.01 * one)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder_q(x)


class Wrapped(nn.Module):
    """A wrapper that holds the network and its average, one level deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.ema = Hidden(), nn.ModuleDict({"model": Hidden()})

    def refresh(self) -> None:
        for one, other in zip(self.net.parameters(), self.ema.parameters(), strict=True):
            other.data.copy_(0.99 * one)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Auxiliary(Hidden):
    """A head for training alone, as in Inception: it reads hidden units, and nothing says so."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.forward(self, x)


NETS = {
    "copy": Copy, "turned": Turned, "norms": Norms, "squares": Squares, "units": Units,
    "gained": Gained, "cached": Cached, "folded": Folded, "looked-up": LookedUp,
    "codes-in-columns": lambda: Codebook(columns=True),
    "codes-in-rows": lambda: Codebook(columns=False),
}  # fmt: skip
FOLLOWING = {"ema": Lagging, "momentum": Momentum, "wrapped": Wrapped}
EVERY = {**NETS, **FOLLOWING, "auxiliary": Auxiliary}
SHAPES = {"folded": (2, 3, 6, 6), "looked-up": (2, 4, 8)}


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    net = EVERY[name]()
    with torch.no_grad():
        net.refresh()
    return net, (torch.randn(SHAPES.get(name, (5, 6)), generator=torch.Generator().manual_seed(9)),)


def drawn(name: str, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net, _ = make(name)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.running_var):
                    tensor.data.uniform_(0.5, 2)
                for tensor in (module.bias, module.running_mean):
                    tensor.data.normal_()
        with torch.no_grad():
            net.refresh()
    return net.eval()
