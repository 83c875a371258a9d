"""A layer graph of part of a network: some tensors left out, some axes cut to their first rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ..axes import Unit, axis_units, rename_units
from ..model import GraphTensor, LayerGraph, Op, OpKind, Role, Space

_HALF = "its tensors are not in every model"


def keep_tensors(graph: LayerGraph, names: set[str]) -> LayerGraph:
    """The same graph with the tensors in `names` only.

    A space that has lost all tensors that make its units, or all that read them, is pinned: what
    is left does not tell which units are alike, or whether they may be exchanged.
    """
    left = replace(graph, tensors={n: t for n, t in graph.tensors.items() if n in names})
    spaces = dict(graph.spaces)
    for id, space in graph.spaces.items():
        if space.pinned is None and not _whole(graph, left, id):
            spaces[id] = replace(space, pinned=_HALF)
    ops = tuple(_without(op, names) for op in graph.ops)
    derived = tuple(d for d in graph.derived if {d.source, *d.tensors} <= names)
    return replace(left, spaces=spaces, ops=ops, derived=derived)


def remaining(
    graph: LayerGraph, names: Collection[str], rename: Callable[[str], str] = str
) -> LayerGraph:
    """The graph of the tensors in `names` in a network of its own, under other names; no ops.

    Spaces that only the others carry are gone.
    """
    kept = {name: graph.tensors[name] for name in graph.tensors if name in names}
    units = {unit for tensor in kept.values() for unit in tensor.units}
    ids: dict[str, str] = {}
    for id in graph.spaces:
        first, colon, dim = id.rpartition(":")
        # Traced spaces are called after their first tensor, which may be gone.
        ids[id] = f"{rename(first)}:{dim}" if colon and first in names else id
    tensors = {}
    for name, tensor in kept.items():
        axes = tuple(replace(a, expr=rename_units(a.expr, ids)) for a in tensor.axes)
        new = rename(name)
        tensors[new] = replace(tensor, name=new, axes=axes, aliases=(), stands_for=())
    spaces: dict[str, Space] = {}
    for id, space in graph.spaces.items():
        if id in units:
            per = None if space.per is None else ids[space.per]
            spaces[ids[id]] = replace(space, id=ids[id], per=per)
    return replace(graph, tensors=tensors, spaces=spaces, ops=(), derived=())


def cut_rows(graph: LayerGraph, rows: Mapping[str, int]) -> LayerGraph:
    """The same graph with only the first `rows[name]` positions on axis 0 of some tensors.

    These axes are single pinned spaces (see `cuttable`); each gets one of its new size.
    """
    tensors, spaces = dict(graph.tensors), dict(graph.spaces)
    for name, size in rows.items():
        tensor = tensors[name]
        (space,) = axis_units(tensor.axes[0].expr)
        if spaces[space].size != size:
            # Named apart: other tensors may keep all of it.
            id = f"{space.partition(':')[0]}:{size}"
            spaces[id] = replace(spaces[space], id=id, size=size)
            axis = replace(tensor.axes[0], expr=Unit(id))
            shape = (size, *tensor.shape[1:])
            tensors[name] = replace(tensor, shape=shape, axes=(axis, *tensor.axes[1:]))
    return replace(graph, tensors=tensors, spaces=spaces)


def cuttable(graph: LayerGraph, tensor: GraphTensor) -> bool:
    """Whether axis 0 is one pinned space: the rows of an embedding, the classes of a head."""
    if not tensor.axes or not isinstance(tensor.axes[0].expr, Unit):
        return False
    (space,) = axis_units(tensor.axes[0].expr)
    return graph.spaces[space].pinned is not None


def _whole(graph: LayerGraph, left: LayerGraph, id: str) -> bool:
    """Whether some tensor still makes a space, and some still reads it, where any did before."""
    for role in (Role.PRODUCE, Role.CONSUME):
        if _in_role(graph, id, role) and not _in_role(left, id, role):
            return False
    return True


def _in_role(graph: LayerGraph, id: str, role: Role) -> tuple[str, ...]:
    return graph.producers(id) if role is Role.PRODUCE else graph.consumers(id)


def _without(op: Op, names: set[str]) -> Op:
    """The operation, of a kind that claims nothing where its weight is gone."""
    tensors = {part: name for part, name in op.tensors.items() if name in names}
    if len(tensors) == len(op.tensors):
        return op
    bare = "weight" in op.tensors and "weight" not in tensors
    return replace(op, tensors=tensors, kind=OpKind.OTHER if bare else op.kind)
