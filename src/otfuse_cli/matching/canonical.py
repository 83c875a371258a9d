"""The canonical form of a pre-norm transformer: the same function, freedom taken out.

Gains and shifts of norms go into the layers that read them; what LayerNorm takes away anyway (the
mean) is taken out of readers and writers; biases that softmax doesn't see or hands on unchanged go
where they end up; queries and keys of a head, values and outputs too, get equal singular values.
What is left between two copies of one function is a rotation of the stream, rotations inside
heads, and permutations (docs/methods/streams.md, Canonical form).

All of it happens in float64, under the names and in the shapes of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..graph.analysis.attentions import Attention, Projection
from ..graph.analysis.blocks import AxisBlock
from ..graph.analysis.streams import Face, NormSite, Stream
from ..graph.model import LayerGraph

Tensors = dict[str, Tensor]


def canonical(tensors: Mapping[str, Tensor], graph: LayerGraph, stream: Stream) -> Tensors:
    """A network in canonical form.

    Args:
        tensors: Of the network, by name; any floating dtype.
        graph: Its layer graph.
        stream: What `normed_stream` found in it.

    Returns:
        All tensors, floating ones as new float64 tensors.

    Raises:
        UsageError: A gain of zero where a shift can't go anywhere.
    """
    canonical = {n: t.double().clone() if t.is_floating_point() else t for n, t in tensors.items()}
    for site in stream.norms:
        _fold(canonical, site, centred=stream.centred)
    if stream.centred:
        for face in (*stream.writers, *stream.vectors):
            weight = canonical[face.weight]
            weight -= weight.mean(face.dim, keepdim=True)
    for attention in stream.attentions:
        _settle_biases(canonical, attention)
        _balance(canonical, attention)
    return canonical


def view(block: AxisBlock, tensor: Tensor) -> Tensor:
    """A block as (*its factors, *the other axes): a view, to read and to write."""
    moved: Any = tensor.movedim(block.dim, 0).narrow(0, block.start, block.length)
    opened: Tensor = moved.unflatten(0, block.sizes)
    return opened


def faces(face: Face, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor with its stream axis first, as a matrix: a view or a copy."""
    weight = tensors[face.weight].movedim(face.dim, 0)
    return weight.reshape(len(weight), -1)


def _fold(tensors: Tensors, site: NormSite, *, centred: bool) -> None:
    """Gain and shift of a norm into its readers; a shift stays where a reader has no bias."""
    gain = tensors[site.gain].clone()
    shift = None if site.shift is None else tensors[site.shift].clone()
    keeps = shift is not None and bool(shift.any()) and any(f.bias is None for f in site.readers)
    for face in site.readers:
        weight = tensors[face.weight].movedim(face.dim, -1)
        if shift is not None and not keeps and face.bias is not None:
            if weight.dim() != 2:
                raise UsageError(
                    "the shift of a norm can't go into a convolution",
                    where=f"{site.shift} and {face.weight}",
                    why="at the border the convolution reads zeros, not the shift",
                    fix="use --residual shared",
                )
            tensors[face.bias] += weight @ shift
        weight *= gain
        if centred and not keeps:
            weight -= weight.mean(-1, keepdim=True)
    tensors[site.gain].fill_(1.0)
    if shift is None:
        return
    assert site.shift is not None
    if not keeps:
        tensors[site.shift].zero_()
        return
    lost = (gain == 0) & (shift != 0)
    if bool(lost.any()):
        raise UsageError(
            "a norm has gains of zero",
            where=site.gain,
            why="its shift has to stay, as a layer behind it has no bias, and can't without them",
            fix="use --residual shared",
        )
    tensors[site.shift].copy_(
        torch.where(gain == 0, 0.0, shift / torch.where(gain == 0, 1.0, gain))
    )


def _settle_biases(tensors: Tensors, attention: Attention) -> None:
    """Key biases go, value biases go into the output's: the weights of attention sum to 1."""
    if attention.key_bias is not None:
        tensors[attention.key_bias].zero_()
    bias = attention.values.bias
    if bias is None or attention.output_bias is None:
        return
    values = view(bias, tensors[bias.tensor])  # heads, inside
    output = view(attention.output, tensors[attention.output.tensor])  # heads, (groups,) inside, d
    shared = values.reshape(len(values), *(1,) * (output.dim() - 3), values.shape[-1], 1)
    tensors[attention.output_bias] += (output * shared).flatten(0, -2).sum(0)
    values.zero_()


def _balance(tensors: Tensors, attention: Attention) -> None:
    """Equal singular values on both sides of what is only ever multiplied."""
    if attention.turns:
        pair = [_rows(tensors, part) for part in attention.queries]
        for part, rows in zip(attention.queries, _balanced(*pair), strict=True):
            _write(tensors, part, rows)
    value = _rows(tensors, attention.values)
    output = view(attention.output, tensors[attention.output.tensor])
    inside = output.movedim(-2, 1).flatten(2)  # heads, inside, (groups *) d
    made, read = _balanced(value, inside)
    _write(tensors, attention.values, made)
    shape = (len(read), read.shape[1], *output.shape[1:-2], output.shape[-1])
    output.copy_(read.reshape(shape).movedim(1, -2))


def _rows(tensors: Tensors, part: Projection) -> Tensor:
    """Heads x inside x what they read, the bias last."""
    weight = view(part.weight, tensors[part.weight.tensor])
    columns = [weight]
    if part.bias is not None:
        columns.append(view(part.bias, tensors[part.bias.tensor])[..., None])
    return torch.cat(columns, -1)


def _write(tensors: Tensors, part: Projection, rows: Tensor) -> None:
    weight = view(part.weight, tensors[part.weight.tensor])
    weight.copy_(rows[..., : weight.shape[-1]])
    if part.bias is not None:
        view(part.bias, tensors[part.bias.tensor]).copy_(rows[..., -1])


def _balanced(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """`one^T other` of every head, split evenly: h x q x k and h x q x l, with G and G^-T."""
    q1, r1 = torch.linalg.qr(one.mT)  # one = r1^T q1^T
    q2, r2 = torch.linalg.qr(other.mT)
    left, values, right = torch.linalg.svd(r1 @ r2.mT)
    inner = min(left.shape[-1], right.shape[-1], values.shape[-1])
    root = values.clamp(min=0).sqrt()[..., :, None]
    made = root * (q1 @ left[..., :inner]).mT
    read = root * (q2 @ right.mT[..., :inner]).mT
    missing = one.shape[1] - inner
    if missing > 0:  # fewer inputs than the head is wide
        made, read = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (made, read))
    return made, read
