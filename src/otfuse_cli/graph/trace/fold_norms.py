"""Norms written out in elementary operations, put together again as the one operation they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..model import OpKind
from .call import OpRecord


def fold_rms(ops: Sequence[OpRecord]) -> list[OpRecord]:
    """Every `w * (x * rsqrt(mean(x^2) + eps))` as one norm of kind `rms`.

    The orthogonal treatment of residual streams depends on knowing them, and most transformers
    write them out. What else reads the intermediate results keeps them.
    """
    norms: dict[int, OpRecord] = {}
    gone: set[int] = set()
    for last, op in enumerate(ops):
        parts = _rms(ops, last)
        if parts is None:
            continue
        gate, *inner = parts
        source = ops[gate]
        norms[last] = replace(
            op,
            kind=OpKind.NORM,
            tensors={"weight": op.tensors["scale"]},
            reads=source.reads[:1],
            detail="rms",
            inputs=source.inputs[:1],
        )
        mine = {gate, *inner}
        readers = {i for i, o in enumerate(ops) for made in o.inputs if mine & set(made)}
        if readers <= mine | {last}:
            gone |= mine
    return _renumber([norms.get(i, op) for i, op in enumerate(ops)], gone)


def _rms(ops: Sequence[OpRecord], last: int) -> tuple[int, ...] | None:
    """Operations before `last` that make it an RMS norm, the product with the input first."""
    op = ops[last]
    if op.detail != "scale" or "scale" not in op.tensors:
        return None
    gate = _only(op, 0)
    if gate is None or ops[gate].detail != "gate":
        return None
    root = _only(ops[gate], 1)
    mean = _only(ops[root], 0) if root is not None and ops[root].detail == "rsqrt" else None
    square = _only(ops[mean], 0) if mean is not None and ops[mean].detail == "mean" else None
    if root is None or mean is None or square is None:
        return None
    same = ops[square].inputs[:1] == ops[gate].inputs[:1]
    return (gate, root, mean, square) if ops[square].detail in ("pow", "square") and same else None


def _only(op: OpRecord, read: int) -> int | None:
    """The one operation that wrote what `op` reads there."""
    if read >= len(op.inputs) or len(op.inputs[read]) != 1:
        return None
    return op.inputs[read][0]


def _renumber(ops: Sequence[OpRecord], gone: set[int]) -> list[OpRecord]:
    kept = [i for i in range(len(ops)) if i not in gone]
    place = {old: new for new, old in enumerate(kept)}
    return [
        replace(
            ops[i],
            inputs=tuple(tuple(place[o] for o in made if o in place) for made in ops[i].inputs),
        )
        for i in kept
    ]
