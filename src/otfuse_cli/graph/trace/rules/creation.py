"""Tensors made from nothing: equal everywhere (they belong to nobody), or constants (pinned)."""

from __future__ import annotations

from ..call import Call, Labels
from .table import rule

UNIFORM = (
    "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor", "zero", "fill",
    "new_empty_strided", "empty_strided", "empty_permuted",
)  # fmt: skip
CONSTANT = (
    "arange", "linspace", "logspace", "eye", "rand", "randn", "randint", "randperm", "bernoulli",
    "rand_like", "randn_like", "normal", "multinomial", "hann_window", "hamming_window",
    "randint_like", "range", "fft_fftfreq", "fft_rfftfreq",
)  # fmt: skip


@rule(*UNIFORM, creates=True)
def equal_everywhere(call: Call) -> Labels:
    """Every element is equal."""
    return call.fresh_axes(call.shape)


@rule(*CONSTANT)
def constant(call: Call) -> Labels:
    """Elements differ by position, so positions stay."""
    return call.pinned_axes(call.shape, "constant")


@rule("meshgrid")
def meshgrid(call: Call) -> object:
    """Axis i of the grid is the i-th list of numbers, along which all others stay the same."""
    lists = call.operands()
    places = list(range(len(lists)))
    if call.get("indexing") == "xy":
        places[:2] = places[:2][::-1]
    outs: list[Labels] = []
    for place, value in zip(places, lists, strict=True):
        labels = call.fresh_axes(call.shape)
        labels[place : place + 1] = value.labels or labels[place : place + 1]
        outs.append(labels)
    return outs


@rule("one_hot")
def one_hot(call: Call) -> Labels:
    """An axis more, whose positions stand for numbers."""
    (numbers,) = call.operands()
    return [*numbers.labels, *call.pinned_axes(call.shape[-1:], "constant")]
