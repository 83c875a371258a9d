"""Norms: parameters belong to the axis that they scale and shift."""

from __future__ import annotations

from ...model import OpKind, Role
from ..atoms import Times
from ..call import Call, Label, Labels, Value
from .table import rule


def _parameters(call: Call, labels: Labels, *, running: bool = False) -> dict[str, Value | None]:
    """Unify the trailing axes with weight and bias, and note their roles."""
    roles = {"weight": Role.SCALE, "bias": Role.VECTOR}
    if running:
        roles |= {"running_mean": Role.VECTOR, "running_var": Role.VARIANCE}
    parameters: dict[str, Value | None] = {}
    for part, role in roles.items():
        value = call.optional(part)
        if value is None:
            continue
        for label, parameter in zip(labels, value.labels, strict=True):
            call.unify(label, parameter)
        call.role(value.labels, role)
        parameters[part] = value
    return parameters


@rule(
    "batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm",
    "_batch_norm_no_update", "miopen_batch_norm", "_native_batch_norm_legit",
)  # fmt: skip
def batch_norm_rule(call: Call) -> object:
    """Per channel, with running statistics, or with those of what is normed."""
    value = call.value("input")
    if call.flag("training") or call.flag("train"):
        if call.optional("running_mean") is not None:
            raise ValueError("batch statistics mix the samples: put the module in eval mode")
        return _standardised(call, value)
    channel = value.labels[1]
    # A factor of a channel is undone by its gain, mean and variance.
    call.restrict(channel, "scale")
    tensors = _parameters(call, [channel], running=True)
    call.op(OpKind.NORM, reads=[[channel]], writes=[channel], tensors=tensors, detail="batch")
    if len(call.shapes) == 1:
        return value.labels
    saved = [
        [channel] if shape == (channel.size,) else _anything(call, shape)
        for shape in call.shapes[1:]
    ]
    return [value.labels, *saved]


def _standardised(call: Call, value: Value) -> object:
    """Without statistics of its own: mean and variance are over everything but the channel.

    What is normed may be a weight (weight standardisation): its gain then makes the same rows.
    """
    call.restrict(value.labels)
    labels = list(value.labels)
    channel = labels[1]
    tensors: dict[str, Value | None] = {}
    if value.data:
        tensors = _parameters(call, [channel])
    else:
        gains = [v.labels[0] for v in call.operands() if v is not value]
        labels[1] = call.unify(channel, *gains)
    call.op(OpKind.NORM, reads=[[channel]], writes=[channel], tensors=tensors, detail="statistics")
    return labels if len(call.shapes) == 1 else [labels, *([[channel]] * (len(call.shapes) - 1))]


def _anything(call: Call, shape: tuple[int, ...]) -> Labels:
    return call.pinned_axes(shape, "saved statistics")


@rule("instance_norm")
def instance_norm(call: Call) -> Labels:
    """Per channel and sample; running statistics only where they are tracked."""
    value = call.value("input")
    channel = value.labels[1]
    call.restrict(value.labels[1:])
    tracked = not call.flag("use_input_stats")
    tensors = _parameters(call, [channel], running=tracked)
    call.op(OpKind.NORM, reads=[[channel]], writes=[channel], tensors=tensors, detail="instance")
    return value.labels


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> object:
    """Over the trailing axes."""
    value = call.value("input")
    n = len(call["normalized_shape"])
    over = value.labels[-n:]
    call.restrict(over)
    tensors = _parameters(call, over)
    call.op(
        OpKind.NORM,
        reads=[over],
        writes=over,
        tensors=tensors,
        detail="rms" if "rms" in call.name else "layer",
    )
    if len(call.shapes) == 1:
        return value.labels
    ones = call.pinned_axes([1] * n, "reduced")
    return [value.labels, *([[*value.labels[:-n], *ones]] * (len(call.shapes) - 1))]


@rule("group_norm", "native_group_norm")
def group_norm(call: Call) -> object:
    """Over the channels of each group and all positions."""
    value = call.value("input")
    groups = int(call.get("num_groups", call.get("group", 1)))
    channel = value.labels[1]
    group, within = call.fresh(groups), call.fresh(channel.size // groups)
    call.unify(channel, Label(Times((group.form, within.form))))
    call.restrict(value.labels[1:])
    call.joint([value.labels[0], group])
    tensors = _parameters(call, [channel])
    call.op(OpKind.NORM, reads=[[channel]], writes=[channel], tensors=tensors, detail="group")
    if len(call.shapes) == 1:
        return value.labels
    return [value.labels, *([[value.labels[0], group]] * (len(call.shapes) - 1))]


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(call: Call) -> object:
    """W = g v / |v|: the gain belongs to the axis of v that isn't normed."""
    v, g = call.value("v"), call.value("g")
    axis = int(call.get("dim", 0)) % v.ndim
    labels = list(v.labels)
    if g.ndim == v.ndim:
        labels[axis] = call.unify(v.labels[axis], g.labels[axis])
    elif g.ndim == 1:
        labels[axis] = call.unify(v.labels[axis], g.labels[0])
    call.restrict(labels)
    return labels if len(call.shapes) == 1 else [labels, g.labels]


@rule("linalg_vector_norm", "norm", "linalg_norm", "linalg_matrix_norm", "frobenius_norm")
def norm(call: Call) -> Labels:
    """Norm over the axes listed, or over all; one of a matrix knows no order of rows or columns."""
    from .reduction import reduce_axes

    value = call.value("self")
    call.restrict(value.labels)
    return reduce_axes(call, value, call.get("dim"), keep=call.flag("keepdim"))


@rule("cosine_similarity")
def cosine_similarity(call: Call) -> Labels:
    """Angle along one axis."""
    from .elementwise import broadcast

    labels = broadcast(call, call.operands())
    call.restrict(labels)
    axis = call.get("dim", 1) % len(labels)
    call.joint(labels)
    return [label for i, label in enumerate(labels) if i != axis]
