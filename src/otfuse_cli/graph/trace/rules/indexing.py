"""Operators that take or write some positions of an axis: cuts, look-ups, orderings."""

from __future__ import annotations

from collections.abc import Sequence

from ...model import OpKind, Role
from ..atoms import Atom, Plus, Times
from ..call import Call, Label, Labels, Value, any_data, forms_of, longer
from .elementwise import broadcast
from .table import rule

INDEXED = "indexed"
ORDERED = "order matters"


def slice_axis(call: Call, label: Label, sizes: Sequence[int]) -> list[Label]:
    """Consecutive parts of an axis; parts of no positions are pinned stand-ins."""
    real = [n for n in sizes if n]
    if len(real) == 1:
        pieces = [label]
    else:
        fresh = call.fresh_axes(real)
        call.unify(label, Label(Plus(forms_of(fresh))))
        pieces = [Label(piece.form, label.origins) for piece in fresh]
    rest = iter(pieces)
    parts: list[Label] = []
    for n in sizes:
        parts.append(next(rest) if n else call.pinned(0, "empty"))
    return parts


def _bounds(call: Call, n: int) -> tuple[int, int, int]:
    start, end, step = call.get("start"), call.get("end"), int(call.get("step") or 1)
    return slice(start, end, step).indices(n)


@rule("slice", "narrow", moves=False, uniform=True)
def slice_(call: Call) -> Labels:
    """A run of positions, or every step-th one."""
    value = call.value("self")
    axis = int(call.get("dim", 0)) % value.ndim
    labels = list(value.labels)
    n = labels[axis].size
    if call.name == "narrow":
        start, end, step = call["start"] % n, call["start"] % n + call["length"], 1
    else:
        start, end, step = _bounds(call, n)
    labels[axis] = _strided(call, labels[axis], start, end, step)
    return labels


def _strided(call: Call, label: Label, start: int, end: int, step: int) -> Label:
    n = label.size
    if step == 1:
        return slice_axis(call, label, [start, max(end - start, 0), n - max(end, start)])[1]
    taken = len(range(start, end, step))
    # Every step-th position, from the first to the last: one phase of (outer * phase).
    if n % step == 0 and taken == n // step:
        outer, phase = call.fresh(taken), call.fresh(step)
        call.unify(label, Label(Times((outer.form, phase.form))))
        slice_axis(call, phase, [start, 1, step - start - 1])
        return Label(outer.form, label.origins)
    call.pin(label, INDEXED)
    return call.pinned(taken, INDEXED)


@rule("select", uniform=True)
def select(call: Call) -> Labels:
    """One position of an axis; the axis goes."""
    value = call.value("self")
    axis = int(call["dim"]) % value.ndim
    index = int(call["index"]) % value.shape[axis]
    return _selected(call, value, axis, index)


def _selected(call: Call, value: Value, axis: int, index: int) -> Labels:
    label = value.labels[axis]
    rest = value.without(axis)
    if isinstance(label.form, Atom) and label.form.deferred is not None:
        selected = label.form.deferred.select(label.form, index)
        labels: list[Label] = []
        for other in rest:
            inside = selected.get(other.form) if isinstance(other.form, Atom) else None
            labels.append(other if inside is None else Label(inside, other.origins))
        return labels
    slice_axis(call, label, [index, 1, label.size - index - 1])
    return rest


@rule("unbind", uniform=True)
def unbind(call: Call) -> object:
    """Every position of an axis by itself."""
    value = call.value("self")
    axis = int(call.get("dim", 0)) % value.ndim
    return [_selected(call, value, axis, i) for i in range(value.shape[axis])]


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk",
      "split_copy", "split_with_sizes_copy", "unsafe_split_with_sizes", uniform=True)  # fmt: skip
def split_axis(call: Call) -> object:
    """Consecutive parts of an axis."""
    value = call.value("self")
    axis = int(call.get("dim", 0)) % value.ndim
    pieces = slice_axis(call, value.labels[axis], [shape[axis] for shape in call.shapes])
    return [[*value.labels[:axis], piece, *value.labels[axis + 1 :]] for piece in pieces]


@rule("slice_scatter", "select_scatter")
def scatter_part(call: Call) -> Labels:
    """A run of positions is replaced."""
    value, part = call.value("self"), call.value("src")
    axis = int(call.get("dim", 0)) % value.ndim
    label = value.labels[axis]
    kept = value.without(axis)
    part_labels = list(part.labels)
    if call.name == "select_scatter":
        index = int(call["index"]) % label.size
        slice_axis(call, label, [index, 1, label.size - index - 1])
    else:
        start, end, step = _bounds(call, label.size)
        target = _strided(call, label, start, end, step)
        call.unify(target, part_labels.pop(axis))
    for a, b in zip(kept, part_labels, strict=True):
        call.unify(a, b)
    _vector(call, [value, part])
    return value.labels


@rule("embedding")
def embedding(call: Call) -> Labels:
    """Rows of a table by index."""
    table, index = call.value("weight"), call.value("indices")
    call.pin(table.labels[0], INDEXED)
    call.role(table.labels[:1], Role.CONSUME)
    call.role(table.labels[1:], Role.PRODUCE)
    made = [Label(label.form) for label in table.labels[1:]]
    call.op(OpKind.OTHER, reads=[], writes=made, tensors={"weight": table}, detail="embedding")
    return [*index.labels, *made]


@rule("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call) -> object:
    """Sums or means of rows of a table."""
    table = call.value("weight")
    call.pin(table.labels[0], INDEXED)
    for value in call.operands():
        if value is not table:
            call.pin(value.labels, INDEXED)
    call.role(table.labels[:1], Role.CONSUME)
    call.role(table.labels[1:], Role.PRODUCE)
    if call.get("mode") == 2:  # the maximum, of which a positive factor takes none away
        call.restrict(table.labels[1], "scale")
    bag = call.pinned(call.shape[0], INDEXED)
    made = Label(table.labels[1].form)
    call.op(OpKind.OTHER, reads=[], writes=[made], tensors={"weight": table}, detail="embedding")
    others: list[list[Label]] = []
    for shape in call.shapes[1:]:
        labels = call.pinned_axes(shape, INDEXED)
        if len(shape) > 1 and shape[1] == made.size:
            labels[1] = made
        others.append(labels)
    if others and call.get("mode") == 2:
        call.pin(made, ORDERED)  # the indices of the maxima come out as well
    return [[bag, made], *others]


@rule("index", "_unsafe_index")
def index(call: Call) -> Labels:
    """x[i, :, j]: indexed axes go, the indices' axes come."""
    value = call.value("self")
    indices: list[Value | None] = list(call["indices"])
    indices += [None] * (value.ndim - len(indices))
    indexed = [d for d, at in enumerate(indices) if at is not None]
    call.pin(value.pick(indexed), INDEXED)
    present = [at for at in indices if at is not None]
    # A mask of several axes takes them all away and puts one in their place.
    if len(call.shape) != value.ndim - len(indexed) + max(at.ndim for at in present):
        raise ValueError("boolean masks choose a number of elements that depends on the data")
    made = broadcast(call, present)
    rest = value.without(*indexed)
    place = _place(indexed)
    return [*rest[:place], *made, *rest[place:]]


def _place(indexed: Sequence[int]) -> int:
    """Axes of indices stand in the place of those indexed, in front where these are apart."""
    adjacent = list(indexed) == list(range(indexed[0], indexed[-1] + 1))
    return indexed[0] if adjacent else 0


@rule("index_select")
def index_select(call: Call) -> Labels:
    """Positions of one axis by number."""
    value, at = call.value("self"), call.value("index")
    axis = int(call["dim"]) % value.ndim
    call.pin([value.labels[axis], *at.labels], INDEXED)
    labels = list(value.labels)
    labels[axis] = call.pinned(call.shape[axis], INDEXED)
    return labels


@rule("gather", "take_along_dim")
def gather(call: Call) -> Labels:
    """Every other axis is shared by table and index; with `take_along_dim` either broadcasts."""
    value, at = call.value("self"), call.value("index", "indices")
    dim = call.get("dim")
    if dim is None:  # of the flattened table
        call.pin([*value.labels, *at.labels], INDEXED)
        return call.pinned_axes(call.shape, INDEXED)
    axis = int(dim) % value.ndim
    labels: list[Label] = []
    for d, (a, b) in enumerate(zip(value.labels, at.labels, strict=True)):
        if d == axis:
            call.pin([a, b], INDEXED)
            labels.append(b)
        elif a.size == b.size:
            labels.append(call.unify(a, b))
            call.restrict(a)  # which element is taken may differ from unit to unit
        elif call.name == "take_along_dim":
            labels.extend(longer([a, b]))
        else:
            call.pin([a, b], INDEXED)
            labels.append(b)
    return labels


@rule("index_put", "_unsafe_index_put")
def index_put(call: Call) -> Labels:
    """x[:, i] = y: the axes indexed stay, every other one is shared with what is written."""
    value, written = call.value("self"), call.value("values")
    indices: list[Value | None] = list(call["indices"])
    if any(at is not None and at.ndim != 1 for at in indices):
        return _pin_all(call, value)  # it may be a mask, which stands for several axes
    indexed: list[int] = []
    for d, at in enumerate(indices):
        if at is not None:
            call.pin([value.labels[d], *at.labels], INDEXED)
            indexed.append(d)
    rest: list[Label | None] = list(value.without(*indexed))
    place = _place(indexed)
    target = [*rest[:place], None, *rest[place:]]
    for label, axis in zip(written.labels[::-1], target[::-1], strict=False):
        if axis is None:
            call.pin(label, INDEXED)
        elif label.size != 1:
            call.unify(axis, label)
    call.restrict(value.labels)
    _vector(call, [value, written])
    return value.labels


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill",
      "index_reduce", "masked_scatter")  # fmt: skip
def scatter(call: Call) -> Labels:
    """Writes at indices: the axis written is pinned where it is known, else all of them."""
    value = call.value("self")
    if "dim" not in call.arguments or value.ndim == 0:
        return _pin_all(call, value)
    axis = int(call["dim"]) % value.ndim
    operands = [v for v in call.operands() if v is not value]
    for other in operands:
        if other.ndim != value.ndim:
            call.pin(other.labels, INDEXED)
            continue
        for d, (a, b) in enumerate(zip(value.labels, other.labels, strict=True)):
            if d == axis:
                call.pin([a, b], INDEXED)
            elif a.size == b.size:
                call.unify(a, b)
            else:
                call.pin([a, b], INDEXED)
    call.pin(value.labels[axis], INDEXED)
    call.restrict(value.labels)
    _vector(call, call.operands())
    return value.labels


@rule("segment_reduce")
def segments(call: Call) -> Labels:
    """Runs of one axis reduced, each to one position."""
    value = call.value("data")
    last = int(call.get("axis", 0)) % value.ndim
    for operand in call.operands():
        call.pin(operand.labels[: last + 1], INDEXED)
    kept = value.labels[last + 1 :]
    call.restrict(kept)
    return [*call.pinned_axes(call.shape[: last + 1], INDEXED), *kept]


def _pin_all(call: Call, value: Value) -> Labels:
    for operand in call.operands():
        call.pin(operand.labels, INDEXED)
    return value.labels


@rule(
    "topk", "sort", "msort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp",
    "roll", "flip", "fliplr", "flipud", "diff", "kthvalue", "mode", "median", "nanmedian",
)  # fmt: skip
def ordered(call: Call) -> object:
    """Operators that look at the order along an axis: it stays."""
    value = call.value("self")
    for other in call.operands():
        if other is not value:  # what `diff` puts at the ends
            call.pin([*other.labels, *value.labels], ORDERED)
    dims = call.get("dim", call.get("dims"))
    if dims is None or (call.name == "roll" and not dims):
        dims = [-1] if call.name in ("topk", "sort", "argsort", "diff", "kthvalue") else None
    dims = [dims] if isinstance(dims, int) else dims
    axes = range(value.ndim) if dims is None else [d % value.ndim for d in dims]
    call.restrict(value.labels)
    call.pin(value.pick(axes), ORDERED)
    outs = [_fit(call, value, axes, shape) for shape in call.shapes]
    return outs if len(outs) > 1 else outs[0]


def _fit(call: Call, value: Value, axes: Sequence[int], shape: tuple[int, ...]) -> Labels:
    """Labels of an output whose ordered axes may have shrunk or gone."""
    if len(shape) == value.ndim:
        labels: list[Label] = []
        for d, (label, n) in enumerate(zip(value.labels, shape, strict=True)):
            same = label.size == n and d not in axes
            labels.append(label if same else call.pinned(n, ORDERED))
        return labels
    kept = value.without(*axes)
    return kept if len(kept) == len(shape) else call.pinned_axes(shape, ORDERED)


@rule("histc", "bincount", "bucketize", "searchsorted", "nonzero", "unique_dim", "_unique2")
def counted(call: Call) -> object:
    """What comes out is ordered by value."""
    for value in call.operands():
        call.pin(value.labels, ORDERED)
    outs = [call.pinned_axes(shape, ORDERED) for shape in call.shapes]
    return outs if len(outs) > 1 else outs[0]


@rule("tril", "triu", "diagonal", "diag_embed", "diag", "trace", "tril_indices", "triu_indices")
def triangle(call: Call) -> Labels:
    """The last two axes (or those named) are compared by position."""
    value = call.operands()[0]
    pair = [call.get("dim1", -2), call.get("dim2", -1)]
    if call.name in ("tril", "triu"):
        call.pin(value.labels[-2:], ORDERED)
        return value.labels
    call.pin(value.labels if call.name != "diagonal" else value.pick(pair), ORDERED)
    if call.name == "diagonal":
        gone = {d % value.ndim for d in pair}
        kept = value.without(*gone)
        return [*kept, call.pinned(call.shape[-1], ORDERED)]
    return call.pinned_axes(call.shape, ORDERED)


def _vector(call: Call, values: Sequence[Value]) -> None:
    if any_data(values):
        for value in values:
            call.role(value.labels, Role.VECTOR)
