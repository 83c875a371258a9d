"""Are two layer graphs of one network the same, whatever their spaces are called?"""

from __future__ import annotations

from otfuse_cli.graph.axes import Axis, Cat, Fixed, Prod, Unit, axis_units
from otfuse_cli.graph.model import LayerGraph
from otfuse_cli.graph.trace.emit import _added, _multiplied


def graph_difference(spec: LayerGraph, traced: LayerGraph) -> str | None:
    """Where two graphs differ, in words; None when they are equal, axis for axis.

    Names of spaces don't matter, nor why something is pinned. Roles are compared where units are
    free, families by what indexes them. Single units can't move: they count as fixed. Of the kinds
    of map that keep the function, `spec` may know fewer.
    """
    if list(sorted(spec.tensors)) != sorted(traced.tensors):
        return f"tensors: {sorted(set(spec.tensors) ^ set(traced.tensors))}"
    theirs_of: dict[str, str] = {}
    for name, mine in spec.tensors.items():
        theirs = traced.tensors[name]
        if mine.shape != theirs.shape:
            return f"{name}: {mine.shape} and {theirs.shape}"
        for dim, (a, b) in enumerate(zip(mine.axes, theirs.axes, strict=True)):
            one, other = _bare(a.expr, spec), _bare(b.expr, traced)
            where = f"{name} axis {dim}: `{one}` and `{other}`"
            units, their_units = list(axis_units(one)), list(axis_units(other))
            if _shape(one, spec) != _shape(other, traced):
                return where
            for x, y in zip(units, their_units, strict=True):
                if theirs_of.setdefault(x, y) != y:
                    return f"{where}: {x} is {theirs_of[x]} elsewhere"
            if units and a.roles != b.roles:
                return f"{where}: {sorted(a.roles)} and {sorted(b.roles)}"
    if len(set(theirs_of.values())) != len(theirs_of):
        twice = [y for y in theirs_of.values() if list(theirs_of.values()).count(y) > 1]
        return f"{twice[0]} is several spaces: {[x for x, y in theirs_of.items() if y == twice[0]]}"
    for x, y in theirs_of.items():
        pers = [_index(graph, id) for graph, id in ((spec, x), (traced, y))]
        if (pers[0] and theirs_of[pers[0]]) != pers[1]:
            return f"{x} is per {pers[0]}, {y} per {pers[1]}"
        if not spec.spaces[x].exact <= traced.spaces[y].exact:
            return f"{x} takes {sorted(spec.spaces[x].exact)}, {y} {sorted(traced.spaces[y].exact)}"
    return None


def _bare(axis: Axis, graph: LayerGraph) -> Axis:
    """The canonical expression with fixed positions in place of what can't move."""
    match axis:
        case Unit(space):
            found = graph.spaces[space]
            return Fixed(found.size) if found.pinned or found.size == 1 else axis
        case Prod(factors):
            return _multiplied([_bare(f, graph) for f in factors])
        case Cat(parts):
            return _added([_bare(p, graph) for p in parts])
        case Fixed():
            return axis


def _shape(axis: Axis, graph: LayerGraph) -> str:
    """The expression with sizes for names."""
    match axis:
        case Unit(space):
            return f"<{graph.spaces[space].size}>"
        case Prod(factors):
            return f"({' * '.join(_shape(f, graph) for f in factors)})"
        case Cat(parts):
            return f"({' + '.join(_shape(p, graph) for p in parts)})"
        case Fixed(size):
            return str(size)


def _index(graph: LayerGraph, id: str) -> str | None:
    per = graph.spaces[id].per
    free = per is not None and graph.spaces[per].size > 1 and graph.spaces[per].pinned is None
    return per if free else None
