"""A layer graph as a spec: what `inspect --write-spec` leaves for a person to read and change.

One line per module where a line can say it; else every axis of every tensor, with its roles.
Binding the spec to the same shapes gives an equal graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ...errors import IncompatibleModels
from ..axes import Axis, Unit, axis_units, rename_units
from ..derived_tensors import without_vectors
from ..model import PINNED, LayerGraph, OpKind, Role
from ..sizes import fit_axis
from .bind import bind
from .grammar import parse_specs
from .spec_lines import LAYERS, WrittenLine, spec_lines, spell

_SAID = {"input": "in", "indexed": "in", "output": "out"}
_WORDS = ("null", "true", "false", "yes", "off")  # YAML reads these as something else


def write_spec(graph: LayerGraph) -> str:
    """Text of a spec for the checkpoint that `graph` describes.

    `parse_specs` and `bind` on the same shapes and aliases give the same axes, roles, families and
    pinned axes; names of spaces are shorter, and fewer kinds of map may be promised.
    """
    graph = without_vectors(graph)
    named = _renamed(graph)
    lines = spec_lines(named)
    relu = _text(named, lines, "relu")
    acts = [op for op in graph.ops if op.kind is OpKind.ACT]
    if acts and all(op.detail == "relu" for op in acts) and _same_operations(graph, relu):
        return relu
    return _text(named, lines, "other")


def _text(graph: LayerGraph, lines: Sequence[WrittenLine], act: str) -> str:
    out = [f"# The graph of {graph.source or 'a network'}.", f"act: {act}", "layers:"]
    written = _Writer(graph)
    out += [f"  {_key(line.names)}: {written.line(line)}" for line in lines]
    if sizes := _sizes(graph):
        out += ["sizes:", *(f"  {space}: {size}" for space, size in sizes.items())]
    reasons = {s.id: s.pinned for s in graph.spaces.values() if s.pinned and s.id not in PINNED}
    if reasons:
        out += ["pinned:", *(f"  {space}: {_scalar(why)}" for space, why in reasons.items())]
    return "\n".join(out) + "\n"


def _same_operations(graph: LayerGraph, text: str) -> bool:
    """Whether the spec's operations run as those of the graph."""
    kinds = (*LAYERS, OpKind.NORM, OpKind.ADD, OpKind.ACT)
    shapes = {name: tensor.shape for name, tensor in graph.tensors.items()}
    aliases = {name: tensor.aliases for name, tensor in graph.tensors.items()}
    (spec,) = parse_specs(text, where="write_spec", name="written")
    try:
        again = bind(spec, shapes, aliases=aliases, where="write_spec")
    except IncompatibleModels:
        return False
    runs = [
        [(op.kind, tuple(sorted(op.tensors.values()))) for op in g.ops if op.kind in kinds]
        for g in (graph, again)
    ]
    return runs[0] == runs[1] and all(
        again.spaces[unit].exact <= graph_exact
        for name, tensor in graph.tensors.items()
        for axis, other in zip(tensor.axes, again.tensors[name].axes, strict=True)
        for unit, graph_exact in zip(
            axis_units(other.expr),
            (graph.spaces[u].exact for u in axis_units(axis.expr)),
            strict=False,
        )
        if again.spaces[unit].pinned is None
    )


# Names of spaces


def _renamed(graph: LayerGraph) -> LayerGraph:
    """The graph with space names that the format takes; `in` and `out` where they say it all."""
    names: dict[str, str] = {}
    whole = _whole_axes(graph)
    plain = {id for id in graph.spaces if re.fullmatch(r"[A-Za-z_][\w.]*", id)} - {*Role}
    numbers = count()
    for id, space in graph.spaces.items():
        if space.pinned in _SAID and id in whole:
            names[id] = _SAID[space.pinned]
        elif id in plain and id not in PINNED:
            names[id] = id
        else:
            tries = (f"{'p' if space.pinned else 's'}{n}" for n in numbers)
            names[id] = next(name for name in tries if name not in plain)
    tensors = {
        name: replace(
            tensor,
            axes=tuple(replace(a, expr=rename_units(a.expr, names)) for a in tensor.axes),
        )
        for name, tensor in graph.tensors.items()
    }
    spaces = {
        names[id]: replace(space, id=names[id], per=names.get(space.per or ""))
        for id, space in graph.spaces.items()
    }
    ops = tuple(
        replace(
            op,
            reads=tuple(rename_units(axis, names) for axis in op.reads),
            writes=None if op.writes is None else rename_units(op.writes, names),
        )
        for op in graph.ops
    )
    return replace(graph, tensors=tensors, spaces=spaces, ops=ops, outputs=())


def _whole_axes(graph: LayerGraph) -> set[str]:
    """Spaces that are nowhere a part of an axis."""
    axes = [axis.expr for tensor in graph.tensors.values() for axis in tensor.axes]
    parts = {u for axis in axes if not isinstance(axis, Unit) for u in axis_units(axis)}
    return graph.spaces.keys() - parts


# Text


@dataclass
class _Writer:
    """Writes lines; a family says what indexes it where it comes first."""

    graph: LayerGraph
    declared: set[str] = field(default_factory=set)

    def line(self, line: WrittenLine) -> str:
        texts = [spell(axis, self.unit) for axis in line.axes]
        if not line.roles:
            return f" {line.arrow} ".join(texts)
        entries = [
            text if roles in ({Role.VECTOR}, {Role.FIXED}) else f"{' '.join(sorted(roles))} {text}"
            for text, roles in zip(texts, line.roles, strict=True)
        ]
        return f"[{', '.join(entries)}]"

    def unit(self, space: str) -> str:
        per = self.graph.spaces[space].per if space in self.graph.spaces else None
        if per is None or space in self.declared:
            return space
        self.declared.add(space)
        return f"{space}@{per}"


def _key(names: Sequence[str]) -> str:
    text = ", ".join(names)
    plain = all(re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+|[A-Za-z_]\w{2,}", name) for name in names)
    return text if plain and text.lower() not in _WORDS else f'"{text}"'


def _scalar(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _sizes(graph: LayerGraph) -> dict[str, int]:
    """Sizes that the shapes don't determine."""
    given: dict[str, int] = {}
    known: dict[str, int] = {}
    pending = list(_free_axes(graph))
    while pending:
        left = []
        for axis, length in pending:
            found = fit_axis(axis, length, known)
            if found is None:
                left.append((axis, length))
            known |= found or {}
        if len(left) == len(pending):
            space = next(u for u in axis_units(left[0][0]) if u not in known)
            given[space] = known[space] = graph.spaces[space].size
        pending = left
    return given


def _free_axes(graph: LayerGraph) -> Iterator[tuple[Axis, int]]:
    for tensor in graph.tensors.values():
        for axis, length in zip(tensor.axes, tensor.shape, strict=True):
            if not PINNED.keys() & set(axis_units(axis.expr)):
                yield axis.expr, length
