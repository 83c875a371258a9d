"""Operators of detectors, as torchvision has them: parts of feature maps, cut out by boxes."""

from __future__ import annotations

from ...model import OpKind
from ..call import Call, Labels
from .table import rule

PLACES = "places in a feature map"


@rule("torchvision::roi_align", "torchvision::roi_pool")
def regions(call: Call) -> object:
    """Features (n, c, h, w) and boxes (k, 5) to (k, c, ph, pw): channels pass."""
    value, boxes = call.value("input"), call.value("rois")
    call.pin([value.labels[0], *value.labels[2:], boxes.labels[1]], PLACES)
    channel = value.labels[1]
    if "pool" in call.name:
        call.restrict(channel, "scale")  # positive factors pass a maximum; an average is linear
    outs: list[Labels] = []
    for shape in call.shapes:
        outs.append([boxes.labels[0], channel, *call.pinned_axes(shape[2:], PLACES)])
    detail = "max_pool" if "pool" in call.name else "avg_pool"
    call.op(OpKind.OTHER, reads=[value.labels], writes=[channel], detail=detail)
    return outs if len(outs) > 1 else outs[0]
