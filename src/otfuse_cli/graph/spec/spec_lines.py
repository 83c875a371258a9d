"""Which lines of a spec say what a layer graph holds: a line per module, or a list per tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...errors import IncompatibleModels
from ..axes import Axis, Cat, Fixed, Prod, Unit, axis_units
from ..model import PINNED, GraphTensor, LayerGraph, Op, OpKind, Role
from .grammar import parse_specs
from .line_match import cover_tensors

LAYERS = (OpKind.LINEAR, OpKind.CONV)


@dataclass(frozen=True)
class WrittenLine:
    """A line to be written: names, and expressions with what stands between them."""

    names: tuple[str, ...]
    axes: tuple[Axis, ...]
    arrow: str = ""
    roles: tuple[frozenset[Role], ...] = ()


def spec_lines(graph: LayerGraph) -> list[WrittenLine]:
    """Lines that give `graph`, whose space names must be those of the format."""
    groups: dict[str, list[GraphTensor]] = {}
    for tensor in graph.tensors.values():
        if tensor.axes:
            module = tensor.name.rpartition(".")[0] or tensor.name
            groups.setdefault(module, []).append(tensor)
    known = {name: op.kind for op in graph.ops for name in op.tensors.values()}
    found: dict[str, WrittenLine] = {}
    for module, tensors in groups.items():
        line = _line_for(module, tensors, known)
        if line is not None:
            found[module] = line
            continue
        for tensor in tensors:
            found[tensor.name] = _line_for(tensor.name, [tensor], known) or _list_for(tensor)
    for module in _unsaid(graph, found):
        del found[module]
        for tensor in groups.get(module) or [graph.tensors[module]]:
            found[tensor.name] = _list_for(tensor)
    place = {name: at for at, name in enumerate(graph.tensors)}
    place |= {module: place[tensors[0].name] for module, tensors in groups.items()}
    found = dict(sorted(found.items(), key=lambda item: place[item[0]]))
    return _together(found, {**_norms(graph, found), **_partners(graph, found)})


def _line_for(
    name: str, tensors: Sequence[GraphTensor], known: Mapping[str, OpKind]
) -> WrittenLine | None:
    """A line that says of these tensors what the graph says, if there is one.

    Such a line also says what they do: that must be `known`, or a look-up in a table.
    """
    names = (name, *(alias for tensor in tensors for alias in tensor.aliases))
    matrix = next((t for t in tensors if len(t.axes) > 1), None)
    if matrix is None:
        lines = [WrittenLine(names, (tensors[0].axes[0].expr,))]
    else:
        pair = (matrix.axes[0].expr, matrix.axes[1].expr)
        lines = [WrittenLine(names, pair, "<-"), WrittenLine(names, pair, "->")]
    kinds = LAYERS if matrix is not None else (OpKind.NORM,)
    if not any(known.get(tensor.name) in kinds for tensor in tensors):
        lines = [line for line in lines if line.arrow == "->" and len(line.axes) == 2]
    return next((line for line in lines if _says(line, tensors)), None)


def _says(line: WrittenLine, tensors: Sequence[GraphTensor]) -> bool:
    """Whether the format reads `line` as the graph has it; roles count where units are free."""
    text = f" {line.arrow} ".join(map(spell, line.axes))
    (spec,) = parse_specs(f'layers: {{"{line.names[0]}": "{text}"}}', where="", name="")
    names = [tensor.name for tensor in tensors]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    try:
        covers, _ = cover_tensors(spec.lines, names, shapes, {}, "")
    except IncompatibleModels:
        return False
    return all(
        axis == mine.expr and (roles == mine.roles or not set(axis_units(axis)) - PINNED.keys())
        for tensor in tensors
        for axis, roles, mine in zip(
            covers[tensor.name].axes, covers[tensor.name].roles, tensor.axes, strict=True
        )
    )


def _list_for(tensor: GraphTensor) -> WrittenLine:
    return WrittenLine(
        (tensor.name, *tensor.aliases),
        tuple(axis.expr for axis in tensor.axes),
        roles=tuple(axis.roles for axis in tensor.axes),
    )


def _together(lines: dict[str, WrittenLine], host: Mapping[str, str]) -> list[WrittenLine]:
    """Put modules on the lines of those that they belong to."""
    for module, at in host.items():
        while at in host:
            at = host[at]
        lines[at] = replace(lines[at], names=(*lines[at].names, *lines.pop(module).names))
    return list(lines.values())


def _norms(graph: LayerGraph, lines: Mapping[str, WrittenLine]) -> dict[str, str]:
    """BatchNorms that normalise what a layer makes: norm to layer."""
    host: dict[str, str] = {}
    for before, after in pairwise(graph.ops):
        layer, norm = lines.get(_module(before)), lines.get(_module(after))
        if layer is None or norm is None or before.kind not in LAYERS or not layer.arrow:
            continue
        bare = after.kind is OpKind.NORM and after.detail == "batch" and not norm.roles
        if bare and before.writes == after.reads[0] == norm.axes[0]:
            host[_module(after)] = _module(before)
    return host


def _partners(graph: LayerGraph, lines: Mapping[str, WrittenLine]) -> dict[str, str]:
    """Layers with the line of an earlier one, not added to it: a value to its gate."""
    first: dict[tuple[tuple[Axis, ...], str], str] = {}
    host: dict[str, str] = {}
    for module, line in _rewriting(graph, lines):
        at = first.setdefault((line.axes, line.arrow), module)
        if at != module:
            host[module] = at
    return host


def _unsaid(graph: LayerGraph, lines: Mapping[str, WrittenLine]) -> list[str]:
    """Layers that a line would add to another that makes the same units; the graph doesn't.

    What they do (a gate, say) no line can tell, so they become lists.
    """
    first: dict[Axis, WrittenLine] = {}
    return [
        module
        for module, line in _rewriting(graph, lines)
        if (made := first.setdefault(_made(line), line)).axes != line.axes
        or made.arrow != line.arrow
    ]


def _rewriting(
    graph: LayerGraph, lines: Mapping[str, WrittenLine]
) -> list[tuple[str, WrittenLine]]:
    """Layers whose free units are made of others, and that no sum adds to anything."""
    added = {op.writes for op in graph.ops if op.kind is OpKind.ADD}
    return [
        (module, line)
        for module, line in lines.items()
        if line.arrow
        and _made(line) not in added
        and any(graph.spaces[u].pinned is None for u in axis_units(_made(line)))
        and any(axis_units(_read(line)))
    ]


def _made(line: WrittenLine) -> Axis:
    return line.axes[0] if line.arrow == "<-" else line.axes[1]


def _read(line: WrittenLine) -> Axis:
    return line.axes[1] if line.arrow == "<-" else line.axes[0]


def _module(op: Op) -> str:
    return next((name.rpartition(".")[0] for name in op.tensors.values()), "")


def spell(axis: Axis, unit: Callable[[str], str] = str) -> str:
    """`axis` as the format writes it; `unit` writes a space."""
    match axis:
        case Unit(space):
            return unit(space)
        case Prod(factors):
            return " * ".join(
                f"({spell(f, unit)})" if isinstance(f, Cat) else spell(f, unit) for f in factors
            )
        case Cat(parts):
            return " + ".join(spell(p, unit) for p in parts)
        case Fixed(size):
            return str(size)
