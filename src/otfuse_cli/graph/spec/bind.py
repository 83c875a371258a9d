"""A spec meets a checkpoint: names matched, sizes solved from shapes, a layer graph made.

Every non-scalar tensor must be covered and every size must fit; else an error that names tensor
and axis. A space that nothing reads or nothing makes is pinned and named: it can't be proven
interchangeable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ...errors import few
from ..axes import Fixed, axis_units, units_of
from ..model import PINNED, GraphTensor, LayerGraph, Op, OpKind, Role, Shapes, Space, TensorAxis
from ..sizes import is_pinned
from .chain import chain_lines
from .config_sizes import Config, architectures, check_sizes, given_sizes, hold, how_to_give
from .grammar import Spec
from .line_match import Cover, agree, cover_tensors, identify, with_ties
from .operations import Node, operations, ordered_nodes
from .patterns import Present
from .solve_sizes import name_pinned, solve_sizes
from .stored_shapes import in_order

UNREAD = "no layer reads it, it may be an output"
UNMADE = "no layer makes it, it may be an input"


def bind(
    spec: Spec,
    shapes: Shapes,
    *,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    config: Config | None = None,
    where: str,
) -> LayerGraph:
    """Fit `spec` to the tensors of a checkpoint.

    Args:
        spec: What to fit.
        shapes: Every tensor's shape, in the order of the file.
        aliases: Other names of tied tensors.
        config: What the model's config.json says, for what names and shapes don't tell.
        where: What messages call the spec or family.

    Raises:
        IncompatibleModels: A tensor that no line covers, a size that doesn't fit (tensor and axis
            are named), a size that the shapes don't determine.
    """
    aliases = aliases or {}
    lines = (*chain_lines(spec.chain, shapes, where), *spec.lines)
    names = in_order(shapes)
    ties = with_ties(spec.tied, shapes, aliases)
    covers, families = cover_tensors(lines, names, shapes, ties, where)
    names_present = Present([*names, *architectures(config)])
    identify([s for s in spec.same if not s.if_sizes_agree], covers, names_present)
    present = [*names, *architectures(config), *chain.from_iterable(aliases.values())]
    known_sizes, unknown = given_sizes(spec, _spaces(covers), config)
    nodes = ordered_nodes(covers)
    kept_whole = hold(covers, unknown)
    sizes = solve_sizes(covers, shapes, known_sizes, where)
    # Two rounds: which spaces are one by their sizes shows when sizes are solved, and changes them.
    if by_size := [s for s in spec.same if s.if_sizes_agree]:
        identify(by_size, covers, names_present, sizes=sizes)
        sizes = solve_sizes(covers, shapes, known_sizes, where)
    check_sizes(spec, sizes, config, where)
    agree(covers)
    name_pinned(covers, shapes, sizes)
    warnings: tuple[str, ...] = (how_to_give(spec, kept_whole, unknown),) if kept_whole else ()
    if loose := [name for name in names if shapes[name] and name not in covers]:
        warnings += (f"{few(loose)}: integers that no line of {where} is for stay as they are",)
    reasons = {**_pinned(spec, covers, Present(present)), **kept_whole}
    graph = _assemble(spec, shapes, covers, nodes, sizes, families, aliases, reasons, where)
    tensors = dict(graph.tensors)
    for name in ties.keys() & tensors.keys():
        left_out = tuple(n for n in ties[name] if n not in tensors[name].aliases)
        tensors[name] = replace(tensors[name], stands_for=left_out)
    assumes = spec.assumes or f"what the lines of {where.removeprefix('spec ')} say"
    return replace(graph, tensors=tensors, warnings=(*warnings, *graph.warnings), assumes=assumes)


def first_unproven(graph: LayerGraph) -> str | None:
    """The first space that a spec doesn't show to be made and read, in words."""
    for space in graph.spaces.values():
        if space.pinned in (UNREAD, UNMADE):
            return f"space {space.id} stays in place: {space.pinned}"
    return None


def _spaces(covers: Mapping[str, Cover]) -> dict[str, None]:
    """All spaces that the lines name, in order of appearance."""
    spaces: dict[str, None] = {}
    for cover in covers.values():
        spaces.update(dict.fromkeys(units_of(cover.axes)))
    return spaces


def _pinned(spec: Spec, covers: Mapping[str, Cover], present: Present) -> dict[str, str]:
    """Spaces that the spec pins, and why."""
    rules = [p for p in spec.pinned if not present.any(p.unless)]
    reasons: dict[str, str] = {}
    for space in _spaces(covers):
        for rule in rules:
            if rule.space.match(space):
                reasons[space] = rule.reason
                break  # the first rule that matches decides, as with lines
    return reasons


def _assemble(
    spec: Spec,
    shapes: Shapes,
    covers: Mapping[str, Cover],
    nodes: Sequence[Node],
    sizes: Mapping[str, int],
    families: Mapping[str, str],
    aliases: Mapping[str, tuple[str, ...]],
    reasons: Mapping[str, str],
    where: str,
) -> LayerGraph:
    ops = tuple(operations(spec, nodes))
    tensors: dict[str, GraphTensor] = {}
    for name, shape in shapes.items():
        axes = _axes(covers.get(name), shape)
        tensors[name] = GraphTensor(name, shape, axes, aliases.get(name, ()))
    order = _first_places(nodes)
    warnings: list[str] = []
    unproven = _unproven(covers, families)
    rigid = _rigid(ops) if spec.act == "relu" else set(sizes)
    spaces: dict[str, Space] = {}
    for id in sorted(_spaces(covers), key=lambda u: order.get(u, len(nodes))):
        pinned = PINNED[id.partition(":")[0]] if is_pinned(id) else reasons.get(id)
        if pinned is None:
            pinned = unproven.get(id)
            if pinned is not None:
                warnings.append(f"space {id} stays in place: {pinned}")
        exact = frozenset({"perm"} if id in rigid else {"perm", "scale"})
        spaces[id] = Space(
            id, sizes[id], pinned, families.get(id), exact, order.get(id, len(nodes))
        )
    return LayerGraph(tensors, spaces, ops, source=where, warnings=tuple(warnings))


def _axes(cover: Cover | None, shape: tuple[int, ...]) -> tuple[TensorAxis, ...]:
    """Axes of a tensor, as its line says; those that no line is for stay as they are."""
    if cover is None:
        return tuple(TensorAxis(Fixed(size), frozenset({Role.FIXED})) for size in shape)
    return tuple(map(TensorAxis, cover.axes, cover.roles))


def _first_places(nodes: Sequence[Node]) -> dict[str, int]:
    """The first node that has each space in another role than reading it."""
    order: dict[str, int] = {}
    for position, node in enumerate(nodes):
        for cover in node.covers:
            for axis, roles in zip(cover.axes, cover.roles, strict=True):
                if roles != {Role.CONSUME}:
                    for unit in axis_units(axis):
                        order.setdefault(unit, position)
    return order


def _rigid(ops: Sequence[Op]) -> set[str]:
    """Spaces that meet something else than layers, sums, ReLU and BatchNorm."""
    rigid: set[str] = set()
    for op in ops:
        # A positive factor of a unit passes a ReLU, and a BatchNorm takes it up; other norms don't.
        if (op.kind is OpKind.NORM and op.detail != "batch") or op.kind is OpKind.OTHER:
            rigid.update(units_of(axis for axis in (*op.reads, op.writes) if axis is not None))
    return rigid


def _unproven(covers: Mapping[str, Cover], families: Mapping[str, str]) -> dict[str, str]:
    """Spaces that can't be free, and why: nothing makes them, or nothing reads them.

    The inside of heads, `q@h`, may have no reader: queries meet keys, not a layer.
    """
    read: set[str] = set()
    made: set[str] = set()
    for cover in covers.values():
        read |= cover.units(Role.CONSUME)
        # A list doesn't say what makes its units: whoever writes it answers for that.
        made |= cover.units(None if cover.line.axes else Role.PRODUCE)
    unproven: dict[str, str] = {}
    for space in _spaces(covers):
        if space not in read and space not in families:
            unproven[space] = UNREAD
        elif space not in made:
            unproven[space] = UNMADE
    return unproven
