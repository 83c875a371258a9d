"""What each ATen operator does to the axes of its operands: one small function per family."""

from . import (
    attention,
    contraction,
    convolution,
    creation,
    detection,
    elementwise,
    fake_quantisation,
    indexing,
    linear_algebra,
    normalisation,
    pooling,
    recurrent,
    reduction,
    shape,
    spectrum,
)
from .table import RULES, Entry, rule

__all__ = [
    "RULES",
    "Entry",
    "attention",
    "contraction",
    "convolution",
    "creation",
    "detection",
    "elementwise",
    "fake_quantisation",
    "indexing",
    "linear_algebra",
    "normalisation",
    "pooling",
    "recurrent",
    "reduction",
    "rule",
    "shape",
    "spectrum",
]
