"""Networks whose weights are divided by their norm, and an oracle for that norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as hook
from torch.nn.utils.parametrizations import spectral_norm as parametrised

Wrap = Callable[[nn.Module], nn.Module]


class BigGan(nn.Linear):
    """The layer of BigGAN-PyTorch: `u0` of shape [1, rows] and the norm `sv0` beside `weight`."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows)
        self.register_buffer("u0", torch.randn(1, rows))
        self.register_buffer("sv0", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = nn.functional.normalize(self.u0 @ self.weight)
            u = nn.functional.normalize(v @ self.weight.T)
            sigma = (v @ self.weight.T @ u.T).squeeze()
            if self.training:
                self.u0.copy_(u)
                self.sv0.copy_(sigma.reshape(1))
        return nn.functional.linear(x, self.weight / sigma, self.bias)


class Sagan(nn.Module):
    """The wrapper of early SAGAN code: parameters `weight_bar`, `weight_u`, `weight_v`."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight_u = nn.Parameter(torch.randn(rows), requires_grad=False)
        self.weight_v = nn.Parameter(torch.randn(columns), requires_grad=False)
        self.weight_bar = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight_v.copy_(
                    nn.functional.normalize(self.weight_bar.T @ self.weight_u, dim=0)
                )
                self.weight_u.copy_(nn.functional.normalize(self.weight_bar @ self.weight_v, dim=0))
        sigma = self.weight_u.dot(self.weight_bar @ self.weight_v)
        return nn.functional.linear(x, self.weight_bar / sigma)


def linear(wrap: Wrap) -> nn.Module:
    return nn.Sequential(
        wrap(nn.Linear(6, 9)), nn.ReLU(), wrap(nn.Linear(9, 9)), nn.ReLU(), nn.Linear(9, 4)
    )


def image(wrap: Wrap) -> nn.Module:
    return nn.Sequential(
        *(wrap(nn.Conv2d(3, 8, 3)), nn.ReLU(), wrap(nn.Conv2d(8, 6, 3, bias=False))),
        *(nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )


def up(wrap: Wrap) -> nn.Module:
    """Transposed convolutions: the rows of the weight are its axis 1; one is square."""
    return nn.Sequential(
        *(wrap(nn.ConvTranspose2d(3, 8, 3)), nn.ReLU(), wrap(nn.ConvTranspose2d(8, 8, 3))),
        *(nn.ReLU(), wrap(nn.ConvTranspose2d(8, 5, 2)), nn.ReLU(), nn.Conv2d(5, 2, 1)),
    )


def sound(wrap: Wrap) -> nn.Module:
    return nn.Sequential(
        *(wrap(nn.Conv1d(2, 7, 3)), nn.ReLU(), wrap(nn.Conv1d(7, 8, 3, groups=1)), nn.ReLU()),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), wrap(nn.Linear(8, 3))),
    )


def words(wrap: Wrap) -> nn.Module:
    return nn.Sequential(wrap(nn.Embedding(11, 6)), nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))


class Residual(nn.Module):
    """A stream that normalised layers write to."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.a, self.b = wrap(nn.Linear(8, 12)), wrap(nn.Linear(12, 8))
        self.c = wrap(nn.Linear(8, 8))
        self.last = wrap(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.b(self.a(h).relu())
        h = h + self.c(h.relu())
        return self.last(h)


X = {
    "linear": (5, 6), "image": (2, 3, 8, 8), "up": (2, 3, 4, 4), "sound": (2, 2, 12),
    "residual": (5, 5), "biggan": (5, 6), "sagan": (5, 6),
}  # fmt: skip
MADE: dict[str, Callable[[Wrap], nn.Module]] = {
    "linear": linear, "image": image, "up": up, "sound": sound, "words": words,
    "residual": Residual,
    "biggan": lambda wrap: nn.Sequential(BigGan(6, 9), nn.ReLU(), BigGan(9, 4)),
    "sagan": lambda wrap: nn.Sequential(Sagan(6, 9), nn.ReLU(), Sagan(9, 4)),
}  # fmt: skip
KINDS = [
    *(f"{name}-{way}" for name in ("linear", "image", "up", "sound", "words", "residual")
      for way in ("hook", "parametrised")),
    "biggan", "sagan",
]  # fmt: skip


def make(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    name, _, way = kind.partition("-")
    module = MADE[name](hook if way == "hook" else parametrised)
    if name == "words":
        return module, (torch.arange(8).view(2, 4),)
    return module, (torch.randn(X[name], generator=torch.Generator().manual_seed(9)),)


def trained(kind: str, seed: int, steps: int = 12) -> nn.Module:
    """A network whose vectors have been iterated some times: near their limit, not in it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module, inputs = make(kind)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
        for _ in range(steps):
            module(*inputs)
    return module.eval()


def norms(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[float]:
    """Largest singular values of the weights that layers really use."""
    with torch.no_grad():
        module.eval()(*inputs)
    found = []
    for layer in module.modules():
        if isinstance(layer, BigGan):
            v = nn.functional.normalize(layer.u0 @ layer.weight)
            weight = layer.weight / (
                nn.functional.normalize(v @ layer.weight.T) @ layer.weight @ v.T
            )
        elif isinstance(layer, Sagan):
            weight = layer.weight_bar / layer.weight_u.dot(layer.weight_bar @ layer.weight_v)
        elif hasattr(layer, "weight_orig") or nn.utils.parametrize.is_parametrized(layer):
            weight = layer.weight
        else:
            continue
        if isinstance(layer, nn.modules.conv._ConvTransposeNd):
            weight = weight.transpose(0, 1)
        found.append(float(torch.linalg.matrix_norm(weight.detach().flatten(1).double(), 2)))
    return found
