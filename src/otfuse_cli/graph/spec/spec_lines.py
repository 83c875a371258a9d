"""Which lines of a spec say what a layer graph holds: a line per module, or a list per tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

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
    kinds: dict[str, OpKind] = {}
    for op in graph.ops:
        kinds.update(dict.fromkeys(op.tensors.values(), op.kind))
    lines: dict[str, WrittenLine] = {}
    for module, tensors in groups.items():
        line = _line_for(module, tensors, kinds)
        if line is not None:
            lines[module] = line
            continue
        for tensor in tensors:
            lines[tensor.name] = _line_for(tensor.name, [tensor], kinds) or _list_for(tensor)
    for module in _unsaid(graph, lines):
        del lines[module]
        for tensor in groups.get(module) or [graph.tensors[module]]:
            lines[tensor.name] = _list_for(tensor)
    place = {name: at for at, name in enumerate(graph.tensors)}
    place |= {module: place[tensors[0].name] for module, tensors in groups.items()}
    lines = dict(sorted(lines.items(), key=lambda item: place[item[0]]))
    return _together(lines, {**_norms(graph, lines), **_partners(graph, lines)})


def _line_for(
    name: str, tensors: Sequence[GraphTensor], kinds_of: Mapping[str, OpKind]
) -> WrittenLine | None:
    """A line that says of these tensors what the graph says, if there is one.

    Such a line also says what they do: that must be `kinds_of`, or a look-up in a table.
    """
    names = (name, *chain.from_iterable(tensor.aliases for tensor in tensors))
    matrix = next((t for t in tensors if len(t.axes) > 1), None)
    # What a line could say of them; which of these it does say is tried out.
    if matrix is None:
        lines = [WrittenLine(names, (tensors[0].axes[0].expr,))]
    else:
        pair = (matrix.axes[0].expr, matrix.axes[1].expr)
        lines = [WrittenLine(names, pair, "<-"), WrittenLine(names, pair, "->")]
    kinds = LAYERS if matrix is not None else (OpKind.NORM,)
    if not any(kinds_of.get(tensor.name) in kinds for tensor in tensors):
        lines = [line for line in lines if line.arrow == "->" and len(line.axes) == 2]
    return next((line for line in lines if _says(line, tensors)), None)


def _says(line: WrittenLine, tensors: Sequence[GraphTensor]) -> bool:
    """Whether the format reads `line` as the graph has it; roles count where units are free."""
    # By the reader of the format itself: no second opinion on what a line means can drift from it.
    text = f" {line.arrow} ".join(map(spell, line.axes))
    (spec,) = parse_specs(f'layers: {{"{line.names[0]}": "{text}"}}', where="", name="")
    names = [tensor.name for tensor in tensors]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    try:
        covers, _ = cover_tensors(spec.lines, names, shapes, {}, "")
    except IncompatibleModels:
        return False
    for tensor in tensors:
        cover = covers[tensor.name]
        for axis, roles, wanted in zip(cover.axes, cover.roles, tensor.axes, strict=True):
            if axis != wanted.expr:
                return False
            if roles != wanted.roles and not PINNED.keys() >= set(axis_units(axis)):
                return False
    return True


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
    unsaid: list[str] = []
    for module, line in _rewriting(graph, lines):
        maker = first.setdefault(_made(line), line)
        if (maker.axes, maker.arrow) != (line.axes, line.arrow):
            unsaid.append(module)
    return unsaid


def _rewriting(
    graph: LayerGraph, lines: Mapping[str, WrittenLine]
) -> list[tuple[str, WrittenLine]]:
    """Layers whose free units are made of others, and that no sum adds to anything."""
    added = {op.writes for op in graph.ops if op.kind is OpKind.ADD}
    rewriting: list[tuple[str, WrittenLine]] = []
    for module, line in lines.items():
        if not line.arrow or _made(line) in added or not any(axis_units(_read(line))):
            continue
        if any(graph.spaces[unit].pinned is None for unit in axis_units(_made(line))):
            rewriting.append((module, line))
    return rewriting


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
            spelled: list[str] = []
            for factor in factors:
                text = spell(factor, unit)
                spelled.append(f"({text})" if isinstance(factor, Cat) else text)
            return " * ".join(spelled)
        case Cat(parts):
            return " + ".join(spell(p, unit) for p in parts)
        case Fixed(size):
            return str(size)
