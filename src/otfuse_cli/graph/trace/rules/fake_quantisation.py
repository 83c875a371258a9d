"""Fake quantisation: values rounded to a grid of scale and zero point, one or one per channel."""

from __future__ import annotations

from collections.abc import Mapping

from ...model import OpKind, Role
from ..call import Call, Value
from .table import rule

GRID = {"scale": Role.SCALE, "zero_point": Role.VECTOR}
OBSERVED = {"running_min": Role.VECTOR, "running_max": Role.VECTOR, **GRID}


@rule(
    "fake_quantize_per_tensor_affine", "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "_fake_quantize_learnable_per_tensor_affine",
)  # fmt: skip
def per_tensor(call: Call) -> object:
    """One grid for all: position by position."""
    return _rounded(call, call.value("self"))


@rule(
    "fake_quantize_per_channel_affine", "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_learnable_per_channel_affine",
)  # fmt: skip
def per_channel(call: Call) -> object:
    """A grid for each position of one axis, which goes with them."""
    value = call.value("self")
    _tie(call, value, int(call["axis"]), GRID)
    return _rounded(call, value)


@rule("_fused_moving_avg_obs_fq_helper_functional")
def observed(call: Call) -> object:
    """The range is observed first, of all or of each position of one axis."""
    value = call.value("self")
    if call.flag("per_row_fake_quant"):
        _tie(call, value, int(call["ch_axis"]), OBSERVED)
    _record(call, value)
    return [value.labels, value.labels, *(call.value(part).labels for part in OBSERVED)]


def _tie(call: Call, value: Value, axis: int, parts: Mapping[str, Role]) -> None:
    """The grid goes with the axis; of a weight, its rows alone are what is compared."""
    for part, role in parts.items():
        grid = call.value(part)
        call.unify(value.labels[axis], grid.labels[0])
        call.role(grid.labels, role)


def _rounded(call: Call, value: Value) -> object:
    _record(call, value)
    return [value.labels] * len(call.shapes)


def _record(call: Call, value: Value) -> None:
    call.restrict(value.labels)
    call.op(OpKind.ACT, reads=[value.labels], writes=value.labels)
