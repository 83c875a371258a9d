"""Operators that treat every position alike: equal axes become one."""

from __future__ import annotations

from ...model import OpKind, Role
from ..atoms import Plus
from ..call import Call, Label, Labels, Value, any_data, data_and_weights, longer
from .table import rule

HOMOGENEOUS = ("relu", "leaky_relu", "rrelu_with_noise")
LINEAR = (
    "neg", "clone", "contiguous", "alias", "detach", "_to_copy", "to", "type_as", "dropout",
    "feature_dropout", "alpha_dropout", "positive", "lift_fresh", "lift_fresh_copy",
    "real", "conj", "resolve_conj", "resolve_neg", "_conj",
)  # fmt: skip
POINTWISE = (
    "gelu", "silu", "tanh", "sigmoid", "hardswish", "hardsigmoid", "hardtanh", "relu6", "elu",
    "selu", "celu", "mish", "softplus", "log_sigmoid", "log_sigmoid_forward",
    "softshrink", "hardshrink", "threshold", "exp", "exp2", "expm1", "log", "log2",
    "log10", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "abs", "sign", "sgn", "sin", "cos",
    "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc",
    "erfinv", "lgamma", "digamma", "sinc", "floor", "ceil", "round", "trunc", "frac", "clamp",
    "clamp_min", "clamp_max", "clip", "nan_to_num", "isnan", "isinf", "isfinite", "logical_not",
    "bitwise_not", "special_expit", "logit", "i0", "angle", "deg2rad", "rad2deg",
    "special_erf", "signbit", "polygamma",
)  # fmt: skip
BINARY = (
    "pow", "maximum", "minimum", "fmax", "fmin", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
    "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__",
    "__xor__", "floor_divide", "remainder", "fmod", "atan2", "hypot", "where", "masked_fill",
    "lerp", "addcmul", "addcdiv", "logaddexp", "logaddexp2", "heaviside", "xlogy", "copysign",
    "float_power", "bitwise_left_shift", "bitwise_right_shift", "isclose", "complex", "polar",
    "nextafter", "special_xlog1py",
)  # fmt: skip


def broadcast(call: Call, operands: list[Value]) -> list[Label]:
    """Labels of the broadcast of all operands; axes of equal position and size become one."""
    ndim = max(value.ndim for value in operands)
    out: list[Label] = []
    for back in range(ndim, 0, -1):
        present = [value.labels[-back] for value in operands if value.ndim >= back]
        wide = longer(present)
        # A single position broadcasts: it's tied to nothing.
        out.append(call.unify(*wide) if wide else present[0])
    return out


def _shared(operands: list[Value]) -> list[Label]:
    """Axes along which more than one operand varies."""
    shared: list[Label] = []
    for back in range(1, max(value.ndim for value in operands) + 1):
        present = [value.labels[-back] for value in operands if value.ndim >= back]
        wide = longer(present)
        shared.extend(wide[:1] if len(wide) > 1 else ())
    return shared


def _activation(call: Call, value: Value) -> Labels:
    call.op(OpKind.ACT, reads=[value.labels], writes=value.labels)
    return value.labels


@rule(*LINEAR, moves=True)
def linear_like(call: Call) -> Labels:
    """Copies, casts, sign: any map passes through."""
    return call.operands()[0].labels


@rule("copy", "expand_as")
def copy(call: Call) -> Labels:
    """One operand's elements, broadcast into the other one's shape."""
    return broadcast(call, call.operands())


@rule(*HOMOGENEOUS, uniform=True)
def homogeneous(call: Call) -> Labels:
    """Activations that positive factors pass through."""
    value = call.value("self", "input")
    call.restrict(value.labels, "scale")
    return _activation(call, value)


@rule(*POINTWISE, uniform=True)
def pointwise(call: Call) -> object:
    """Functions of one operand (bounds may be tensors)."""
    operands = call.operands()
    labels = broadcast(call, operands)
    call.restrict(labels)
    _weight_roles(call, operands, Role.VECTOR)
    call.op(OpKind.ACT, reads=[operands[0].labels], writes=labels)
    return labels if len(call.shapes) == 1 else [labels] * len(call.shapes)


@rule("add", "sub", "rsub", uniform=True)
def add(call: Call) -> Labels:
    """Sums: linear between data, an affine shift with a weight."""
    operands = call.operands()
    labels = broadcast(call, operands)
    varying = [value for value in operands if not value.uniform]
    if len(varying) < 2:
        call.restrict(labels)  # a number is added: only permutations keep it
        return labels
    _weight_roles(call, operands, Role.VECTOR)
    data, weights = data_and_weights(operands)
    if len(data) == 1 and len(weights) == 1 and call.attach_bias(data[0], weights[0]):
        return labels
    if data:
        tensors = {"vector": weights[0]} if weights else {}
        detail = "sub" if "sub" in call.name else "add"
        reads = [value.labels for value in data]
        call.op(OpKind.ADD, reads=reads, writes=labels, tensors=tensors, detail=detail)
    return labels


@rule("mul", "div", "true_divide", "multiply", "divide", uniform=True)
def multiply(call: Call) -> Labels:
    """Products: gating between data, a gain with a weight, nothing with a number."""
    operands = call.operands()
    labels = broadcast(call, operands)
    varying = [value for value in operands if not value.uniform]
    if call.get("rounding_mode") is not None:
        call.restrict(labels)  # to round is not linear
    if len(varying) < 2:
        first = operands[0]
        # A number over data is no linear function; data over a number is.
        if "div" in call.name and (first.uniform or not isinstance(call.get("self"), Value)):
            call.restrict(labels)
        return labels
    call.restrict(_shared(varying))
    _weight_roles(call, operands, Role.SCALE)
    data, weights = data_and_weights(operands)
    if data:
        detail = "scale" if weights else "gate"
        tensors = {"scale": weights[0]} if weights else {}
        reads = [value.labels for value in data]
        call.op(OpKind.OTHER, reads=reads, writes=labels, tensors=tensors, detail=detail)
    return labels


@rule(*BINARY, uniform=True)
def binary(call: Call) -> Labels:
    """Functions of several operands, position by position."""
    operands = call.operands()
    labels = broadcast(call, operands)
    call.restrict(labels)
    _weight_roles(call, operands, Role.VECTOR)
    reads = [value.labels for value in operands if value.data]
    call.op(OpKind.OTHER, reads=reads, writes=labels)
    return labels


@rule("prelu", "_prelu_kernel")
def prelu(call: Call) -> Labels:
    """Leaky slope per channel (axis 1), or one for all."""
    value, weight = call.value("self"), call.value("weight")
    labels = list(value.labels)
    if weight.ndim == value.ndim:
        labels = broadcast(call, [value, weight])
    elif weight.ndim == 1 and weight.shape[0] != 1:
        axis = min(1, value.ndim - 1)
        labels[axis] = call.unify(labels[axis], weight.labels[0])
    call.role(weight.labels, Role.SCALE)
    call.restrict(labels)
    call.op(OpKind.ACT, reads=[value.labels], writes=labels, tensors={"slope": weight})
    return labels


@rule("glu")
def glu(call: Call) -> Labels:
    """First half gated by the second: the halves become one axis."""
    value, labels = call.value("self"), list(call.value("self").labels)
    axis = call.get("dim", -1) % value.ndim
    whole = labels[axis]
    # One atom in both halves: a unit and its gate move together.
    half = call.fresh(whole.size // 2)
    call.unify(whole, Label(Plus((half.form, half.form))))
    call.restrict(half)
    labels[axis] = Label(half.form, whole.origins)
    call.op(OpKind.ACT, reads=[value.labels], writes=labels)
    return labels


def _weight_roles(call: Call, operands: list[Value], role: Role) -> None:
    if any_data(operands):
        for value in operands:
            if not value.data:
                call.role(value.labels, role)
