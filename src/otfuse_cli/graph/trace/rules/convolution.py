"""Convolutions of every rank: channels contract, positions and kernels stay in place."""

from __future__ import annotations

from ...model import OpKind, Role
from ..atoms import Times
from ..call import Call, Label, Labels, Value
from .table import rule

KERNEL = "kernel"
POSITIONS = "positions"


@rule(
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution",
)  # fmt: skip
def convolution(call: Call) -> Labels:
    """y[o] = sum_i W[o, i] * x[i]; with groups, a family of such sums."""
    x, weight, bias = call.value("input", "self"), call.value("weight"), call.optional("bias")
    transposed = "transpose" in call.name or call.flag("transposed")
    rank = weight.ndim - 2
    channels = x.labels[-rank - 1]
    call.pin(x.labels[-rank:], POSITIONS)
    call.pin(weight.labels[2:], KERNEL)
    produced, consumed = _channels(
        call, channels, weight.labels[:2], groups=int(call.get("groups", 1)), transposed=transposed
    )
    if bias is not None:
        call.unify(produced, bias.labels[0])
        call.role(bias.labels, Role.VECTOR)
    if not weight.data:
        _roles(call, weight, transposed=transposed)
    call.op(
        OpKind.CONV,
        reads=[[consumed]],
        writes=[produced],
        tensors={"weight": weight, "bias": bias},
        detail=_detail(call, transposed=transposed),
    )
    spatial = call.pinned_axes(call.shape[-rank:], POSITIONS)
    return [*x.labels[: -rank - 1], Label(produced.form), *spatial]


def _channels(
    call: Call, channels: Label, weight: Labels, *, groups: int, transposed: bool
) -> tuple[Label, Label]:
    """Output and input channels. Weight is (out, in/g), or (in, out/g) when transposed."""
    first, second = weight
    if groups == 1:
        produced, source = (second, first) if transposed else (first, second)
        call.unify(channels, source)
        call.keep(source)
        call.joint([produced, source])
        return produced, channels
    # Channels are (group, inside), in and out; the weight has the group on its first axis only.
    group = call.fresh(groups)
    call.restrict(group)
    inner = call.fresh(first.size // groups)
    call.unify(first, Label(Times((group.form, inner.form))))
    ours, other = (inner, second) if transposed else (second, inner)
    call.unify(channels, Label(Times((group.form, ours.form))))
    produced = Label(Times((group.form, other.form)))
    call.joint([group, ours, other])
    return produced, channels


def _roles(call: Call, weight: Value, *, transposed: bool) -> None:
    produced, consumed = (1, 0) if transposed else (0, 1)
    call.role(weight.labels[produced], Role.PRODUCE)
    call.role(weight.labels[consumed], Role.CONSUME)
    call.role(weight.labels[2:], Role.FIXED)


def _detail(call: Call, *, transposed: bool) -> str:
    kind = "transposed" if transposed else "conv"
    groups = int(call.get("groups", 1))
    return kind if groups == 1 else f"{kind} grouped"


@rule("unfold", "im2col")
def im2col(call: Call) -> Labels:
    """Patches as columns: (channel * kernel, positions)."""
    if call.name == "unfold" and "dimension" in call.arguments:
        return _sliding(call)
    value = call.value("self", "input")
    call.pin(value.labels[-2:], POSITIONS)
    channel = value.labels[-3]
    kernel = call.pinned(call.shape[-2] // channel.size, KERNEL)
    columns = Label(Times((channel.form, kernel.form)), channel.origins)
    return [*value.labels[:-3], columns, call.pinned(call.shape[-1], POSITIONS)]


@rule("col2im")
def col2im(call: Call) -> Labels:
    """Columns back to positions."""
    value = call.value("self", "input")
    columns, positions = value.labels[-2:]
    call.pin(positions, POSITIONS)
    channel = call.fresh(call.shape[-3])
    kernel = call.pinned(columns.size // channel.size, KERNEL)
    call.unify(columns, Label(Times((channel.form, kernel.form))))
    spatial = call.pinned_axes(call.shape[-2:], POSITIONS)
    return [*value.labels[:-2], Label(channel.form, columns.origins), *spatial]


def _sliding(call: Call) -> Labels:
    """Tensor.unfold: sliding windows of one axis, appended as a last axis."""
    value = call.value("self")
    axis = call["dimension"] % value.ndim
    call.pin(value.labels[axis], POSITIONS)
    labels = list(value.labels)
    labels[axis] = call.pinned(call.shape[axis], POSITIONS)
    return [*labels, call.pinned(call.shape[-1], POSITIONS)]
