"""A dense network and its pruned version, opened: one graph, zero units taken out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..align.models import Model
from ..checkpoint.config import read_config
from ..checkpoint.open import Checkpoint
from ..errors import IncompatibleModels, UsageError
from ..graph.model import LayerGraph
from ..graph.sizes import resize
from ..network.architecture import Architecture, architecture
from ..prune.advice import advice
from ..prune.masks import Compacted, compacted, unmask, zero_units
from .naming import named_alike
from .outputs import folder_config
from .parents import Parents, shapes_of
from .reconcile import reconcile
from .requests import PruneFuseRequest


def assemble_pruned(
    checkpoints: Sequence[Checkpoint], request: PruneFuseRequest, device: str
) -> tuple[Parents, tuple[str, ...]]:
    """Both models on one graph, the pruned one without units that are zero, and remarks.

    Raises:
        IncompatibleModels: No graph, or networks that differ in more than widths.
        UsageError: `keep_shape` without anything pruned in place.
    """
    dense_file, stored = named_alike(checkpoints, 1)
    masked = unmask(stored)
    pruned_file = masked.checkpoint
    # A network that differs in more than widths is described by the anchor alone.
    alike = request.strict and request.vocab == "refuse"
    known = _architecture((dense_file, pruned_file) if alike else (pruned_file,), request)
    graph = _fit(known.graph, pruned_file)
    common = reconcile(
        (dense_file, pruned_file), 1, graph, strict=request.strict, vocab=request.vocab
    )
    dense = Model(0, common.checkpoints[0], _fit(common.graph, common.checkpoints[0]), device)
    pruned = Model(1, common.checkpoints[1], common.graph, device)
    whole = Model(1, pruned_file, graph, device)
    remarks: tuple[str, ...] = ()
    compaction: Compacted | None = None
    if shapes_of(dense_file) == shapes_of(pruned_file):
        kept = zero_units(pruned)
        if kept or masked.masks:
            compaction = compacted(masked, pruned, kept)
            pruned = whole = Model(1, compaction.checkpoint, compaction.graph, device)
            remarks = (*compaction.warnings, *_said(kept, pruned.graph, request))
    if request.keep_shape and compaction is None:
        raise UsageError(
            "no unit of PRUNED is pruned in place",
            where="--keep-shape",
            why="there are no masks and no rows of zeros in the shape of DENSE",
            fix="leave the option out: the output has the shape of PRUNED",
        )
    parents = Parents(
        (dense, pruned),
        1,
        known,
        whole,
        common.kept,
        common.complete,
        (*(c.remark for c in (dense_file, stored) if c.remark), *common.warnings),
    )
    if request.keep_shape and compaction is not None:
        return replace(parents, stored_like=stored, store=compaction.restored), remarks
    if compaction is not None:
        own = read_config(stored.path)
        told = advice(graph, compaction.graph, config=own)
        config, said = folder_config(request.output, own, told)
        parents, remarks = replace(parents, config=config), (*remarks, *said)
    return parents, remarks


def _architecture(checkpoints: Sequence[Checkpoint], request: PruneFuseRequest) -> Architecture:
    """Of the dense network, which a config.json or a factory mostly describes; else the pruned."""
    first: IncompatibleModels | None = None
    for checkpoint in checkpoints:
        try:
            return architecture(
                request.arch,
                shapes_of(checkpoint),
                aliases=checkpoint.aliases,
                config=read_config(checkpoint.path),
                label=checkpoint.label,
                free_outputs=request.free_outputs,
            )
        except IncompatibleModels as error:
            first = first or error
    assert first is not None
    raise first


def _fit(graph: LayerGraph, checkpoint: Checkpoint) -> LayerGraph:
    shapes = shapes_of(checkpoint)
    if shapes == {name: node.shape for name, node in graph.tensors.items()}:
        return graph
    source = f"the network ({graph.source})"
    return resize(graph, shapes, label=checkpoint.label, anchor=source, whole_groups=True)


def _said(kept: object, graph: LayerGraph, request: PruneFuseRequest) -> tuple[str, ...]:
    if not kept or request.keep_shape:
        return ()
    return (
        "units of PRUNED whose weights are all zero were taken out: the output is smaller than "
        "PRUNED (--keep-shape writes its shape)",
    )
