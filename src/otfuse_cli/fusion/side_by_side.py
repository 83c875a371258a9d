"""All parents as one network, exactly: units side by side, blocks between them.

What a layer of a parent reads are its own parent's units, so that weights between hidden layers are
blocks on a diagonal. All read the same input, and the output layer adds up what each says, times
its weight: its logits are the weighted mean of theirs (docs/methods/joint.md, Wider). That takes
units that are computed one by one from what a layer hands them: whatever looks at several of them
at once (a LayerNorm, a softmax) would look at those of other parents too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import IncompatibleModels
from ..graph.axes import Axis, Cat, axis_units, units_of
from ..graph.model import PINNED, LayerGraph, Op, OpKind, Role
from ..matching.alignment import Alignment
from ..matching.apply import transport
from ..matching.models import Model
from ..transport.beside import Beside
from .joint import makes_chosen

# Norms with statistics for every unit by itself.
_EACH = frozenset({"batch", "instance"})
# Layers whose results add up: those of an output may be the parents' weighted sum.
_LAYERS = frozenset({OpKind.LINEAR, OpKind.CONV})

_FIX = "give inputs (--samples FILE, or --synthetic) and a smaller --width, or use --blend average"


def require_independent(graph: LayerGraph, parents: Sequence[Model]) -> None:
    """Refuse what can't be put side by side without changing what it computes.

    Raises:
        IncompatibleModels: The space or tensor is named, with the reason.
    """
    for where, why in _obstacles(graph, parents):
        raise IncompatibleModels(
            "these models can't be put side by side exactly", where=where, why=why, fix=_FIX
        )


def beside_one_another(graph: LayerGraph, parents: Sequence[Model]) -> list[Alignment]:
    """Where the units of each parent go: behind those of the parents before it.

    Heads and groups go as wholes; what is inside them stays where it is.
    """
    maps: list[dict[str, Beside]] = [{} for _ in parents]
    for space in graph.free():
        if space.per is not None:
            continue
        counts = [model.graph.spaces[space.id].size for model in parents]
        for at, count in enumerate(counts):
            maps[at][space.id] = Beside(count, sum(counts[:at]), sum(counts))
    return [Alignment(parent_maps) for parent_maps in maps]


def whole_union(
    name: str, graph: LayerGraph, parents: Sequence[tuple[Model, Alignment, float]]
) -> Tensor:
    """One tensor of all parents side by side, in the dtype that it is computed in.

    Args:
        name: Of the tensor; not of whole numbers.
        graph: Of the parents.
        parents: Model, where its units go, its weight; weights sum to 1.
    """
    makes = makes_chosen(graph, name)
    total = torch.zeros(())
    for model, alignment, weight in parents:
        moved = transport(model.read(name), name, model.graph, alignment)
        total = total.to(moved) + (moved if makes else weight * moved)
    return total


def _obstacles(graph: LayerGraph, parents: Sequence[Model]) -> Iterator[tuple[str, str]]:
    """Where, and why."""
    for space in graph.free():
        sizes = {model.graph.spaces[space.id].size for model in parents}
        if space.per is not None and len(sizes) > 1:
            yield f"space {space.id}", "heads or groups of different widths"
    for derived in graph.derived:
        yield derived.tensors[0], f"it is a function of {derived.source}, of all units at once"
    for _, _, said in graph.outputs:
        yield f"space {said}", "outputs of free units would be side by side, not their mean"
    for op in graph.ops:
        yield from _of_operation(graph, op)
    for tensor in graph.tensors.values():
        for axis in tensor.axes:
            yield from _of_axis(graph, tensor.name, axis.expr, axis.roles)
    yield from _added_up(graph, parents)


def _of_operation(graph: LayerGraph, op: Op) -> Iterator[tuple[str, str]]:
    """Operations that look at several units at once."""
    free = [unit for unit in units_of(op.reads) if graph.spaces[unit].pinned is None]
    if not free:
        return
    if op.kind is OpKind.NORM and op.detail not in _EACH:
        yield f"space {free[0]}", f"{op.name}: a {op.detail} norm takes statistics over units"
    if op.detail == "softmax":
        yield f"space {free[0]}", f"{op.name}: a softmax compares units with one another"
    # A mean, a largest one, an inner product of two values; layers have tensors, heads are apart.
    written = () if op.writes is None else axis_units(op.writes)
    inside = {space.id for space in graph.free() if space.per is not None} | graph.indices
    gone = [unit for unit in free if unit not in written and unit not in inside]
    if gone and not op.tensors:
        yield f"space {gone[0]}", f"{op.name}: a {op.detail} over units"


def _of_axis(
    graph: LayerGraph, name: str, axis: Axis, roles: frozenset[Role]
) -> Iterator[tuple[str, str]]:
    free = [unit for unit in axis_units(axis) if graph.spaces[unit].pinned is None]
    if free and {Role.CONSUME, Role.PRODUCE} <= roles:
        yield name, f"it makes and reads the units of {free[0]} (tied)"
    parts = axis.parts if isinstance(axis, Cat) else ()
    held = [p for p in parts if all(graph.spaces[u].pinned is not None for u in axis_units(p))]
    if free and held and roles != {Role.CONSUME}:
        yield f"{name}: {axis}", f"{held[0]} positions stay in place among its units"


def _added_up(graph: LayerGraph, parents: Sequence[Model]) -> Iterator[tuple[str, str]]:
    """Tensors without units of their own: at outputs they add up, elsewhere all have one."""
    ends = _ends(graph)
    for name, tensor in graph.tensors.items():
        if makes_chosen(graph, name) or name in ends:
            continue
        made = [
            unit
            for axis in tensor.axes
            if Role.PRODUCE in axis.roles
            for unit in axis_units(axis.expr)
        ]
        if made:
            why = graph.spaces[made[0]].pinned
            yield f"space {made[0]}", f"units that {name} makes stay in place: {why}"
        elif not _equal(name, parents):
            yield name, "it has no units, and the models differ in it"


def _ends(graph: LayerGraph) -> frozenset[str]:
    """Tensors of layers that make the outputs, which nothing reads."""
    read: set[str] = set()
    for tensor in graph.tensors.values():
        for axis in tensor.axes:
            if Role.CONSUME in axis.roles:
                read.update(axis_units(axis.expr))
    ends: set[str] = set()
    for op in graph.ops:
        units = () if op.writes is None else axis_units(op.writes)
        said = units and all(graph.spaces[u].pinned == PINNED["out"] for u in units)
        if op.kind in _LAYERS and said and read.isdisjoint(units):
            ends.update(op.tensors.values())
    return frozenset(ends)


def _equal(name: str, parents: Sequence[Model]) -> bool:
    """Whether the models agree in a tensor; counters of batches say nothing."""
    first, *others = (model.stored(name) for model in parents)
    if not first.is_floating_point() and not first.shape:
        return True
    return all(torch.equal(first, other) for other in others)
