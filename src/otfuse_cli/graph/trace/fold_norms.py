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
        members = {gate, *inner}
        if _readers(ops, members) <= members | {last}:
            gone |= members
    return _renumber([norms.get(i, op) for i, op in enumerate(ops)], gone)


def _readers(ops: Sequence[OpRecord], members: set[int]) -> set[int]:
    """Operations that read what one of `members` wrote."""
    readers: set[int] = set()
    for i, op in enumerate(ops):
        if any(members.intersection(made) for made in op.inputs):
            readers.add(i)
    return readers


def _rms(ops: Sequence[OpRecord], last: int) -> tuple[int, ...] | None:
    """Operations before `last` that make it an RMS norm, the product with the input first."""
    op = ops[last]
    if op.detail != "scale" or "scale" not in op.tensors:
        return None
    gate = _only(op, 0)
    if gate is None or ops[gate].detail != "gate":
        return None
    # Followed back from the product: rsqrt of a mean of a square; adding epsilon leaves no record.
    root = _only(ops[gate], 1)
    if root is None or ops[root].detail != "rsqrt":
        return None
    mean = _only(ops[root], 0)
    if mean is None or ops[mean].detail != "mean":
        return None
    square = _only(ops[mean], 0)
    if square is None or ops[square].detail not in ("pow", "square"):
        return None
    # What is squared has to be what is divided.
    same = ops[square].inputs[:1] == ops[gate].inputs[:1]
    return (gate, root, mean, square) if same else None


def _only(op: OpRecord, read: int) -> int | None:
    """The one operation that wrote what `op` reads there."""
    if read >= len(op.inputs) or len(op.inputs[read]) != 1:
        return None
    return op.inputs[read][0]


def _renumber(ops: Sequence[OpRecord], gone: set[int]) -> list[OpRecord]:
    kept = [i for i in range(len(ops)) if i not in gone]
    place = {old: new for new, old in enumerate(kept)}
    renumbered: list[OpRecord] = []
    for i in kept:
        inputs: list[tuple[int, ...]] = []
        for made in ops[i].inputs:
            inputs.append(tuple(place[old] for old in made if old in place))
        renumbered.append(replace(ops[i], inputs=tuple(inputs)))
    return renumbered
