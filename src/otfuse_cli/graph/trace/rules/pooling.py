"""Pooling, resizing and padding: positions stay in place, other axes pass."""

from __future__ import annotations

from ...model import OpKind
from ..atoms import Plus
from ..call import Call, Label, Labels
from .table import rule

POSITIONS = "positions"


def _rank(call: Call) -> int:
    digits = [c for c in call.name if c.isdigit()]
    return int(digits[0])


@rule(
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "fractional_max_pool2d", "fractional_max_pool3d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa", "max_unpool2d", "max_unpool3d",
)  # fmt: skip
def pool(call: Call) -> object:
    """The last axes are positions; what is in front of them passes."""
    value, rank = call.operands()[0], _rank(call)
    call.pin(value.labels[-rank:], POSITIONS)
    lead = list(value.labels[:-rank])
    for other in call.operands()[1:]:
        call.pin(other.labels[-rank:], POSITIONS)
        for a, b in zip(lead, other.labels[:-rank], strict=True):
            call.unify(a, b)
    if "max" in call.name or "lp_" in call.name:
        call.restrict(lead, "scale")  # positive factors pass a maximum; means are linear
    if "pool" in call.name:
        detail = "max_pool" if "max" in call.name else "avg_pool"
        call.op(OpKind.OTHER, reads=[value.labels], writes=lead, detail=detail)
    outs: list[Labels] = []
    for shape in call.shapes:
        outs.append([*(Label(x.form) for x in lead), *call.pinned_axes(shape[-rank:], POSITIONS)])
    return outs if len(outs) > 1 else outs[0]


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(call: Call) -> Labels:
    """Positions are read at places that the grid gives."""
    value, grid = call.value("input"), call.value("grid")
    call.pin([*value.labels[2:], *grid.labels[1:]], POSITIONS)
    call.unify(value.labels[0], grid.labels[0])
    return [*value.labels[:2], *call.pinned_axes(call.shape[2:], POSITIONS)]


@rule("affine_grid_generator")
def affine_grid(call: Call) -> Labels:
    """Places to read, from one small matrix for each sample."""
    theta = call.value("theta")
    call.pin(theta.labels[1:], POSITIONS)
    return [theta.labels[0], *call.pinned_axes(call.shape[1:], POSITIONS)]


@rule("constant_pad_nd", "pad", uniform=False)
def pad(call: Call) -> Labels:
    """Positions before and after an axis; with another mode than constant the axis is pinned."""
    value = call.value("self")
    mode = call.get("mode", "constant")
    widths = list(call["pad"])
    labels = list(value.labels)
    constant = call.get("value") or 0
    for i in range(len(widths) // 2):
        before, after = widths[2 * i], widths[2 * i + 1]
        if not before and not after:
            continue
        axis = value.ndim - 1 - i  # widths come in pairs, the last axis first
        label = labels[axis]
        if mode != "constant" or min(before, after) < 0:
            call.pin(label, POSITIONS)
            labels[axis] = call.pinned(call.shape[axis], POSITIONS)
            continue
        # The new positions are all equal, so that they may change places among themselves.
        parts = [label.form]
        if before:
            parts.insert(0, call.fresh(before).form)
        if after:
            parts.append(call.fresh(after).form)
        labels[axis] = Label(Plus(tuple(parts)), label.origins)
    if constant:
        call.restrict(labels)
    return labels


@rule(
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "_pad_circular",
)  # fmt: skip
def edge_pad(call: Call) -> Labels:
    """Positions are mirrored or repeated at the edges."""
    value = call.value("self")
    rank = len(call.get(POSITIONS, call.get("pad"))) // 2
    call.pin(value.labels[-rank:], POSITIONS)
    return [*value.labels[:-rank], *call.pinned_axes(call.shape[-rank:], POSITIONS)]
