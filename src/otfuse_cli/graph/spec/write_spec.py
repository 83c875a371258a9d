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
from ..model import PINNED, GraphTensor, LayerGraph, Op, OpKind, Role, Space
from ..sizes import fit_axis
from .bind import bind
from .grammar import parse_specs
from .spec_lines import LAYERS, WrittenLine, spec_lines, spell

# Reasons that the format's own pinned spaces say.
_SAID = {"input": "in", "indexed": "in", "output": "out"}
_WORDS = ("null", "true", "false", "yes", "off")  # YAML reads these as something else


def write_spec(graph: LayerGraph) -> str:
    """Text of a spec for the checkpoint that `graph` describes.

    `parse_specs` and `bind` on the same shapes and aliases give the same axes, roles, families and
    pinned axes; names of spaces are shorter, and fewer kinds of map may be promised.
    """
    graph = without_vectors(graph)
    # With `act: relu` binding adds activations and promises scale maps: only where that is so.
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
    shapes = dict(graph.shapes)
    aliases = {name: tensor.aliases for name, tensor in graph.tensors.items()}
    (spec,) = parse_specs(text, where="write_spec", name="written")
    try:
        again = bind(spec, shapes, aliases=aliases, where="write_spec")
    except IncompatibleModels:
        return False
    return _runs(graph) == _runs(again) and _promises_no_more(again, graph)


def _runs(graph: LayerGraph) -> list[tuple[OpKind, tuple[str, ...]]]:
    """Operations of the kinds that a spec can tell, with their tensors, in order."""
    kinds = (*LAYERS, OpKind.NORM, OpKind.ADD, OpKind.ACT)
    runs: list[tuple[OpKind, tuple[str, ...]]] = []
    for op in graph.ops:
        if op.kind in kinds:
            runs.append((op.kind, tuple(sorted(op.tensors.values()))))
    return runs


def _promises_no_more(again: LayerGraph, graph: LayerGraph) -> bool:
    """Whether every kind of map that `again` allows a free space keeps the function of `graph`."""
    for name, tensor in graph.tensors.items():
        for axis, other in zip(tensor.axes, again.tensors[name].axes, strict=True):
            units = zip(axis_units(axis.expr), axis_units(other.expr), strict=False)
            for unit, other_unit in units:
                space = again.spaces[other_unit]
                if space.pinned is None and not space.exact <= graph.spaces[unit].exact:
                    return False
    return True


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
    tensors: dict[str, GraphTensor] = {}
    for name, tensor in graph.tensors.items():
        axes = tuple(replace(a, expr=rename_units(a.expr, names)) for a in tensor.axes)
        tensors[name] = replace(tensor, axes=axes)
    spaces: dict[str, Space] = {}
    for id, space in graph.spaces.items():
        spaces[names[id]] = replace(space, id=names[id], per=names.get(space.per or ""))
    ops: list[Op] = []
    for op in graph.ops:
        reads = tuple(rename_units(axis, names) for axis in op.reads)
        writes = None if op.writes is None else rename_units(op.writes, names)
        ops.append(replace(op, reads=reads, writes=writes))
    return replace(graph, tensors=tensors, spaces=spaces, ops=tuple(ops), outputs=())


def _whole_axes(graph: LayerGraph) -> set[str]:
    """Spaces that are nowhere a part of an axis."""
    parts: set[str] = set()
    for tensor in graph.tensors.values():
        for axis in tensor.axes:
            if not isinstance(axis.expr, Unit):
                parts.update(axis_units(axis.expr))
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
        entries: list[str] = []
        for text, roles in zip(texts, line.roles, strict=True):
            # What the format takes for granted: units that are added, numbers that stay.
            plain = roles in ({Role.VECTOR}, {Role.FIXED})
            entries.append(text if plain else f"{' '.join(sorted(roles))} {text}")
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
    needed: dict[str, int] = {}
    sizes: dict[str, int] = {}
    pending = list(_free_axes(graph))
    while pending:
        left = []
        for axis, length in pending:
            solved = fit_axis(axis, length, sizes)
            if solved is None:
                left.append((axis, length))
            sizes |= solved or {}
        if len(left) == len(pending):  # as binding will find it: a size has to be given
            space = next(u for u in axis_units(left[0][0]) if u not in sizes)
            needed[space] = sizes[space] = graph.spaces[space].size
        pending = left
    return needed


def _free_axes(graph: LayerGraph) -> Iterator[tuple[Axis, int]]:
    for tensor in graph.tensors.values():
        for axis, length in zip(tensor.axes, tensor.shape, strict=True):
            if not PINNED.keys() & set(axis_units(axis.expr)):
                yield axis.expr, length
