"""The architecture of a checkpoint, or of several of one network: named, known, or guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..checkpoint.config import config_folder, read_config
from ..checkpoint.open import Checkpoint
from ..errors import IncompatibleModels, OtfuseError
from ..graph.axes import axis_units
from ..graph.plain import plain_graph
from ..graph.spec.adapters import refuse_adapter
from ..graph.spec.stored_shapes import StoredShapes
from ..running.arch_value import Arch
from ..running.architecture import Architecture, architecture
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
        find = partial(automatic, folder=config_folder(checkpoint.path))
    try:
        found = find(
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
    return found if found.network is None else _with_complex_pinned(found, checkpoint)


def _with_complex_pinned(found: Architecture, checkpoint: Checkpoint) -> Architecture:
    """Units of complex tensors stay in place: no cost is defined for them."""
    graph = found.graph
    held: set[str] = set()
    for name, tensor in graph.tensors.items():
        if checkpoint.infos[name].dtype.is_complex:
            for axis in tensor.axes:
                held.update(axis_units(axis.expr))
    spaces = {
        id: replace(space, pinned="complex") if id in held and space.pinned is None else space
        for id, space in graph.spaces.items()
    }
    return replace(found, graph=replace(graph, spaces=spaces)) if held else found


def find_architectures(
    checkpoints: Sequence[Checkpoint],
    anchor_index: int,
    arch: Any,
    *,
    free_outputs: bool = False,
    untied: bool = False,
    plain: bool = False,
) -> tuple[Architecture, dict[int, Architecture]]:
    """The anchor's architecture, and those of the models that have a network of their own.

    Raises:
        UsageError: See `arch_of_each`.
        IncompatibleModels: Nothing tells them.
    """
    arches = arch_of_each(arch, len(checkpoints))
    lent = None if plain else _lent(checkpoints, anchor_index, arches)
    if lent is not None:
        try:
            return find_architectures(
                checkpoints, anchor_index, lent, free_outputs=free_outputs, untied=untied
            )
        except OtfuseError:
            pass  # it is another network after all, or the library fails: names and shapes are left

    def find(at: int) -> Architecture:
        network_of = find_architecture(
            checkpoints[at], arches[at], free_outputs=free_outputs, untied=untied, plain=plain
        )
        if network_of.network is None:
            return network_of
        from ..running.runnable import at_widths

        return at_widths(network_of, shapes_of(checkpoints[at]), checkpoints[at].label)

    of_anchor = find(anchor_index)
    return of_anchor, own_architectures(of_anchor, checkpoints, anchor_index, arches, find)


def _lent(
    checkpoints: Sequence[Checkpoint], anchor_index: int, arches: Sequence[Arch]
) -> str | None:
    """The library's network that another checkpoint is of, where the anchor has other widths."""
    if any(arch != "auto" for arch in arches):
        return None

    def known(at: int) -> str | None:
        path = checkpoints[at].path
        said = library_arch(
            "auto", shapes_of(checkpoints[at]), read_config(path), config_folder(path)
        )
        return said if isinstance(said, str) and said != "auto" else None

    if known(anchor_index) is not None:
        return None  # found for itself
    return next(filter(None, map(known, range(len(checkpoints)))), None)
