"""Small networks of every kind, each with example inputs; `scale` widens what has a width.

Their definitions are our own; transformers' come from random tiny configs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import operator_nets


@dataclass(frozen=True)
class Exhibit:
    """A network of the zoo.

    Attributes:
        build: Width factor to module, args, kwargs.
        free: Free spaces expected.
        families: How many of them are families.
        no_ops: Members that provably change nothing: a substring of the tensor's name each.
        warnings: Of the graph.
        hf: Needs transformers.
    """

    build: Callable[[int], tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]]
    free: int
    families: int = 0
    no_ops: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    hf: bool = False


def image(channels: int = 3, side: int = 16, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, side, side)


def tokens(vocab: int = 19, length: int = 7, batch: int = 2) -> Tensor:
    return torch.randint(0, vocab, (batch, length))


def mlp(k: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 6 * k), nn.ReLU(), nn.Linear(6 * k, 5 * k), nn.GELU(),
        nn.Linear(5 * k, 4),
    )  # fmt: skip


def vgg(k: int, *, norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    last = 3
    for width, pool in ((4 * k, True), (6 * k, True), (8 * k, False), (8 * k, True)):
        layers.append(nn.Conv2d(last, width, 3, padding=1))
        layers += [nn.BatchNorm2d(width)] if norm else []
        layers.append(nn.ReLU(inplace=True))
        layers += [nn.MaxPool2d(2)] if pool else []
        last = width
    head = [
        nn.Flatten(),
        nn.Linear(last * 4, 10 * k),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(10 * k, 5),
    ]
    return nn.Sequential(*layers, *head)


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int, *, shortcut: str = "conv") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.stride, self.extra = stride, outer - inner
        self.down = None
        if shortcut == "conv" and (stride != 1 or inner != outer):
            self.down = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.down is not None:
            x = self.down(x)
        elif self.extra:
            half = self.extra // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        out += x
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, k: int, *, shortcut: str = "conv") -> None:
        super().__init__()
        w = 4 * k
        self.stem = nn.Sequential(
            nn.Conv2d(3, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU()
        )
        self.layer1 = nn.Sequential(*(BasicBlock(w, w, 1, shortcut=shortcut) for _ in range(2)))
        self.layer2 = nn.Sequential(
            BasicBlock(w, 2 * w, 2, shortcut=shortcut),
            BasicBlock(2 * w, 2 * w, 1, shortcut=shortcut),
        )
        self.fc = nn.Linear(2 * w, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(F.silu(self.down(gate))))


class Inverted(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 2 * inner
        self.body = nn.Sequential(
            nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.Hardswish(), SqueezeExcite(wide, inner),
            nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.skip = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


def mobilenet(k: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4 * k, 3, 2, 1), nn.BatchNorm2d(4 * k), nn.ReLU6(),
        Inverted(4 * k, 6 * k, 2), Inverted(6 * k, 6 * k, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6 * k, 5),
    )  # fmt: skip


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext(k: int) -> nn.Module:
    w = 4 * k
    return nn.Sequential(
        nn.Conv2d(3, w, 4, 4), ConvNextBlock(w), ConvNextBlock(w), nn.Conv2d(w, 2 * w, 2, 2),
        ConvNextBlock(2 * w), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * w, 5),
    )  # fmt: skip


class DenseLayer(nn.Module):
    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inner), nn.Conv2d(inner, 2 * growth, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(2 * growth), nn.Conv2d(2 * growth, growth, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(y)))], 1)


def densenet(k: int) -> nn.Module:
    stem, growth = 6 * k, 3 * k
    end = stem + 2 * growth
    return nn.Sequential(
        nn.Conv2d(3, stem, 3, 2, 1), DenseLayer(stem, growth), DenseLayer(stem + growth, growth),
        nn.BatchNorm2d(end), nn.Conv2d(end, 5 * k, 1), nn.AvgPool2d(2),
        DenseLayer(5 * k, growth), nn.BatchNorm2d(5 * k + growth), nn.ReLU(), nn.Flatten(),
        nn.Linear((5 * k + growth) * 16, 5),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, k: int, norm: Callable[[int], nn.Module], *, bilinear: bool) -> None:
        super().__init__()

        def double(inner: int, outer: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inner, outer, 3, 1, 1), norm(outer), nn.ReLU(),
                nn.Conv2d(outer, outer, 3, 1, 1), norm(outer), nn.ReLU(),
            )  # fmt: skip

        a, b, c = 4 * k, 8 * k, 12 * k
        self.enc1, self.enc2, self.mid = double(3, a), double(a, b), double(b, c)
        self.up2 = (
            nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(c, b, 1))
            if bilinear
            else nn.ConvTranspose2d(c, b, 2, 2)
        )
        self.dec2, self.up1 = double(2 * b, b), nn.ConvTranspose2d(b, a, 2, 2)
        self.dec1, self.out = double(2 * a, a), nn.Conv2d(a, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.enc1(x)
        two = self.enc2(F.max_pool2d(one, 2))
        mid = self.mid(F.max_pool2d(two, 2))
        two = self.dec2(torch.cat([two, self.up2(mid)], 1))
        return self.out(self.dec1(torch.cat([one, self.up1(two)], 1)))


class Grouped(nn.Module):
    """ResNeXt block and a grouped transposed convolution."""

    def __init__(self, k: int) -> None:
        super().__init__()
        w, g = 8 * k, 2 * k
        self.stem = nn.Conv2d(3, w, 3, 1, 1)
        self.reduce, self.grouped = nn.Conv2d(w, w, 1), nn.Conv2d(w, w, 3, 2, 1, groups=g)
        self.norm, self.expand = nn.BatchNorm2d(w), nn.Conv2d(w, w, 1)
        self.short = nn.Conv2d(w, w, 1, 2)
        self.up = nn.ConvTranspose2d(w, 3 * g, 2, 2, groups=g)
        self.out = nn.Conv2d(3 * g, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.norm(self.grouped(F.relu(self.reduce(x)))))
        y = F.relu(self.expand(y) + self.short(x))
        return self.out(F.leaky_relu(self.up(y), 0.1))


class Shuffle(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        half = 4 * k

        def branch() -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
                nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half),
                nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
            )  # fmt: skip

        self.stem = nn.Conv2d(3, 2 * half, 3, 2, 1)
        self.one, self.two = branch(), branch()
        self.fc = nn.Linear(2 * half, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for branch in (self.one, self.two):
            left, right = x.chunk(2, 1)
            x = torch.cat([left, branch(right)], 1)
            b, c, h, w = x.shape
            x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return self.fc(x.mean((2, 3)))


def superresolution(k: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6 * k, 3, 1, 1), nn.PReLU(6 * k), nn.Conv2d(6 * k, 20 * k, 3, 1, 1),
        nn.PixelShuffle(2), nn.Tanh(), nn.Conv2d(5 * k, 3, 3, 1, 1, padding_mode="reflect"),
    )  # fmt: skip


class Tagger(nn.Module):
    def __init__(self, k: int, cell: type[nn.RNNBase], *, last: bool = False) -> None:
        super().__init__()
        h = 5 * k
        self.embed = nn.Embedding(19, 6 * k)
        self.rnn = cell(6 * k, h, num_layers=2, bidirectional=not last, batch_first=True)
        self.last = last
        self.out = nn.Linear(h if last else 2 * h, 4)

    def forward(self, ids: Tensor) -> Tensor:
        y, state = self.rnn(self.embed(ids))
        if self.last:
            y = (state[0] if isinstance(state, tuple) else state)[-1]
        return self.out(y)


class Projected(nn.Module):
    """LSTM with a projection, then an Elman network started from a learned state."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5 * k, proj_size=3 * k)
        self.rnn = nn.RNN(3 * k, 4 * k)
        self.start = nn.Parameter(torch.zeros(1, 1, 4 * k))
        self.out = nn.Linear(4 * k, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        y, _ = self.rnn(y, self.start.expand(1, x.shape[1], -1).contiguous())
        return self.out(y)


class Translator(nn.Module):
    """nn.TransformerEncoder, a weight-normed layer, a tied output embedding."""

    def __init__(self, k: int) -> None:
        super().__init__()
        e = 8 * k
        self.embed = nn.Embedding(19, e)
        self.position = nn.Parameter(torch.randn(1, 32, e))
        layer = nn.TransformerEncoderLayer(e, 2 * k, 12 * k, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(e, e))
        self.out = nn.Linear(e, 19, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[:, : ids.shape[1]]
        x = self.encoder(x, is_causal=False)
        return self.out(F.silu(self.mix(x)))


class Decoder(nn.Module):
    """nn.TransformerDecoder with a causal mask, cross attention with other key and value widths."""

    def __init__(self, k: int) -> None:
        super().__init__()
        e = 8 * k
        self.embed = nn.Linear(5, e)
        layer = nn.TransformerDecoderLayer(e, 2, 10 * k, batch_first=True, activation="gelu")
        self.decoder = nn.TransformerDecoder(layer, 1)
        self.cross = nn.MultiheadAttention(e, 2, kdim=5, vdim=5, batch_first=True)
        self.out = nn.Linear(e, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.decoder(h, h * 2, tgt_mask=mask, tgt_is_causal=True)
        h = h + self.cross(h, x, x, need_weights=True)[0]
        return self.out(h)


def generator(k: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 32 * k), nn.Unflatten(1, (8 * k, 2, 2)),
        nn.ConvTranspose2d(8 * k, 6 * k, 4, 2, 1), nn.BatchNorm2d(6 * k), nn.ReLU(True),
        nn.ConvTranspose2d(6 * k, 4 * k, 4, 2, 1), nn.InstanceNorm2d(4 * k, affine=True),
        nn.LeakyReLU(0.2), nn.ConvTranspose2d(4 * k, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


class FusedViT(nn.Module):
    """Patches, a class token, fused qkv split by reshape and unbind, layer scale, einsum."""

    def __init__(self, k: int) -> None:
        super().__init__()
        e, self.heads = 8 * k, 2 * k
        self.patch = nn.Conv2d(3, e, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, e))
        self.position = nn.Parameter(torch.randn(1, 17, e))
        self.norm1, self.qkv, self.proj = nn.LayerNorm(e), nn.Linear(e, 3 * e), nn.Linear(e, e)
        self.norm2, self.up, self.down = nn.RMSNorm(e), nn.Linear(e, 12 * k), nn.Linear(6 * k, e)
        self.scale = nn.Parameter(torch.ones(e))
        self.head = nn.Linear(e, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        b, t, e = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, key, v = qkv.unbind(0)
        weights = torch.einsum("bhid,bhjd->bhij", q * 0.5, key).softmax(-1)
        y = torch.einsum("bhij,bhjd->bihd", weights, v).reshape(b, t, e)
        x = x + self.scale * self.proj(y)
        x = x + self.down(F.glu(self.up(self.norm2(x))))
        return self.head(x[:, 0])


class Adapted(nn.Module):
    """Low-rank adapter on a linear layer, embedding bag, bilinear layer."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(19, 6 * k, mode="mean")
        self.base = nn.Linear(6 * k, 7 * k)
        self.a = nn.Parameter(torch.randn(2 * k, 6 * k))
        self.b = nn.Parameter(torch.randn(7 * k, 2 * k))
        self.pair = nn.Bilinear(7 * k, 6 * k, 4 * k)
        self.out = nn.Linear(4 * k, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bag(ids)
        h = F.relu(F.linear(x, self.base.weight + self.b @ self.a, self.base.bias))
        return self.out(torch.tanh(self.pair(h, x)))


class Audio(nn.Module):
    """1-d and 3-d convolutions, gated, circular padding, several pools."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 8 * k, 5, padding=2, padding_mode="circular")
        self.second = nn.Conv1d(4 * k, 5 * k, 3, dilation=2, padding=2)
        self.volume = nn.Conv3d(5 * k, 3 * k, 3, padding=1)
        self.norm = nn.GroupNorm(1, 3 * k)
        self.out = nn.Linear(3 * k, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.first(x), dim=1)
        x = F.max_pool1d(F.elu(self.second(x)), 2)
        x = x.unflatten(-1, (2, 2, -1))
        x = F.interpolate(self.norm(self.volume(x)), scale_factor=2.0, mode="trilinear")
        return self.out(F.adaptive_max_pool3d(x, 1).flatten(1))


def _hf(
    config: str, model: str, inputs: Callable[[], Mapping[str, Tensor]], **shape: Any
) -> Callable[[int], tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]]:
    def build(k: int) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
        import transformers

        settings = {key: value(k) if callable(value) else value for key, value in shape.items()}
        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made, (), inputs()

    return build


def _own(
    make: Callable[[int], nn.Module], inputs: Callable[[], Tensor]
) -> Callable[[int], tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]]:
    return lambda k: (make(k), (inputs(),), {})


OWN = {
    "mlp": Exhibit(_own(mlp, lambda: torch.randn(3, 3, 4)), 2),
    "vgg": Exhibit(_own(vgg, image), 5),
    "vgg-bn": Exhibit(_own(lambda k: vgg(k, norm=True), image), 5),
    "resnet": Exhibit(_own(ResNet, image), 6),
    "resnet-a": Exhibit(_own(lambda k: ResNet(k, shortcut="pad"), image), 7),
    "mobilenet-se": Exhibit(_own(mobilenet, lambda: image(side=12)), 6),
    "convnext": Exhibit(_own(convnext, image), 5),
    "densenet": Exhibit(_own(densenet, image), 8),
    "unet-bn": Exhibit(
        _own(lambda k: UNet(k, nn.BatchNorm2d, bilinear=False), lambda: image(side=8)), 12
    ),
    "unet-gn": Exhibit(
        _own(lambda k: UNet(k, lambda c: nn.GroupNorm(2 * k, c), bilinear=True),
             lambda: image(side=8)), 22, 10),
    "grouped": Exhibit(_own(Grouped, lambda: image(side=8)), 7, 4),
    "shuffle": Exhibit(_own(Shuffle, image), 5),
    "pixel-shuffle": Exhibit(_own(superresolution, lambda: image(side=6)), 2),
    "lstm": Exhibit(_own(lambda k: Tagger(k, nn.LSTM), tokens), 5),
    "gru": Exhibit(_own(lambda k: Tagger(k, nn.GRU), tokens), 5),
    "gru-state": Exhibit(_own(lambda k: Tagger(k, nn.GRU, last=True), tokens), 3),
    "lstm-state": Exhibit(_own(lambda k: Tagger(k, nn.LSTM, last=True), tokens), 3),
    "lstm-projected": Exhibit(_own(Projected, lambda: torch.randn(4, 2, 6)), 3),
    "transformer": Exhibit(_own(Translator, tokens), 9, 4),
    "decoder": Exhibit(_own(Decoder, lambda: torch.randn(2, 5, 5)), 11, 6),
    "generator": Exhibit(_own(generator, lambda: torch.randn(3, 6)), 3, no_ops=("5.bias",)),
    "fused-vit": Exhibit(_own(FusedViT, image), 5, 2),
    "adapted": Exhibit(_own(Adapted, tokens), 4),
    "standardised": Exhibit(_own(operator_nets.Standardised, image), 2),
    "cells": Exhibit(_own(operator_nets.Cells, lambda: torch.randn(2, 4, 4)), 3),
    "slots": Exhibit(_own(operator_nets.SlotAttention, lambda: torch.randn(2, 7, 5)), 5,
        no_ops=("slots",)),
    "graph": Exhibit(lambda k: (operator_nets.Graph(k), operator_nets.edges(), {}), 4),
    "dora": Exhibit(_own(operator_nets.Dora, lambda: torch.randn(5, 4)), 3),
    "spectral": Exhibit(_own(operator_nets.Spectral, image), 4),
    "warped": Exhibit(_own(operator_nets.Warped, lambda: image(side=8)), 3),
    "quantised": Exhibit(_own(operator_nets.Quantised, lambda: torch.randn(5, 4)), 2,
        no_ops=("_zero",)),
    "orthogonal": Exhibit(_own(operator_nets.Orthogonal, lambda: torch.randn(5, 4)), 2),
    "audio": Exhibit(_own(Audio, lambda: torch.randn(2, 2, 24)), 3),
}  # fmt: skip


def _ids() -> dict[str, Tensor]:
    return {"input_ids": tokens()}


def _pixels(side: int = 16) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": image(side=side)}


def _wide(n: int) -> Callable[[int], int]:
    return lambda k: n * k


_DECODER = {
    "vocab_size": 19, "hidden_size": _wide(32), "num_hidden_layers": 2,
    "num_attention_heads": _wide(4), "max_position_embeddings": 32,
}  # fmt: skip
_LLAMA = {
    **_DECODER, "intermediate_size": _wide(24), "num_key_value_heads": _wide(2), "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER = {**_DECODER, "intermediate_size": _wide(24)}

HF = {
    "hf-vit": Exhibit(_hf("ViTConfig", "ViTForImageClassification", _pixels(),
        hidden_size=_wide(32), num_hidden_layers=2, num_attention_heads=_wide(4),
        intermediate_size=_wide(24), image_size=16, patch_size=4, num_labels=3), 9, 4,
        ("key.bias", "k_proj.bias"), hf=True),
    "hf-bert": Exhibit(_hf("BertConfig", "BertForSequenceClassification", _ids, **_ENCODER),
        10, 4, ("key.bias", "k_proj.bias"), hf=True),
    "hf-bert-mlm": Exhibit(_hf("BertConfig", "BertForMaskedLM", _ids, **_ENCODER), 9, 4,
        ("key.bias", "k_proj.bias"), hf=True),
    "hf-gpt2": Exhibit(_hf("GPT2Config", "GPT2LMHeadModel", _ids, vocab_size=19,
        n_positions=32, n_embd=_wide(32), n_layer=2, n_head=_wide(4), bos_token_id=1,
        eos_token_id=2), 9, 4, hf=True),
    "hf-llama": Exhibit(_hf("LlamaConfig", "LlamaForCausalLM", _ids, **_LLAMA), 9, 4, hf=True),
    "hf-qwen3": Exhibit(_hf("Qwen3Config", "Qwen3ForCausalLM", _ids, **_LLAMA), 9, 4, hf=True),
    "hf-phi3": Exhibit(_hf("Phi3Config", "Phi3ForCausalLM", _ids, **_LLAMA), 9, 4, hf=True),
    "hf-neox": Exhibit(_hf("GPTNeoXConfig", "GPTNeoXForCausalLM", _ids, vocab_size=19,
        hidden_size=_wide(48), num_hidden_layers=2, num_attention_heads=_wide(4),
        intermediate_size=_wide(24), rotary_pct=0.5, max_position_embeddings=32,
        bos_token_id=1, eos_token_id=2), 9, 4, hf=True),
    "hf-t5": Exhibit(_hf("T5Config", "T5ForConditionalGeneration",
        lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(length=5)},
        vocab_size=19, d_model=_wide(16), d_kv=4, d_ff=_wide(20), num_layers=2,
        num_heads=_wide(2), decoder_start_token_id=0), 21, 12, hf=True),
    "hf-swin": Exhibit(_hf("SwinConfig", "SwinForImageClassification", _pixels(32),
        image_size=32, patch_size=2, embed_dim=_wide(16), depths=[2, 2],
        num_heads=lambda k: [2 * k, 4 * k], window_size=4, num_labels=3), 18, 8,
        ("key.bias", "k_proj.bias"), hf=True),
    "hf-mixtral": Exhibit(_hf("MixtralConfig", "MixtralForCausalLM", _ids, **_LLAMA,
        num_local_experts=4, num_experts_per_tok=2), 9, 4, hf=True),
    "hf-convnext": Exhibit(_hf("ConvNextConfig", "ConvNextForImageClassification", _pixels(32),
        hidden_sizes=lambda k: [4 * k, 8 * k], depths=[2, 1], num_stages=2, num_labels=3),
        5, hf=True),
    "hf-resnet": Exhibit(_hf("ResNetConfig", "ResNetForImageClassification", _pixels(32),
        embedding_size=_wide(4), hidden_sizes=lambda k: [8 * k, 12 * k], depths=[2, 1],
        layer_type="bottleneck", num_labels=3), 9, hf=True),
}  # fmt: skip

ZOO = {**OWN, **HF}


def make(name: str, k: int = 1, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The network `name`, `k` times as wide, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module, args, kwargs = ZOO[name].build(k)
    return module.eval(), args, dict(kwargs)
