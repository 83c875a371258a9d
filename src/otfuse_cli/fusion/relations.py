"""What a tensor is a function of, found by its values: every parent must say so.

Networks keep tensors beside their weights that follow from them: a weight with its norm folded in,
rows' norms, a table looked up once, sums that a codebook is the quotient of. Their average is not
that function of the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from ..graph.model import Derived

Read = Callable[[str], Tensor]
Shapes = Mapping[str, tuple[int, ...]]

# Relative error up to which a tensor counts as computed from others: float32 with some arithmetic,
# and what smoothing by a small constant does to a codebook.
_CLOSE = 1e-3
# Cosine from which a copy that lags behind counts as one: averages over training have 0.99.
_FOLLOWS = 0.9
_TINY = 1e-12  # of normalisations
_EPS = (1e-5, 1e-3, 1e-6, 0.0)  # of BatchNorm: torch, TensorFlow's ports


def relation(
    target: str,
    beside: Sequence[str],
    shapes: Shapes,
    reads: Sequence[Read],
    *,
    without: Collection[str] = (),
) -> Derived | None:
    """The first function of tensors in `beside` that `target` is in every model; None for none.

    `without` are tensors that it can't be a function of first of all.
    """
    for derived in _candidates(target, beside, shapes):
        if derived.source not in without and all(holds(derived, read) for read in reads):
            return derived
    return None


def holds(derived: Derived, read: Read) -> bool:
    """Whether a model's tensor is this function of its others, up to rounding."""
    (target,) = derived.tensors
    wanted = read(target).double()
    try:
        expected = computed(derived, {n: read(n).double() for n in derived.sources})
    except (IndexError, RuntimeError):  # a model of other widths, an index that is none
        return False
    if expected.shape != wanted.shape:
        return False
    scale = float(wanted.norm())
    return scale > 0 and float((expected - wanted).norm()) <= _CLOSE * scale


def follows(one: str, other: str, read: Read) -> bool:
    """Whether a tensor is a copy of another one, a little behind or ahead."""
    a, b = read(one).double().flatten(), read(other).double().flatten()
    return bool(a @ b >= _FOLLOWS * a.norm() * b.norm()) and bool(b.norm() > 0)


def computed(derived: Derived, values: Mapping[str, Tensor]) -> Tensor:
    """The function of a relation, in the dtype of its values."""
    tensors = [values[name] for name in derived.sources]
    return _FUNCTIONS[derived.kind](tensors, derived)


def _copy(tensors: Sequence[Tensor], derived: Derived) -> Tensor:
    return tensors[0].permute(derived.order) if derived.order else tensors[0]


def _unit(tensors: Sequence[Tensor], derived: Derived) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(tensors[0], dim=derived.dim, keepdim=True)
    return tensors[0] / length.clamp_min(_TINY)


def _norms(tensors: Sequence[Tensor], derived: Derived) -> Tensor:
    return _squares(tensors, derived).sqrt()


def _squares(tensors: Sequence[Tensor], derived: Derived) -> Tensor:
    return tensors[0].movedim(derived.dim, 0).flatten(1).square().sum(1)


def _gained(tensors: Sequence[Tensor], derived: Derived) -> Tensor:
    """A direction times a gain, as weight normalisation has them."""
    direction, gain = tensors
    rest = [d for d in range(direction.dim()) if gain.shape[d] == 1]
    length: Tensor = torch.linalg.vector_norm(direction, dim=rest, keepdim=True)
    return direction * (gain / length.clamp_min(_TINY))


def _sums(tensors: Sequence[Tensor], derived: Derived) -> Tensor:
    """What a codebook is the quotient of: its codes times how often each was used."""
    codes, uses = tensors
    shape = [n if d in derived.order else 1 for d, n in enumerate(codes.shape)]
    return codes * uses.reshape(shape)


def _folded(tensors: Sequence[Tensor], derived: Derived) -> Tensor:
    """A weight with the BatchNorm behind it in its rows."""
    weight, gain, variance = tensors
    factor = gain * (variance + derived.eps).rsqrt()
    return weight * factor.view(-1, *[1] * (weight.dim() - 1))


def _shift(tensors: Sequence[Tensor], derived: Derived) -> Tensor:
    """The bias that goes with it; the layer's own comes last where there is one."""
    gain, bias, mean, variance, *layer_bias = tensors
    factor = gain * (variance + derived.eps).rsqrt()
    return bias + ((layer_bias[0] if layer_bias else 0) - mean) * factor


def _looked_up(tensors: Sequence[Tensor], derived: Derived) -> Tensor:
    table, index = tensors
    return table[index.long().flatten()].view(*index.shape, *table.shape[1:]).permute(derived.order)


_FUNCTIONS: dict[str, Callable[[Sequence[Tensor], Derived], Tensor]] = {
    "copy": _copy,
    "unit": _unit,
    "norms": _norms,
    "squares": _squares,
    "gained": _gained,
    "sums": _sums,
    "folded": _folded,
    "shift": _shift,
    "looked up": _looked_up,
}


def _candidates(target: str, beside: Sequence[str], shapes: Shapes) -> Iterator[Derived]:
    """Functions that shapes allow, the plainest first."""
    shape = shapes[target]
    parts = {"value": target}
    others = [n for n in beside if n != target]
    for name in others:
        other_shape = shapes[name]
        if other_shape == shape:
            yield Derived("copy", name, parts)
        elif sorted(other_shape) == sorted(shape) and len(other_shape) > 1:
            for order in permutations(range(len(other_shape))):
                if tuple(other_shape[d] for d in order) == shape:
                    yield Derived("copy", name, parts, order=order)
    for name in others:
        other_shape = shapes[name]
        if other_shape == shape and len(other_shape) > 1:
            yield from (Derived("unit", name, parts, dim=d) for d in range(len(other_shape)))
            yield from _with_one_more(target, name, others, shapes)
        if len(shape) == 1 and len(other_shape) > 1:
            for dim in _axes_of_size(other_shape, shape[0]):
                yield Derived("norms", name, parts, dim=dim)
                yield Derived("squares", name, parts, dim=dim)
        for index in others:
            if len(other_shape) == 2 and shapes[index] and index != name:
                yield from _lookups(target, name, index, shapes)
    yield from _batch_norms(target, others, shapes)


def _axes_of_size(shape: tuple[int, ...], size: int) -> list[int]:
    return [dim for dim, n in enumerate(shape) if n == size]


def _with_one_more(
    target: str, name: str, others: Sequence[str], shapes: Shapes
) -> Iterator[Derived]:
    """A weight and a tensor with one number for some of its axes."""
    whole, parts = shapes[name], {"value": target}
    for more in others:
        small = shapes[more]
        if more == name or not small or small == whole:
            continue
        if len(small) == len(whole) and all(a in (1, b) for a, b in zip(small, whole, strict=True)):
            yield Derived("gained", name, parts, others=(more,))
        for dims in _places(small, whole):
            yield Derived("sums", name, parts, others=(more,), order=dims)


def _places(small: tuple[int, ...], whole: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Axes of a shape that a smaller one may stand for, in order: one axis, or the first ones."""
    if len(small) == 1:
        yield from ((d,) for d, n in enumerate(whole) if n == small[0])
    elif len(small) < len(whole) and whole[: len(small)] == small:
        yield tuple(range(len(small)))


def _lookups(target: str, table: str, index: str, shapes: Shapes) -> Iterator[Derived]:
    made = (*shapes[index], *shapes[table][1:])
    wanted, parts = shapes[target], {"value": target}
    rolled = (len(made) - 1, *range(len(made) - 1))
    for order in (tuple(range(len(made))), rolled):
        if tuple(made[d] for d in order) == wanted:
            yield Derived("looked up", table, parts, others=(index,), order=order)


def _batch_norms(target: str, others: Sequence[str], shapes: Shapes) -> Iterator[Derived]:
    rows, parts = shapes[target][0] if shapes[target] else 0, {"value": target}
    for variance in others:
        if not variance.endswith("running_var") or shapes[variance] != (rows,):
            continue
        norm = variance.removesuffix("running_var")
        gain, bias, mean = (f"{norm}{part}" for part in ("weight", "bias", "running_mean"))
        if not {gain, bias, mean} <= set(others):
            continue
        for eps in _EPS:
            for name in others:
                if len(shapes[name]) > 1 and shapes[name] == shapes[target]:
                    yield Derived("folded", name, parts, others=(gain, variance), eps=eps)
            if len(shapes[target]) == 1:
                whole = (bias, mean, variance)
                yield Derived("shift", gain, parts, others=whole, eps=eps)
                for layer_bias in others:
                    if shapes[layer_bias] == (rows,) and not layer_bias.startswith(norm):
                        yield Derived("shift", gain, parts, others=(*whole, layer_bias), eps=eps)
