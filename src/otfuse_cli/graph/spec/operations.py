"""Operations of a network that a spec describes: which modules run together, and in what order.

A spec doesn't say what its functions do beyond its lines. Where a line leaves that open (two
matrices that make one space: a gate, queries and keys?) the operation's kind is OTHER; a list of
axes says nothing of it at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge

from ..axes import Axis, axis_units
from ..model import Op, OpKind, Role
from ..sizes import is_pinned
from .grammar import Line, Spec
from .line_match import Cover
from .order import execution_order


@dataclass
class Node:
    """Modules that belong together (a layer and its norm), in the graph's execution order."""

    line: Line
    covers: list[Cover] = field(default_factory=list)

    @property
    def is_layer(self) -> bool:
        """Whether it makes units out of those that it reads."""
        if self.line.inp is not None:
            return True
        return any(c.first(Role.CONSUME) and c.first(Role.PRODUCE) for c in self.covers)

    def units(self, role: Role | None = None) -> set[str]:
        """Spaces on the axes of its tensors (in that role, when given)."""
        units: set[str] = set()
        for cover in self.covers:
            units |= cover.units(role)
        return units

    @property
    def per_unit(self) -> bool:
        """Whether it reads the units that it writes: a norm, a depthwise convolution."""
        return not any(c.first(Role.CONSUME) for c in self.covers)


def ordered_nodes(covers: Mapping[str, Cover]) -> list[Node]:
    """The nodes of a spec, each after everything that it depends on."""
    nodes: dict[tuple[object, ...], Node] = {}
    for cover in covers.values():
        # A bare space or a list stands for itself: nothing says that two of them run together.
        key = cover.key if cover.line.inp is not None else (*cover.key, cover.module)
        nodes.setdefault(key, Node(cover.line)).covers.append(cover)
    by_name = {node.covers[0].name: node for node in nodes.values()}
    reads: dict[str, set[str]] = {}
    writes: dict[str, set[str]] = {}
    for name, node in by_name.items():
        # What goes in and out of the network orders nothing; a norm runs after all its units.
        read = node.units(None if node.per_unit else Role.CONSUME)
        written = node.units(Role.PRODUCE) if node.is_layer and not node.per_unit else set()
        reads[name] = {u for u in read if not is_pinned(u)}
        writes[name] = {u for u in written if not is_pinned(u)}
    return [by_name[name] for name in execution_order(list(by_name), reads, writes)]


def operations(spec: Spec, nodes: Sequence[Node]) -> Iterator[Op]:
    """Operations in execution order; an add where a second layer writes to a space.

    What no layer reads (queries and keys) isn't added up; what reads the units that it writes may
    stand alone (the last transform before a tied output layer).
    """
    written: set[Axis] = set()
    reads = [node.units(Role.CONSUME) for node in nodes]
    read = set().union(*reads)
    touching = _touching(nodes)
    for position, node in enumerate(nodes):
        out: Axis | None = None
        last, matrices = "", 0
        for last, covers in _by_module(node).items():
            op = _op(spec, node, last, covers)
            matrices += op.kind in (OpKind.LINEAR, OpKind.CONV)
            out = op.writes if node.line.inp is not None else None
            if node.line.axes:
                made = (cover.first(Role.PRODUCE) for cover in covers)
                written.update(axis for axis in made if axis is not None)
            yield op
        if out is None or all(is_pinned(u) for u in axis_units(out)):
            continue
        again = out in written and not node.per_unit
        loop = any(c.first(Role.CONSUME) == out for c in node.covers)
        # Two matrices that make one space (a gate and its value), or a second writer of a space
        # that nothing else reads: the line leaves open how they meet.
        if matrices > 1 or (again and (loop or not read.issuperset(axis_units(out)))):
            yield Op(OpKind.OTHER, f"{last}.joint", reads=(out, out), writes=out, detail="joint")
        elif again:
            yield Op(OpKind.ADD, f"{last}.add", reads=(out, out), writes=out)
        written.add(out)
        later = _later(out, position, touching)
        if spec.act == "relu" and not _summed_next(out, ((nodes[at], reads[at]) for at in later)):
            yield Op(OpKind.ACT, f"{last}.act", reads=(out,), writes=out, detail="relu")


def _touching(nodes: Sequence[Node]) -> dict[str, list[int]]:
    """Positions of the nodes that each space meets."""
    places: dict[str, list[int]] = {}
    for position, node in enumerate(nodes):
        for space in node.units():
            places.setdefault(space, []).append(position)
    return places


def _later(out: Axis, position: int, touching: Mapping[str, list[int]]) -> Iterable[int]:
    """Positions of the nodes behind `position` that meet a space of `out`, in order."""
    return merge(*[_after(touching[u], position) for u in dict.fromkeys(axis_units(out))])


def _after(positions: Sequence[int], position: int) -> Iterator[int]:
    first = bisect_right(positions, position)
    return (positions[at] for at in range(first, len(positions)))


def _summed_next(out: Axis, rest: Iterable[tuple[Node, set[str]]]) -> bool:
    """Whether the next node that touches `out` adds to it: then it is half of a sum so far.

    `rest` are the nodes behind, each with the spaces that it reads.
    """
    for node, read in rest:
        if not read.isdisjoint(axis_units(out)):
            return False
        if any(out in c.axes for c in node.covers):
            return node.is_layer and not node.per_unit
    return False


def _by_module(node: Node) -> dict[str, list[Cover]]:
    modules: dict[str, list[Cover]] = {}
    for cover in node.covers:
        modules.setdefault(cover.module, []).append(cover)

    # A norm runs on what its layer makes, whatever the order of the names in the file.
    def is_norm(item: tuple[str, list[Cover]]) -> bool:
        return all(len(cover.axes) < 2 for cover in item[1])

    return dict(sorted(modules.items(), key=is_norm))


def _op(spec: Spec, node: Node, module: str, covers: Sequence[Cover]) -> Op:
    # Masks and counters of a module (all fixed) are no part of what it does.
    parts = [c for c in covers if any(roles != {Role.FIXED} for roles in c.roles)]
    tensors = {c.name.rpartition(".")[2]: c.name for c in parts or covers}
    if node.line.axes:
        axes = covers[0].axes
        free = [a for a in axes if not all(map(is_pinned, axis_units(a)))]
        writes = covers[0].first(Role.PRODUCE) or (free or axes)[-1]
        return Op(OpKind.OTHER, module, tensors, (), writes)
    matrix = next((c for c in covers if len(c.axes) > 1 and c.first(Role.PRODUCE)), None)
    if matrix is not None:
        out, read = matrix.first(Role.PRODUCE), matrix.first(Role.CONSUME) or covers[0].axes[0]
        if node.line.reverse and all(map(is_pinned, axis_units(read))):
            return Op(OpKind.OTHER, module, tensors, (read,), out, detail="embedding")
        kind = OpKind.LINEAR if len(matrix.axes) == 2 else OpKind.CONV
        return Op(kind, module, tensors, (read,), out)
    axis = covers[0].axes[-1]
    detail = "batch" if "running_mean" in tensors else "layer"
    if spec.norms == "rms" and len(tensors) == 1:
        detail = "rms"
    return Op(OpKind.NORM, module, tensors, (axis,), axis, detail=detail)
