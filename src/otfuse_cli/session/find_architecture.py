"""The architecture of a checkpoint, or of several of one network: named, known, or guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..checkpoint.config import network_folder, read_config
from ..checkpoint.open import Checkpoint
from ..errors import IncompatibleModels, OtfuseError
from ..graph.plain import plain_graph
from ..graph.spec.adapters import refuse_adapter
from ..graph.spec.stored_shapes import StoredShapes
from ..running.arch_value import Arch
from ..running.architecture import Architecture, architecture, other_widths
from ..running.automatic import automatic, library_arch
from .architectures import arch_of_each, own_architectures


def shapes_of(checkpoint: Checkpoint) -> StoredShapes:
    """Shape of every tensor, in the order of the file."""
    infos = checkpoint.infos
    return StoredShapes(
        {name: info.shape for name, info in infos.items()},
        {name: str(info.dtype).removeprefix("torch.") for name, info in infos.items()},
    )


def find_architecture(
    checkpoint: Checkpoint,
    arch: Arch,
    *,
    free_outputs: bool = False,
    untied: bool = False,
    plain: bool = False,
) -> Architecture:
    """A checkpoint's graph; where units stay (`plain`) and nothing tells it, one without units.

    Raises:
        IncompatibleModels: Nothing tells it, and units are to be matched.
    """
    find: Callable[..., Architecture] = partial(architecture, arch)
    if arch == "auto" and not plain:
        find = partial(automatic, folder=network_folder(checkpoint.path))
    try:
        described = find(
            shapes_of(checkpoint),
            aliases=checkpoint.aliases,
            config=read_config(checkpoint.path),
            label=checkpoint.label,
            free_outputs=free_outputs,
            untied=untied,
        )
    except IncompatibleModels:
        if not (plain and arch == "auto"):
            raise
        refuse_adapter(shapes_of(checkpoint), checkpoint.label)  # factors have no average
        return Architecture(plain_graph(shapes_of(checkpoint), checkpoint.aliases))
    return _comparable(described, checkpoint)


def library_arch_of(checkpoint: Checkpoint, arch: Arch) -> Arch:
    """What `auto` stands for, where a library that is installed has the checkpoint's network."""
    path = checkpoint.path
    return library_arch(arch, shapes_of(checkpoint), read_config(path), network_folder(path))


def _comparable(architecture: Architecture, checkpoint: Checkpoint) -> Architecture:
    """Of a traced network, units without a cost stay: complex ones, and of whole numbers alone.

    What names alone tell is refused instead, when it is to be matched.
    """
    if architecture.network is None or architecture.graph.assumes is not None:
        return architecture
    spaces = dict(architecture.graph.spaces)
    for space in architecture.graph.free():
        dtypes = {checkpoint.infos[name].dtype for name, _ in architecture.graph.members[space.id]}
        if any(dtype.is_complex for dtype in dtypes):
            spaces[space.id] = replace(space, pinned="complex")
        elif not any(dtype.is_floating_point for dtype in dtypes):
            spaces[space.id] = replace(space, pinned="whole numbers")
    return replace(architecture, graph=replace(architecture.graph, spaces=spaces))


def find_architectures(
    checkpoints: Sequence[Checkpoint],
    anchor_index: int,
    arch: Any,
    *,
    free_outputs: bool = False,
    untied: bool = False,
    plain: bool = False,
    any_depth: bool = False,
) -> tuple[Architecture, dict[int, Architecture]]:
    """The anchor's architecture, and those of the models that have a network of their own.

    With `any_depth` models with other tensors than the anchor have one.

    Raises:
        UsageError: See `arch_of_each`.
        IncompatibleModels: Nothing tells them.
    """
    arches = arch_of_each(arch, len(checkpoints))
    lent = None if plain else _lent(checkpoints, anchor_index, arches)
    if lent is not None:
        try:
            return find_architectures(
                checkpoints,
                anchor_index,
                lent,
                free_outputs=free_outputs,
                untied=untied,
                any_depth=any_depth,
            )
        except OtfuseError:
            pass  # it is another network after all, or the library fails: names and shapes are left

    def find(at: int) -> Architecture:
        network_of = find_architecture(
            checkpoints[at], arches[at], free_outputs=free_outputs, untied=untied, plain=plain
        )
        shapes = shapes_of(checkpoints[at])
        if network_of.network is None or not other_widths(network_of, shapes):
            return network_of
        from ..running.runnable import at_widths

        traced = at_widths(network_of, shapes, checkpoints[at].label)
        return _comparable(traced, checkpoints[at])  # where it was traced anew

    of_anchor = find(anchor_index)
    separate = own_architectures(
        of_anchor, checkpoints, anchor_index, arches, find, any_depth=any_depth
    )
    return of_anchor, separate


def _lent(
    checkpoints: Sequence[Checkpoint], anchor_index: int, arches: Sequence[Arch]
) -> Arch | None:
    """The library's network that another checkpoint is of, where the anchor has other widths."""
    if any(arch != "auto" for arch in arches):
        return None

    said = [library_arch_of(checkpoint, "auto") for checkpoint in checkpoints]
    if said[anchor_index] != "auto":
        return None  # found for itself
    return next((one for one in said if one != "auto"), None)
