"""Operators that rename, group, cut or order axes; no element is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ..atoms import Atom, Form, Plus, Times
from ..call import Call, Label, Labels, Value, forms_of
from ..deferred import Deferred
from .table import rule

# A reshape into more blocks than this is never a split into unrelated parts: q, k and v are three,
# the gates of an LSTM four, and twice as many leave room for blocks of both in one layer.
MOST_PARTS = 8


def _self(call: Call) -> Value:
    return call.operands()[0]


@rule(
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias"),
    *("view_as", "reshape_as"),
    moves=True,
)
def reshape(call: Call) -> Labels:
    """Axes are grouped by equal products of sizes; a group's factors are new axes."""
    value = _self(call)
    if 0 in call.shape:
        call.pin(value.labels, "empty")
        return call.pinned_axes(call.shape, "empty")
    out: list[Label] = []
    for old, sizes in _groups(value.labels, call.shape):
        if not old:
            out.extend(call.fresh_axes(sizes))
        elif tuple(label.size for label in old) == sizes:
            out.extend(old)
        else:
            out.extend(_regroup(old, sizes))
    return out


def _groups(labels: Labels, shape: Sequence[int]) -> Iterator[tuple[list[Label], tuple[int, ...]]]:
    """Smallest runs of old axes and new sizes with equal products."""
    i = j = 0
    while i < len(labels) or j < len(shape):
        old: list[Label] = []
        new: list[int] = []
        if i < len(labels):
            old.append(labels[i])
            i += 1
        if j < len(shape):
            new.append(shape[j])
            j += 1
        # Take from the side whose product is smaller, until both are equal.
        while (m := prod(label.size for label in old)) != (n := prod(new)):
            if (m < n and i < len(labels)) or j == len(shape):
                old.append(labels[i])
                i += 1
            else:
                new.append(shape[j])
                j += 1
        yield old, tuple(new)


def _regroup(old: Sequence[Label], sizes: tuple[int, ...]) -> list[Label]:
    if not sizes:
        return []
    whole: Form = Times(forms_of(old)) if len(old) > 1 else old[0].form
    origins = frozenset().union(*(label.origins for label in old))
    if len(sizes) == 1:
        return [Label(whole, origins)]
    factors = [Atom(n) for n in sizes]
    deferred = Deferred(whole, factors)
    if not any(1 < n <= MOST_PARTS for n in sizes[:-1]):
        deferred.commit()
    return [Label(factor, origins) for factor in factors]


@rule("squeeze", moves=True)
def squeeze(call: Call) -> Labels:
    """Drop axes of one position."""
    value = _self(call)
    dims = call.get("dim")
    if dims is None:
        dims = range(value.ndim)
    dims = [dims] if isinstance(dims, int) else list(dims)
    gone = {d % value.ndim for d in dims if value.shape[d] == 1} if value.ndim else set()
    return value.without(*gone)


@rule("unsqueeze", moves=True)
def unsqueeze(call: Call) -> Labels:
    """A new axis of one position."""
    labels = list(_self(call).labels)
    labels.insert(call["dim"] % (len(labels) + 1), call.fresh(1))
    return labels


@rule(
    "permute", "transpose", "t", "movedim", "swapaxes", "swapdims", "numpy_T", "mT", "adjoint",
    "moveaxis", moves=True,
)  # fmt: skip
def permute(call: Call) -> Labels:
    """Axes in another order."""
    value = _self(call)
    labels = list(value.labels)
    if call.name == "permute":
        return [labels[d % value.ndim] for d in call["dims"]]
    if call.name in ("movedim", "moveaxis"):
        return _moved(labels, call["source"], call["destination"])
    if call.name in ("t", "numpy_T"):
        return labels[::-1]
    if call.name in ("mT", "adjoint"):
        return [*labels[:-2], labels[-1], labels[-2]]
    names = ("dim0", "dim1") if "dim0" in call.arguments else ("axis0", "axis1")
    i, j = (call[name] for name in names)
    if labels:
        labels[i], labels[j] = labels[j], labels[i]
    return labels


def _moved(labels: list[Label], source: int | Sequence[int], target: int | Sequence[int]) -> Labels:
    n = len(labels)
    source = [source] if isinstance(source, int) else source
    target = [target] if isinstance(target, int) else target
    placed = {t % n: labels[s % n] for s, t in zip(source, target, strict=True)}
    moved = {s % n for s in source}
    rest = iter([label for d, label in enumerate(labels) if d not in moved])
    return [placed[d] if d in placed else next(rest) for d in range(n)]


@rule("expand", "broadcast_to", moves=True)
def broadcast_axes(call: Call) -> Labels:
    """A broadcast axis: all its positions are equal, so it belongs to nobody."""
    value = _self(call)
    lead = len(call.shape) - value.ndim
    out = call.fresh_axes(call.shape[:lead])
    for label, n in zip(value.labels, call.shape[lead:], strict=True):
        out.append(label if label.size == n else call.fresh(n))
    return out


@rule("repeat", "tile", uniform=True)
def repeat(call: Call) -> Labels:
    """Copies one after the other: copy * old."""
    value = _self(call)
    lead = len(call.shape) - value.ndim
    out = call.fresh_axes(call.shape[:lead])
    for label, n in zip(value.labels, call.shape[lead:], strict=True):
        if label.size == n:
            out.append(label)
        elif label.size == 1:
            out.append(call.fresh(n))
        else:
            copies = call.fresh(n // label.size)
            out.append(Label(Times((copies.form, label.form)), label.origins))
    return out


@rule("repeat_interleave", uniform=True)
def repeat_interleave(call: Call) -> Labels:
    """Every element repeated: old * copy."""
    value = call.value("self", "repeats")
    axis, times = call.get("dim"), call.get("repeats")
    if axis is None or not isinstance(times, int):
        call.pin(value.labels, "repeated")
        return call.pinned_axes(call.shape, "repeated")
    labels = list(value.labels)
    label = labels[axis]
    labels[axis] = Label(Times((label.form, call.fresh(times).form)), label.origins)
    return labels


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Labels:
    """Parts one after the other; the other axes are one."""
    values = [v for v in call["tensors"] if v.shape != (0,)]
    axis = call.get("dim", 0) % values[0].ndim
    out: list[Label] = []
    for d in range(values[0].ndim):
        column = [value.labels[d] for value in values]
        if d == axis:
            forms = forms_of(column)
            origins = frozenset().union(*(label.origins for label in column))
            out.append(Label(Plus(forms), origins) if len(forms) > 1 else column[0])
        else:
            out.append(call.unify(*column))
    return out


@rule("stack")
def stack(call: Call) -> Labels:
    """A new axis whose positions are different things."""
    values = call["tensors"]
    labels = [call.unify(*column) for column in zip(*(v.labels for v in values), strict=True)]
    labels.insert(call.get("dim", 0) % (len(labels) + 1), call.pinned(len(values), "stacked"))
    return labels


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def pixel_shuffle(call: Call) -> Labels:
    """Channels c * r^2 to positions, and back; channels in groups interleaved."""
    value = _self(call)
    if "channel" in call.name:
        groups = int(call["groups"])
        group, inner = call.fresh(groups), call.fresh(value.shape[1] // groups)
        call.unify(value.labels[1], Label(Times((group.form, inner.form))))
        shuffled = Label(Times((inner.form, group.form)), value.labels[1].origins)
        return [value.labels[0], shuffled, *value.labels[2:]]
    call.pin(value.labels[-2:], "positions")
    few, many = sorted((call.shape[-3], value.shape[-3]))
    block = call.pinned(many // few, "positions")
    spatial = call.pinned_axes(call.shape[-2:], "positions")
    channel = value.labels[-3]
    if "unshuffle" in call.name:
        made = Label(Times((channel.form, block.form)), channel.origins)
        return [*value.labels[:-3], made, *spatial]
    kept = call.fresh(few)
    call.unify(channel, Label(Times((kept.form, block.form))))
    return [*value.labels[:-3], Label(kept.form, channel.origins), *spatial]
