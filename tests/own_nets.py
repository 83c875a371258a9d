"""Networks whose code fixes the widths that they were built with: each needs a module of its own.

`NETS` maps names to (source of a file, shape of one input). Every file defines `wide`, `narrow` and
`from_shapes`, which build one architecture, and `SIZES`, its two sets of widths.
"""

from __future__ import annotations

_HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
"""

_FACTORIES = """

def built(*sizes):
    return Net(*sizes), EXAMPLE


def wide():
    return built(*SIZES[0])


def narrow():
    return built(*SIZES[1])


def from_shapes(shapes):
    return built(*sizes_of(shapes))
"""

_CHANNELS_LAST = """
SIZES = (12, 20), (6, 10)
EXAMPLE = torch.rand(3, 1, 16)


class Net(nn.Module):
    def __init__(self, c, h):
        super().__init__()
        self.conv1, self.bn = nn.Conv1d(1, c, 5, padding=2), nn.BatchNorm1d(c)
        self.conv2 = nn.Conv1d(c, 2 * c, 3, padding=1)
        self.n = 2 * c * 4
        self.fc, self.out = nn.Linear(self.n, h), nn.Linear(h, 5)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.bn(self.conv1(x))), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        return self.out(F.relu(self.fc(x.permute(0, 2, 1).reshape(-1, self.n))))


def sizes_of(shapes):
    return shapes["conv1.weight"][0], shapes["fc.weight"][0]
"""

_VIEW = """
SIZES = (24, 14), (12, 7)
EXAMPLE = torch.rand(3, 3, 4)


class Net(nn.Module):
    def __init__(self, h, k):
        super().__init__()
        self.h, self.k = h, k
        self.one, self.two, self.out = nn.Linear(4, h), nn.Linear(3 * h, k), nn.Linear(k, 5)

    def forward(self, x):
        x = F.gelu(self.one(x)).view(-1, 3 * self.h)
        return self.out(F.gelu(self.two(x)).view(-1, self.k))


def sizes_of(shapes):
    return shapes["one.weight"][0], shapes["out.weight"][1]
"""

_GATE = """
SIZES = (16,), (8,)
EXAMPLE = torch.rand(3, 2, 6, 6)


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.both, self.out = nn.Conv2d(2, 2 * c, 3), nn.Linear(c, 5)

    def forward(self, x):
        x = self.both(x)
        x = x[:, : self.c] * x[:, self.c :].sigmoid()
        return self.out(x.mean((2, 3)))


def sizes_of(shapes):
    return (shapes["out.weight"][1],)
"""

_DEPTHWISE = """
SIZES = (10, 18), (5, 9)
EXAMPLE = torch.rand(3, 2, 6, 6)


class Net(nn.Module):
    def __init__(self, c, d):
        super().__init__()
        self.d = d
        self.one, self.bn = nn.Conv2d(2, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.deep = nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.two, self.out = nn.Conv2d(c, d, 1), nn.Linear(d, 5)

    def forward(self, x):
        x = F.relu(self.deep(F.relu(self.bn(self.one(x)))))
        x = F.relu(self.two(x))
        return self.out(x.reshape(x.shape[0], self.d, 36).mean(-1))


def sizes_of(shapes):
    return shapes["one.weight"][0], shapes["two.weight"][0]
"""

_TOKENS = """
SIZES = (16, 12), (8, 6)
EXAMPLE = torch.zeros(3, 7, dtype=torch.long)


class Net(nn.Module):
    def __init__(self, c, h):
        super().__init__()
        self.c = c
        self.embed, self.up, self.out = nn.Embedding(11, c), nn.Linear(c, h), nn.Linear(h, 5)

    def forward(self, x):
        x = self.embed(x) * self.c**0.5
        return self.out(F.gelu(self.up(x.view(-1, 7, self.c).mean(1))))


def sizes_of(shapes):
    return shapes["embed.weight"][1], shapes["up.weight"][0]
"""

_STREAM = """
SIZES = (16, 24), (8, 12)
EXAMPLE = torch.rand(3, 4)


class Net(nn.Module):
    def __init__(self, c, h):
        super().__init__()
        self.c = c
        self.embed, self.up, self.down = nn.Linear(4, c), nn.Linear(c, h), nn.Linear(h, c)
        self.gain, self.out = nn.Parameter(torch.ones(c)), nn.Linear(c, 5)

    def forward(self, x):
        x = torch.zeros(x.shape[0], self.c, device=x.device) + self.embed(x)
        x = x + self.down(F.relu(self.up(F.layer_norm(x, (self.c,), self.gain))))
        return self.out(x)


def sizes_of(shapes):
    return shapes["up.weight"][1], shapes["up.weight"][0]
"""

_HEADS = """
SIZES = (2, 6), (2, 4)
EXAMPLE = torch.rand(3, 5, 4)


class Net(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.proj = nn.Linear(4, 3 * heads * width), nn.Linear(heads * width, 7)
        self.out = nn.Linear(7, 5)

    def forward(self, x):
        parts = self.qkv(x).view(-1, 5, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(*parts).transpose(1, 2)
        x = x.reshape(-1, 5, self.heads * self.width)
        return self.out(F.relu(self.proj(x)).mean(1))


def sizes_of(shapes):
    return 2, shapes["proj.weight"][1] // 2
"""

_BODIES = {
    "channels last": (_CHANNELS_LAST, (1, 16)),
    "view": (_VIEW, (3, 4)),
    "gate": (_GATE, (2, 6, 6)),
    "depthwise": (_DEPTHWISE, (2, 6, 6)),
    "tokens": (_TOKENS, (7,)),
    "stream": (_STREAM, (4,)),
    "heads": (_HEADS, (5, 4)),
}
NETS = {name: (_HEAD + body + _FACTORIES, shape) for name, (body, shape) in _BODIES.items()}
