"""Checkpoints that differ in more than widths: which tensors all have, and how much of them.

Policy (docs/checkpoints.md). Strict: a tensor that one side lacks is an error. Not strict: what any
model lacks is kept from the anchor, what the anchor lacks is dropped. Rows of embeddings and heads
(`--vocab`): an error that names both sizes; the common rows averaged; or all rows the anchor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..checkpoint.open import Checkpoint
from ..checkpoint.view import View
from ..errors import IncompatibleModels, few, only_in
from ..graph.analysis.restrict import cut_rows, cuttable, keep_tensors
from ..graph.model import LayerGraph


@dataclass(frozen=True)
class Reconciled:
    """What all models have.

    Attributes:
        checkpoints: Every checkpoint, or its view, in order.
        graph: The anchor's graph of that.
        kept: Tensors of the anchor that are not averaged.
        complete: Every checkpoint has all tensors and rows of the anchor.
        warnings: What was kept and dropped.
    """

    checkpoints: tuple[Checkpoint, ...]
    graph: LayerGraph
    kept: frozenset[str] = frozenset()
    complete: bool = True
    warnings: tuple[str, ...] = field(default=())


def reconcile(
    checkpoints: Sequence[Checkpoint],
    anchor_index: int,
    graph: LayerGraph,
    *,
    strict: bool,
    vocab: str,
) -> Reconciled:
    """Fit checkpoints to one another, as far as the options allow.

    Raises:
        IncompatibleModels: Different tensors and `strict`, different vocabularies and `vocab` is
            `refuse`, or nothing in common.
    """
    anchor = checkpoints[anchor_index]
    warnings: list[str] = []
    names = set(anchor.infos)
    differing = {at for at, c in enumerate(checkpoints) if c.infos.keys() != anchor.infos.keys()}
    if differing and not strict:
        for at in sorted(differing):
            warnings += _dropped(anchor, checkpoints[at])
            names &= checkpoints[at].infos.keys()
        _require_something(names, anchor, checkpoints[min(differing)])
    elif differing:
        return Reconciled(tuple(checkpoints), graph)  # refused with all names when sizes are fitted
    if len(names) < len(graph.tensors):
        graph = keep_tensors(graph, names)
    _require_kinds(checkpoints, anchor, names)
    rows = _common_rows(checkpoints, anchor_index, graph, vocab)
    warnings += [_rows_warning(name, count, anchor, vocab) for name, count in rows.items()]
    if not differing and not rows:
        return Reconciled(tuple(checkpoints), graph)
    lost = anchor.infos.keys() - names
    return Reconciled(
        tuple(View(c, names, rows) for c in checkpoints),
        cut_rows(graph, rows),
        frozenset(lost | (rows.keys() if vocab == "anchor" else set())),
        not lost and not rows,
        tuple(warnings),
    )


def _dropped(anchor: Checkpoint, source: Checkpoint) -> list[str]:
    missing = [n for n in anchor.infos if n not in source.infos]
    extra = [n for n in source.infos if n not in anchor.infos]
    remarks = []
    if missing:
        remarks.append(f"kept from {anchor.label}: {only_in(missing, anchor.label, source.label)}")
    if extra:
        remarks.append(f"dropped: {only_in(extra, source.label, anchor.label)}")
    return remarks


def _require_something(names: set[str], anchor: Checkpoint, other: Checkpoint) -> None:
    if not names:
        raise IncompatibleModels(
            "the checkpoints have no tensor in common",
            where=f"{anchor.label} and {other.label}",
            why=f"{few(list(anchor.infos))} here, {few(list(other.infos))} there",
            fix="fuse checkpoints of one architecture",
        )


def _require_kinds(checkpoints: Sequence[Checkpoint], anchor: Checkpoint, names: set[str]) -> None:
    """Complex weights are averaged with complex ones only: a real one has no place for them."""
    for checkpoint in checkpoints:
        for name, anchor_info in anchor.infos.items():
            dtype = checkpoint.infos[name].dtype if name in names else anchor_info.dtype
            if dtype.is_complex != anchor_info.dtype.is_complex:
                raise IncompatibleModels(
                    "a complex tensor in one model, a real one in the other",
                    where=f"{name}: {dtype} in {checkpoint.label}, {anchor_info.dtype} in "
                    f"{anchor.label}",
                    fix="convert one of the files",
                )


def _common_rows(
    checkpoints: Sequence[Checkpoint], anchor_index: int, graph: LayerGraph, vocab: str
) -> dict[str, int]:
    """Tensors with different numbers of rows on a pinned axis 0, and how many all have."""
    anchor = checkpoints[anchor_index]
    rows: dict[str, int] = {}
    for name, tensor in graph.tensors.items():
        shapes = [c.infos[name].shape for c in checkpoints]
        anchor_shapes = shapes[anchor_index]
        if (
            not anchor_shapes
            or any(len(s) != len(anchor_shapes) for s in shapes)
            or not cuttable(graph, tensor)
        ):
            continue
        sizes = [s[0] for s in shapes]
        if min(sizes) == max(sizes):
            continue
        if vocab == "refuse":
            other = next(at for at, size in enumerate(sizes) if size != anchor_shapes[0])
            raise _different(name, checkpoints[other], anchor, min(sizes))
        rows[name] = min(sizes)
    return rows


def _different(
    name: str, source: Checkpoint, anchor: Checkpoint, common: int
) -> IncompatibleModels:
    source_shape, anchor_shape = list(source.infos[name].shape), list(anchor.infos[name].shape)
    return IncompatibleModels(
        "the models have different vocabularies or classes",
        where=f"{name} axis 0: {source_shape} in {source.label}, {anchor_shape} in {anchor.label}",
        why=f"{source_shape[0]} and {anchor_shape[0]} rows; rows of embeddings and heads are never "
        "matched",
        fix=f"--vocab common averages the first {common} rows, --vocab anchor keeps those of "
        f"{anchor.label}; both have its {anchor_shape[0]} rows",
    )


def _rows_warning(name: str, count: int, anchor: Checkpoint, vocab: str) -> str:
    anchor_rows = anchor.infos[name].shape[0]
    if vocab == "anchor":
        return f"{name}: all {anchor_rows} rows are those of {anchor.label} (--vocab anchor)"
    rest = f", {anchor_rows - count} kept from {anchor.label}" if anchor_rows > count else ""
    return f"{name}: the first {count} rows are averaged{rest} (--vocab common)"
