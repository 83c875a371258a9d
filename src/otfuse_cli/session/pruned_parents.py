"""A dense network and its pruned version, opened: one graph, zero units taken out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..checkpoint.config import read_config
from ..checkpoint.open import Checkpoint
from ..errors import IncompatibleModels, UsageError, few
from ..graph.analysis.agreement import agreed_sizes
from ..graph.model import LayerGraph
from ..graph.sizes import resize
from ..matching.models import Model
from ..pruning.advice import advice
from ..pruning.masks import Compacted, Masked, compacted, unmask, zero_units
from ..requests.requests import PruneFuseRequest
from ..running.arch_value import Arch
from ..running.architecture import Architecture
from .architectures import arch_of_each, own_architectures
from .computed_tensors import settle
from .find_architecture import find_architecture, shapes_of
from .naming import named_alike
from .outputs import folder_config
from .parents import Parents
from .reconcile import reconcile
from .tied_tensors import OneTensor, tie


def assemble_pruned(
    checkpoints: Sequence[Checkpoint], request: PruneFuseRequest, device: str
) -> tuple[Parents, tuple[str, ...]]:
    """Both models on one graph, the pruned one without units that are zero, and remarks.

    Raises:
        IncompatibleModels: No graph, or networks that differ in more than widths.
        UsageError: `keep_shape` without anything pruned in place.
    """
    files = named_alike(checkpoints, 1)
    return _assembled(files, tie(files, 1, arch_of_each(request.arch, 2)[1]), request, device)


def _assembled(
    files: Sequence[Checkpoint], one: OneTensor, request: PruneFuseRequest, device: str
) -> tuple[Parents, tuple[str, ...]]:
    """As `assemble_pruned`, of files in which `one` sees tied tensors as one."""
    dense_file, stored = one.checkpoints
    masked = unmask(stored)
    pruned_file = masked.checkpoint
    # A network that differs in more than widths is described by the anchor alone.
    alike = request.strict and request.vocab == "refuse"
    arches = arch_of_each(request.arch, 2)
    places = (0, 1) if alike else (1,)
    of, shared = _architecture(places, (dense_file, pruned_file), arches, request)
    separate = _others(of, shared, (dense_file, pruned_file), arches, request)
    graph = _fit(shared.graph, pruned_file)
    common = reconcile(
        (dense_file, pruned_file), 1, graph, strict=request.strict, vocab=request.vocab
    )
    dense = Model(0, common.checkpoints[0], _fit(common.graph, common.checkpoints[0]), device)
    pruned = Model(1, common.checkpoints[1], common.graph, device)
    whole = Model(1, pruned_file, graph, device)
    remarks: tuple[str, ...] = ()
    compaction: Compacted | None = None
    if shapes_of(dense_file) == shapes_of(pruned_file):
        compaction, remarks = _compaction(masked, pruned, request)
    if compaction is not None:
        pruned = whole = Model(1, compaction.checkpoint, compaction.graph, device)
    if compaction is not None and one.copies:
        # What stays is stored anew, name by name: there each name has a tensor of its own.
        apart = few(sorted(one.copies))
        warning = f"{apart}: stored under two names, pruned in place: fused as two tensors"
        return _assembled(files, OneTensor(tuple(files), warnings=(warning,)), request, device)
    if request.keep_shape and compaction is None:
        raise _nothing_to_keep()
    parents = Parents(
        (dense, pruned),
        1,
        shared,
        whole,
        common.kept,
        common.complete,
        (
            *shared.remarks,
            *one.warnings,
            *(c.remark for c in files if c.remark),
            *common.warnings,
        ),
        own_architectures=separate,
    )
    if request.keep_shape and compaction is not None:
        return replace(parents, stored_like=stored, store=compaction.restored), remarks
    if compaction is not None:
        config_beside = read_config(stored.path)
        changes = advice(graph, compaction.graph, config=config_beside)
        config, said = folder_config(request.output, config_beside, changes)
        return replace(parents, config=config), (*remarks, *said)
    if one.copies:
        parents = replace(parents, stored_like=files[1], copies=one.copies)
    return settle(parents, keep=request.align != "none"), remarks


def _compaction(
    masked: Masked, pruned: Model, request: PruneFuseRequest
) -> tuple[Compacted | None, tuple[str, ...]]:
    """What was pruned in place, taken out; None where nothing was. Remarks on it."""
    kept = zero_units(pruned)
    if not kept and not masked.masks:
        return None, ()
    compaction = compacted(masked, pruned, kept)
    return compaction, (*compaction.warnings, *_said(kept, compaction.graph, request))


def _nothing_to_keep() -> UsageError:
    return UsageError(
        "no unit of PRUNED is pruned in place",
        where="--keep-shape",
        why="there are no masks and no rows of zeros in the shape of DENSE",
        fix="leave the option out: the output has the shape of PRUNED",
    )


def _architecture(
    places: Sequence[int],
    checkpoints: Sequence[Checkpoint],
    arches: Sequence[Arch],
    request: PruneFuseRequest,
) -> tuple[int, Architecture]:
    """Of the dense network, which a config.json or a factory mostly describes; else the pruned."""
    first: IncompatibleModels | None = None
    for at in places:
        try:
            candidate = find_architecture(
                checkpoints[at], arches[at], free_outputs=request.free_outputs
            )
        except IncompatibleModels as error:
            first = first or error
        else:
            return at, candidate
    assert first is not None
    raise first


def _others(
    of: int,
    shared: Architecture,
    checkpoints: Sequence[Checkpoint],
    arches: Sequence[Arch],
    request: PruneFuseRequest,
) -> dict[int, Architecture]:
    """Networks of their own, of one structure with that of checkpoint `of`."""

    def find(at: int) -> Architecture:
        return find_architecture(checkpoints[at], arches[at], free_outputs=request.free_outputs)

    separate = own_architectures(shared, checkpoints, of, arches, find)
    for at, architecture in separate.items():
        agreed_sizes(
            architecture.graph,
            shared.graph,
            label=checkpoints[at].label,
            anchor_label=checkpoints[of].label,
        )
    return separate


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
