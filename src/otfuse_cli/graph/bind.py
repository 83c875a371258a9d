"""A spec meets a checkpoint: names matched, sizes solved from shapes, a layer graph made.

Every non-scalar tensor must be covered and every size must fit; else an error that names tensor
and axis. A space that nothing reads or nothing makes is pinned and named: it can't be proven
interchangeable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .axes import Axis, axis_units
from .chain import chain_lines
from .covers import Cover, Shapes, cover_tensors, identify
from .model import GraphTensor, LayerGraph, Op, OpKind, Role, Space, TensorAxis
from .order import base_order, execution_order
from .sizes import is_pinned, name_pinned, solve_sizes
from .spec import PINNED, Line, Spec


@dataclass
class _Node:
    """Modules that belong together (a layer and its norm), in the graph's execution order."""

    line: Line
    covers: list[Cover] = field(default_factory=list)


def bind(
    spec: Spec, shapes: Shapes, *, aliases: Mapping[str, tuple[str, ...]] | None = None, where: str
) -> LayerGraph:
    """Fit `spec` to the tensors of a checkpoint.

    Args:
        spec: What to fit.
        shapes: Every tensor's shape, in the order of the file.
        aliases: Other names of tied tensors.
        where: What messages call the spec or family.

    Raises:
        IncompatibleModels: A tensor that no line covers, a size that doesn't fit (tensor and axis
            are named), a size that the shapes don't determine.
    """
    aliases = aliases or {}
    lines = (*chain_lines(spec.chain, shapes, where), *spec.lines)
    names = base_order(list(shapes))
    covers, families = cover_tensors(lines, names, shapes, aliases, where)
    identify(spec.same, covers, names)
    sizes = solve_sizes(covers, shapes, dict(spec.sizes or {}), where)
    name_pinned(covers, shapes, sizes)
    return _assemble(spec, shapes, covers, sizes, families, aliases, where)


def _ordered_nodes(covers: Mapping[str, Cover]) -> list[_Node]:
    nodes: dict[tuple[object, ...], _Node] = {}
    for cover in covers.values():
        # A bare space or a list stands for itself: nothing says that two of them run together.
        key = cover.key if cover.line.inp is not None else (*cover.key, cover.module)
        nodes.setdefault(key, _Node(cover.line)).covers.append(cover)
    by_name = {node.covers[0].name: node for node in nodes.values()}

    def units(node: _Node, role: Role) -> set[str]:
        return {
            u
            for c in node.covers
            for axis, r in zip(c.axes, c.roles, strict=True)
            if r is role or (role is Role.CONSUME and node.line.inp is None)
            for u in axis_units(axis)
            if not is_pinned(u)
        }

    reads = {n: units(node, Role.CONSUME) for n, node in by_name.items()}
    writes = {n: units(node, Role.PRODUCE) for n, node in by_name.items()}
    return [by_name[n] for n in execution_order(list(by_name), reads, writes)]


def _ops(spec: Spec, nodes: Sequence[_Node]) -> Iterator[Op]:
    """Operations in execution order; an add where a second line writes to a space."""
    written: set[Axis] = set()
    for position, node in enumerate(nodes):
        out: Axis | None = None
        last = ""
        for last, covers in _by_module(node).items():
            op = _op(node.line, last, covers)
            out = op.writes if node.line.inp is not None else None
            yield op
        if out is None or all(is_pinned(u) for u in axis_units(out)):
            continue
        if out in written:
            yield Op(OpKind.ADD, f"{last}.add", reads=(out, out), writes=out)
        written.add(out)
        if spec.act == "relu" and not _summed_next(out, nodes[position + 1 :]):
            yield Op(OpKind.ACT, f"{last}.act", reads=(out,), writes=out, detail="relu")


def _summed_next(out: Axis, rest: Sequence[_Node]) -> bool:
    """Whether the next node that touches `out` adds to it: then it is half of a sum so far."""
    for node in rest:
        for cover in node.covers:
            for axis, role in zip(cover.axes, cover.roles, strict=True):
                if role is Role.CONSUME and not set(axis_units(out)).isdisjoint(axis_units(axis)):
                    return False
        if any(out in c.axes for c in node.covers):
            return node.line.inp is not None
    return False


def _by_module(node: _Node) -> dict[str, list[Cover]]:
    modules: dict[str, list[Cover]] = {}
    for cover in node.covers:
        modules.setdefault(cover.module, []).append(cover)
    # A norm runs on what its layer makes, whatever the order of the names in the file.
    return dict(sorted(modules.items(), key=lambda m: not any(len(c.axes) > 1 for c in m[1])))


def _op(line: Line, module: str, covers: Sequence[Cover]) -> Op:
    tensors = {c.name.rpartition(".")[2]: c.name for c in covers}
    matrix = next((c for c in covers if len(c.axes) > 1 and Role.PRODUCE in c.roles), None)
    if matrix is not None:
        out = matrix.axes[matrix.roles.index(Role.PRODUCE)]
        inp = matrix.axes[matrix.roles.index(Role.CONSUME)]
        if line.reverse and all(is_pinned(u) for u in axis_units(inp)):
            return Op(OpKind.OTHER, module, tensors, (inp,), out, detail="embedding")
        kind = OpKind.LINEAR if len(matrix.axes) == 2 else OpKind.CONV
        return Op(kind, module, tensors, (inp,), out)
    axis = covers[0].axes[-1]
    if line.axes:
        return Op(OpKind.OTHER, module, tensors, (), axis)
    detail = "batch" if "running_mean" in tensors else "layer"
    return Op(OpKind.NORM, module, tensors, (axis,), axis, detail=detail)


def _assemble(
    spec: Spec,
    shapes: Shapes,
    covers: Mapping[str, Cover],
    sizes: Mapping[str, int],
    families: Mapping[str, str],
    aliases: Mapping[str, tuple[str, ...]],
    where: str,
) -> LayerGraph:
    nodes = _ordered_nodes(covers)
    tensors = {
        name: GraphTensor(
            name,
            shapes[name],
            tuple(
                TensorAxis(a, frozenset({r}))
                for a, r in zip(covers[name].axes, covers[name].roles, strict=True)
            )
            if name in covers
            else (),
            aliases.get(name, ()),
        )
        for name in shapes
    }
    order: dict[str, int] = {}
    for position, node in enumerate(nodes):
        for cover in node.covers:
            for axis, role in zip(cover.axes, cover.roles, strict=True):
                if role is not Role.CONSUME:
                    for unit in axis_units(axis):
                        order.setdefault(unit, position)
    warnings: list[str] = []
    exact = frozenset({"perm", "scale"}) if spec.act == "relu" else frozenset({"perm"})
    spaces: dict[str, Space] = {}
    used = dict.fromkeys(u for c in covers.values() for a in c.axes for u in axis_units(a))
    for id in sorted(used, key=lambda u: order.get(u, len(nodes))):
        pinned = PINNED[id.partition(":")[0]] if is_pinned(id) else _unproven(id, covers)
        if pinned is not None and not is_pinned(id):
            warnings.append(f"space {id} stays in place: {pinned}")
        spaces[id] = Space(
            id, sizes[id], pinned, families.get(id), exact, order.get(id, len(nodes))
        )
    return LayerGraph(
        tensors, spaces, tuple(_ops(spec, nodes)), source=where, warnings=tuple(warnings)
    )


def _unproven(space: str, covers: Mapping[str, Cover]) -> str | None:
    """Why a space can't be free: nothing makes it, or nothing reads it."""
    roles = {
        role
        for c in covers.values()
        for axis, role in zip(c.axes, c.roles, strict=True)
        if space in axis_units(axis)
    }
    listed = any(
        c.line.axes and space in {u for a in c.axes for u in axis_units(a)} for c in covers.values()
    )
    if Role.CONSUME not in roles:
        return "no layer reads it, it may be an output"
    if Role.PRODUCE not in roles and not listed:
        return "no layer makes it, it may be an input"
    return None
