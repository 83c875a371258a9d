"""Sums, means, extremes and soft maxima over axes."""

from __future__ import annotations

from typing import Any

from ...model import OpKind
from ..call import Call, Label, Labels, Value
from .table import rule


def reduce_axes(call: Call, value: Value, dims: Any, *, keep: bool) -> list[Label]:
    """Labels without the reduced axes; kept ones have one position."""
    if value.ndim == 0:
        return []
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        dims = range(value.ndim)
    gone = {d % value.ndim for d in ([dims] if isinstance(dims, int) else dims)}
    call.restrict(value.pick(gone))
    if keep:
        labels = list(value.labels)
        for d in gone:
            labels[d] = call.fresh(1)
        return labels
    return value.without(*gone)


@rule("sum", "mean", "nansum", "nanmean", uniform=True)
def linear_reduction(call: Call) -> Labels:
    """Linear in what is kept."""
    value = call.value("self")
    labels = reduce_axes(call, value, call.get("dim"), keep=call.flag("keepdim"))
    call.op(OpKind.OTHER, reads=[value.labels], writes=labels)
    return labels


@rule(
    "amax", "amin", "prod", "var", "std", "var_mean", "std_mean", "any", "all", "logsumexp",
    "count_nonzero", "special_logsumexp", uniform=True,
)  # fmt: skip
def reduction(call: Call) -> object:
    """Symmetric, not linear."""
    value = call.value("self")
    call.restrict(value.labels)
    labels = reduce_axes(call, value, call.get("dim"), keep=call.flag("keepdim"))
    call.op(OpKind.OTHER, reads=[value.labels], writes=labels)
    return labels if len(call.shapes) == 1 else [labels] * len(call.shapes)


@rule("aminmax")
def extremes(call: Call) -> object:
    """Smallest and largest value."""
    return reduction(call)


@rule("max", "min", "argmax", "argmin", uniform=False)
def with_index(call: Call) -> object:
    """Where the index of the extreme comes out, its axis stays in place."""
    value = call.value("self")
    other = call.optional("other")
    if other is not None:
        from .elementwise import binary

        return binary(call)
    call.restrict(value.labels)
    dims = call.get("dim")
    indexed = call.name.startswith("arg") or dims is not None
    if indexed:
        reduced = value.labels if dims is None else [value.labels[dims]]
        call.pin(reduced, "index of the extreme")
    labels = reduce_axes(call, value, dims, keep=call.flag("keepdim"))
    return labels if len(call.shapes) == 1 else [labels] * len(call.shapes)


@rule("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")
def softmax(call: Call) -> Labels:
    """Symmetric in the axis that is normalised."""
    value = call.operands()[0]
    call.restrict(value.labels)
    call.op(OpKind.OTHER, reads=[value.labels], writes=value.labels, detail="softmax")
    return value.labels


@rule("cdist", "_cdist_forward")
def distances(call: Call) -> Labels:
    """Pairwise distances: rows of either operand."""
    x, y = call.operands()
    common = call.unify(x.labels[-1], y.labels[-1])
    call.restrict(common, "orth") if call.get("p") == 2.0 else call.restrict(common)
    lead = [call.unify(a, b) for a, b in zip(x.labels[:-2], y.labels[:-2], strict=True)]
    call.restrict(lead)
    call.joint([*lead, x.labels[-2], y.labels[-2], common])
    return [*lead, x.labels[-2], y.labels[-2]]
