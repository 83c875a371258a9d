"""Networks whose graphs are out of the ordinary, each a factory of a module and example inputs.

Named by family in `FAMILIES`: grouped convolutions before norms, parameters that no device
context reaches, axes of one that the input is given, weights made or chosen while it runs, caches
and other state, low precision, operators that torch.export takes in one way only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, Any]


class Run(nn.Module):
    """Parts by name, and a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Any], /, **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def image(channels: int = 3, side: int = 6) -> Tensor:
    return torch.randn(2, channels, side, side)


def normed(layer: nn.Module, width: int, *, before: int = 16, affine: bool = True) -> Made:
    """A convolution, the layer, its BatchNorm, and what reads it."""
    norm = nn.BatchNorm2d(width, affine=affine)
    first, last = nn.Conv2d(3, before, 3), nn.Conv2d(width, 5, 1)
    return nn.Sequential(first, nn.ReLU(), layer, norm, nn.ReLU(), last, nn.Flatten()), image()


def grouped() -> Made:
    return normed(nn.Conv2d(16, 16, 3, groups=4, bias=False), 16)


def grouped_wider() -> Made:
    return normed(nn.Conv2d(8, 24, 3, groups=4, bias=False), 24, before=8)


def grouped_bare_norm() -> Made:
    return normed(nn.Conv2d(16, 16, 3, groups=4, bias=False), 16, affine=False)


def grouped_biased() -> Made:
    return normed(nn.Conv2d(16, 16, 3, groups=4), 16)


def multiplied() -> Made:
    """Depthwise, with two outputs for each input."""
    return normed(nn.Conv2d(8, 16, 3, groups=8, bias=False), 16, before=8)


def transposed() -> Made:
    """Groups and outputs are on different axes of the weight."""
    return normed(nn.ConvTranspose2d(16, 16, 3, groups=4, bias=False), 16)


def split_hierarchy() -> Made:
    """Res2Net: a part of the channels after the other, put together again."""

    def forward(net: Any, x: Tensor) -> Tensor:
        parts = net.norm(net.first(x)).relu().chunk(3, 1)
        one = net.norm1(net.conv1(parts[0])).relu()
        two = net.norm2(net.conv2(parts[1] + one)).relu()
        return net.last(torch.cat([one, two, parts[2]], 1)).mean((2, 3))

    inner = {f"conv{i}": nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False) for i in (1, 2)}
    norms = {f"norm{i}": nn.BatchNorm2d(4) for i in (1, 2)}
    first = {"first": nn.Conv2d(3, 12, 1, bias=False), "norm": nn.BatchNorm2d(12)}
    return Run(forward, **first, **inner, **norms, last=nn.Conv2d(12, 5, 1)), image()


def legacy_first() -> Made:
    weight = nn.Parameter(torch.Tensor(16, 6).uniform_())
    return Run(lambda n, x: n.fc((x @ n.w.t()).relu()), w=weight, fc=nn.Linear(16, 4)), randn(3, 6)


def legacy_last() -> Made:
    weight = nn.Parameter(torch.FloatTensor(4, 16).uniform_())
    return Run(lambda n, x: n.fc(x).relu() @ n.w.t(), fc=nn.Linear(6, 16), w=weight), randn(3, 6)


def from_numpy() -> Made:
    weight = nn.Parameter(torch.from_numpy(torch.rand(16, 6, device="cpu").numpy()))
    return Run(lambda n, x: n.fc((x @ n.w.t()).relu()), w=weight, fc=nn.Linear(16, 4)), randn(3, 6)


def legacy_tied() -> Made:
    """One legacy weight in two layers."""
    fc, out, again = nn.Linear(6, 9), nn.Linear(9, 6, bias=False), nn.Linear(6, 9, bias=False)
    fc.weight = again.weight = nn.Parameter(torch.Tensor(9, 6).uniform_())

    def forward(net: Any, x: Tensor) -> Tensor:
        return F.linear(net.out(net.fc(x).relu()), net.again.weight)

    return Run(forward, fc=fc, out=out, again=again), randn(3, 6)


def legacy_buffer() -> Made:
    """A mask that is a plain attribute on the CPU beside parameters on the meta device."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out(net.fc(x).relu()) + net.mask

    net = Run(forward, fc=nn.Linear(6, 9), out=nn.Linear(9, 4))
    net.mask = torch.Tensor([1.0, 2.0, 3.0, 4.0])  # type: ignore[assignment]
    return net, randn(3, 6)


randn = torch.randn


def with_axis(add: Callable[[Tensor], Tensor], first: nn.Module, *shape: int) -> Made:
    """The input with a further axis, then a layer that reads one channel."""

    def forward(net: Any, x: Tensor) -> Tensor:
        made = net.first(add(x)).relu()
        return net.out(made.flatten(2).mean(-1) if made.ndim > 2 else made)

    return Run(forward, first=first, out=nn.Linear(6, 4)), randn(*shape)


def axis_none() -> Made:
    return with_axis(lambda x: x[:, None], nn.Conv1d(1, 6, 3), 3, 9)


def axis_unsqueeze() -> Made:
    return with_axis(lambda x: x.unsqueeze(1), nn.Conv2d(1, 6, 3), 3, 5, 5)


def axis_last() -> Made:
    return with_axis(lambda x: x[..., None], nn.Linear(1, 6), 5)


def axis_view() -> Made:
    return with_axis(lambda x: x.view(x.shape[0], 1, x.shape[1]), nn.Conv1d(1, 6, 3), 3, 9)


def axis_mean() -> Made:
    return with_axis(lambda x: x.mean(1, keepdim=True), nn.Conv1d(1, 6, 3), 3, 3, 9)


def axis_transposed() -> Made:
    """torchcrepe's: frames get a channel and a width of one."""
    return with_axis(lambda x: x[:, None, :, None], nn.Conv2d(1, 6, (3, 1)), 3, 9)


def axis_copies() -> Made:
    """Copies of the input, which no tensor makes, are units of what reads them."""
    return with_axis(lambda x: x[:, None].expand(-1, 8, -1), nn.Conv1d(8, 6, 3), 3, 9)


def axis_gain() -> Made:
    """A gain makes units of one number."""
    return Run(lambda n, x: n.fc((x * n.w).relu()), w=randn(8), fc=nn.Linear(8, 4)), randn(5, 1)


def modulated() -> Made:
    """StyleGAN2's convolution: a weight for each sample, as groups."""

    def forward(net: Any, x: Tensor, z: Tensor) -> Tensor:
        h = net.first(x).relu()
        b, c, *sides = h.shape
        w = net.w[None] * net.style(z).view(b, 1, c, 1, 1)
        w = w * (w.square().sum([2, 3, 4]) + 1e-8).rsqrt().view(b, 10, 1, 1, 1)
        y = F.conv2d(h.reshape(1, b * c, *sides), w.reshape(b * 10, c, 3, 3), groups=b)
        return net.out(y.reshape(b, 10, *y.shape[2:]).relu())

    parts = {"first": nn.Conv2d(3, 8, 1), "style": nn.Linear(5, 8), "w": randn(10, 8, 3, 3)}
    return Run(forward, **parts, out=nn.Conv2d(10, 3, 1)), (image(), randn(2, 5))


def modulated_upwards() -> Made:
    """The same with a transposed convolution."""

    def forward(net: Any, x: Tensor, z: Tensor) -> Tensor:
        h = net.first(x).relu()
        b, c, *sides = h.shape
        w = net.w[None] * net.style(z).view(b, 1, c, 1, 1)
        w = w.transpose(1, 2).reshape(b * c, 10, 3, 3)
        y = F.conv_transpose2d(h.reshape(1, b * c, *sides), w, stride=2, groups=b)
        return net.out(y.view(b, 10, *y.shape[2:]).relu())

    parts = {"first": nn.Conv2d(3, 8, 1), "style": nn.Linear(5, 8), "w": randn(10, 8, 3, 3)}
    return Run(forward, **parts, out=nn.Conv2d(10, 3, 1)), (image(), randn(2, 5))


def capsules() -> Made:
    """Capsules of a convolution, routed once: types times positions have a matrix each."""

    def forward(net: Any, x: Tensor) -> Tensor:
        u = net.first(x)
        b = u.shape[0]
        u = u.view(b, 4, 5, 9).permute(0, 1, 3, 2).reshape(b, 36, 5)
        v = torch.einsum("nodi,bni->bnod", net.w, u * u.norm(dim=-1, keepdim=True))
        share = v.norm(dim=-1, keepdim=True).softmax(2)
        return net.out((share * v).sum(1).flatten(1))

    parts = {"first": nn.Conv2d(3, 20, 2, 2), "w": randn(36, 6, 3, 5)}
    return Run(forward, **parts, out=nn.Linear(18, 2)), image()


def hypernetwork() -> Made:
    def forward(net: Any, x: Tensor, z: Tensor) -> Tensor:
        w = net.hyper(z).view(-1, 7, 8)
        return net.out((w @ net.first(x).relu()[..., None])[..., 0].relu())

    parts = {"first": nn.Linear(6, 8), "hyper": nn.Linear(5, 56), "out": nn.Linear(7, 3)}
    return Run(forward, **parts), (randn(3, 6), randn(3, 5))


def dynamic_convolution() -> Made:
    """CondConv: experts mixed for each sample."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x).relu()
        b, c, *sides = h.shape
        w = (net.route(h.mean((2, 3))).sigmoid() @ net.w).view(b * 10, c, 3, 3)
        y = F.conv2d(h.reshape(1, b * c, *sides), w, groups=b)
        return net.out(y.view(b, 10, *y.shape[2:]).relu())

    parts = {"first": nn.Conv2d(3, 8, 1), "route": nn.Linear(8, 4), "w": randn(4, 10 * 8 * 9)}
    return Run(forward, **parts, out=nn.Conv2d(10, 3, 1)), image()


def ensemble() -> Made:
    """Five networks side by side; their biases have an axis of one."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = torch.baddbmm(net.bias, x[None].expand(5, -1, -1), net.one).relu()
        return torch.bmm(hidden, net.two).mean(0)

    parts = {"one": randn(5, 6, 8), "bias": randn(5, 1, 8), "two": randn(5, 8, 3)}
    return Run(forward, **parts), randn(3, 6)


def monarch() -> Made:
    """Block-diagonal matrices with a transposition between them."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x).relu().view(-1, 4, 6)
        h = torch.einsum("gij,bgj->bgi", net.one, h).transpose(1, 2).relu()
        return net.out(torch.einsum("gij,bgj->bgi", net.two, h).relu().flatten(1))

    parts = {"first": nn.Linear(6, 24), "one": randn(4, 5, 6), "two": randn(5, 3, 4)}
    return Run(forward, **parts, out=nn.Linear(15, 3)), randn(3, 6)


class Cached(nn.Module):
    """Keeps what it derives from a parameter, in evaluation, where `keep` says."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.first, self.shift, self.out = nn.Linear(6, 8), nn.Parameter(randn(8)), nn.Linear(8, 4)
        self.keep = keep
        self.kept: Tensor | None = None
        self.by_device: dict[str, Tensor] = {}
        self.steps: list[Tensor] = []
        self.register_buffer("held", torch.zeros(8), persistent=False)
        self.ready = False

    def derived(self, device: str) -> Tensor:
        if self.keep == "attribute":
            self.kept = self.shift * 2 if self.kept is None else self.kept
            return self.kept
        if self.keep == "dict":
            if device not in self.by_device:
                self.by_device[device] = self.shift * 2
            return self.by_device[device]
        if self.keep == "list":
            self.steps.append(self.shift * 2)
            return self.steps[0]
        if not self.ready:
            self.held, self.ready = self.shift * 2, True
        return self.held

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift * 2 if self.training else self.derived(str(x.device))
        return self.out((self.first(x) + shift).relu())


def cached_attribute() -> nn.Module:
    return Cached("attribute")


def cached_dict() -> nn.Module:
    return Cached("dict")


def cached_list() -> nn.Module:
    return Cached("list")


def cached_buffer() -> nn.Module:
    return Cached("buffer")


def cached_before() -> nn.Module:
    """A cache that is dropped for training, and was filled before anybody asked."""

    class Dropping(Cached):
        def train(self, mode: bool = True) -> Dropping:
            super().train(mode)
            if mode:
                self.by_device = {}
            return self

    net = Dropping("dict").eval()
    net(torch.zeros(1, 6))
    return net


def noisy() -> Made:
    """A latent vector is drawn in every run."""

    def forward(net: Any, x: Tensor) -> Tensor:
        mean, spread = net.first(x).relu(), net.second(x)
        return net.out((mean + torch.randn_like(spread) * spread.exp()).relu())

    return Run(forward, first=nn.Linear(6, 5), second=nn.Linear(6, 5), out=nn.Linear(5, 4)), randn(
        3, 6
    )


def twice_named() -> Made:
    fc = nn.Linear(6, 8)
    return Run(lambda n, x: n.out(n.fc(x).relu()), fc=fc, again=fc, out=nn.Linear(8, 4)), randn(
        3, 6
    )


class Casting(nn.Module):
    """Computes its middle layer in another type, whatever it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.middle, self.out = nn.Linear(6, 64), nn.Linear(64, 65), nn.Linear(65, 4)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu().to(self.dtype)
        weight, bias = self.middle.weight.to(self.dtype), self.middle.bias.to(self.dtype)
        return self.out((h @ weight.t() + bias).relu().to(x.dtype))


def in_float32() -> nn.Module:
    return Casting(torch.float32)


def in_float16() -> nn.Module:
    return Casting(torch.float16)


def in_bfloat16() -> nn.Module:
    return Casting(torch.bfloat16)


def half_buffer() -> Made:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out((net.fc(x) * net.scale).relu())

    net = Run(forward, fc=nn.Linear(6, 8), out=nn.Linear(8, 4))
    net.register_buffer("scale", torch.rand(8).add(0.5).to(torch.bfloat16))
    return net, randn(3, 6)


def in_complex() -> Made:
    """A spectral layer (Fourier neural operators): complex weights, real ones around them."""

    def forward(net: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(net.first(x))
        return net.out(torch.fft.irfft(spectrum * net.w, n=8).relu())

    weight = torch.randn(5, dtype=torch.complex64)
    return Run(forward, first=nn.Linear(6, 8), w=weight, out=nn.Linear(8, 4)), randn(3, 6)


def all_complex() -> Made:
    """Complex inputs and weights, and real outputs."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out((net.two(net.one(x)) * 0.5).abs())

    layers = [nn.Linear(*sizes, dtype=torch.complex64) for sizes in ((6, 64), (64, 65))]
    inputs = torch.randn(3, 6, dtype=torch.complex64)
    return Run(forward, one=layers[0], two=layers[1], out=nn.Linear(65, 4)), inputs


def shuffled() -> Made:
    """ShuffleNet: halves are shuffled until no two channels of a norm are interchangeable."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x).relu()
        for conv, norm in zip(net.convs, net.norms, strict=True):
            left, right = h.chunk(2, 1)
            h = torch.cat([left, norm(conv(right)).relu()], 1)
            h = h.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return net.last(h).mean((2, 3))

    convs = nn.ModuleList(nn.Conv2d(4, 4, 1, bias=False) for _ in range(5))
    norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(5))
    ends = {"first": nn.Conv2d(3, 8, 1), "last": nn.Conv2d(8, 5, 1)}
    return Run(forward, **ends, convs=convs, norms=norms), image()


class Packed(nn.Module):
    """A recurrent network over packed sequences."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        both = 2 if options.get("bidirectional") else 1
        self.first, self.layer = nn.Linear(6, 7), kind(7, 8, batch_first=True, **options)
        self.out = nn.Linear(8 * both, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        inner = nn.utils.rnn.pack_padded_sequence(
            self.first(x).relu(), lengths, batch_first=True, enforce_sorted=False
        )
        made, _ = self.layer(inner)
        padded, _ = nn.utils.rnn.pad_packed_sequence(made, batch_first=True)
        return self.out(padded)


def sequences() -> tuple[Tensor, Tensor]:
    return randn(3, 5, 6), torch.tensor([2, 5, 3])


def packed_lstm() -> Made:
    return Packed(nn.LSTM), sequences()


def packed_gru() -> Made:
    return Packed(nn.GRU), sequences()


def packed_rnn() -> Made:
    return Packed(nn.RNN), sequences()


def packed_both_ways() -> Made:
    return Packed(nn.LSTM, num_layers=2, bidirectional=True), sequences()


def packed_last_state() -> Made:
    """Sorted lengths as a list, the last state read."""

    def forward(net: Any, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(net.words(x), [5, 3, 2])
        return net.out(net.layer(packed)[1][-1])

    parts = {"words": nn.Embedding(10, 7), "layer": nn.GRU(7, 8), "out": nn.Linear(8, 4)}
    return Run(forward, **parts), torch.randint(0, 10, (5, 3))


def branch() -> Made:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.one(x).relu()
        h = torch.cond(x.sum() > 0, torch.relu, torch.tanh, (h,))
        return net.out(net.two(h).relu())

    return Run(forward, one=nn.Linear(6, 8), two=nn.Linear(8, 7), out=nn.Linear(7, 4)), randn(3, 6)


def branch_of_layers() -> Made:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x).relu()
        h = torch.cond(x.sum() > 0, lambda t: net.one(t), lambda t: net.two(t), (h,))
        return net.out(net.last(h).relu())

    inner = {"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)}
    ends = {"first": nn.Linear(6, 8), "last": nn.Linear(8, 7), "out": nn.Linear(7, 4)}
    return Run(forward, **ends, **inner), randn(3, 6)


def loop() -> Made:
    from torch._higher_order_ops import while_loop

    def forward(net: Any, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.int64), net.one(x).relu()
        _, h = while_loop(lambda n, t: n < 3, lambda n, t: (n + 1, t.tanh() * 2), start)
        return net.out(net.two(h).relu())

    return Run(forward, one=nn.Linear(6, 8), two=nn.Linear(8, 7), out=nn.Linear(7, 4)), randn(3, 6)


def through_numpy() -> Made:
    """Its compiler follows NumPy, the plain way of torch.export does not."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.one(x).relu()
        return net.out(torch.from_numpy(h.detach().numpy()) + h)

    return Run(forward, one=nn.Linear(6, 8), out=nn.Linear(8, 4)), randn(3, 6)


FAMILIES: dict[str, tuple[Callable[[], Any], ...]] = {
    "grouped": (
        *(grouped, transposed, grouped_wider, grouped_bare_norm, grouped_biased),
        *(multiplied, split_hierarchy),
    ),
    "legacy": (legacy_first, legacy_tied, legacy_last, from_numpy, legacy_buffer),
    "axis": (
        *(axis_copies, axis_none, axis_gain, axis_unsqueeze, axis_last, axis_view),
        *(axis_mean, axis_transposed),
    ),
    "made": (
        *(capsules, modulated, ensemble, modulated_upwards, hypernetwork),
        *(dynamic_convolution, monarch),
    ),
    "cached": (cached_before, cached_attribute, cached_dict, cached_list, cached_buffer),
    "state": (noisy, twice_named),
    "precision": (in_float32, in_float16, in_bfloat16, half_buffer, in_complex, all_complex),
    "shuffled": (shuffled,),
    "packed": (packed_last_state, packed_lstm, packed_gru, packed_rnn, packed_both_ways),
    "ways": (through_numpy, branch, branch_of_layers, loop),
}
