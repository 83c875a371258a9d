"""Sizes of spaces, solved from the shapes of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ..errors import IncompatibleModels, only_in
from .axes import Axis, Unit, axis_size, axis_units
from .model import PINNED, GraphTensor, LayerGraph, Shapes


def fit_axis(axis: Axis, length: int, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """What `length` positions say about the sizes in `axis`.

    Returns:
        The size of the one unknown space; nothing when all are known and fit; None when two or
        more are unknown.

    Raises:
        ValueError: No size fits.
    """
    unknown = {u for u in axis_units(axis) if u not in sizes}
    if len(unknown) > 1:
        return None
    if not unknown:
        got = axis_size(axis, sizes)
        if got != length:
            raise ValueError(f"the axis has {length} positions, `{axis}` makes {got}")
        return {}
    (space,) = unknown
    if isinstance(axis, Unit) and length:  # most axes: nothing to search for
        return {space: length}
    inside = {u: sizes.get(u, 0) for u in axis_units(axis)}
    low, high = 1, max(length, 1)
    while low < high:  # the size of an axis grows with each of its spaces
        middle = (low + high) // 2
        if axis_size(axis, {**inside, space: middle}) < length:
            low = middle + 1
        else:
            high = middle
    if axis_size(axis, {**inside, space: low}) != length:
        raise ValueError(f"no size of {space} makes `{axis}` {length} positions long")
    return {space: low}


def is_pinned(space: str) -> bool:
    """Is this `in` or `out`, or one of several of them (`in:10`)?"""
    return space.partition(":")[0] in PINNED


def resize(
    graph: LayerGraph,
    shapes: Shapes,
    *,
    label: str,
    anchor: str,
    whole_groups: bool = False,
    known_sizes: Mapping[str, int] | None = None,
) -> LayerGraph:
    """The same graph for a model of other widths: free spaces take their sizes from `shapes`.

    Args:
        graph: The anchor's graph.
        shapes: The other model's shapes.
        label: What messages call the other model.
        anchor: What messages call the anchor.
        whole_groups: Where heads and what is inside them share an axis, the number of heads
            differs, not their inside (as after pruning). Tried, too, where equal numbers fit none.
        known_sizes: Sizes that were found in another way.

    Raises:
        IncompatibleModels: The two differ in more than widths; the first difference is named with
            both shapes.
    """
    _require_same_names(graph, shapes, label, anchor)
    sizes, misfits = solve_widths(graph, shapes, whole_groups=whole_groups, known_sizes=known_sizes)
    if misfits and not whole_groups:
        # As a pruned network has it: fewer heads, each as wide as it was.
        inside, others = solve_widths(graph, shapes, whole_groups=True)
        sizes, misfits = (sizes, misfits) if others else (inside, others)
    if misfits:
        misfit = misfits[0]
        anchor_shape, shape = graph.tensors[misfit.name].shape, shapes[misfit.name]
        raise IncompatibleModels(
            "the models differ in more than widths",
            where=f"{misfit.name} axis {misfit.dim}: {list(shape)} in {label}, "
            f"{list(anchor_shape)} in {anchor}",
            why=misfit.why,
            fix="fuse models of one architecture, with the same inputs and classes",
        )
    return replace(
        graph,
        tensors={n: replace(t, shape=shapes[n]) for n, t in graph.tensors.items()},
        spaces={id: replace(s, size=sizes.get(id, s.size)) for id, s in graph.spaces.items()},
    )


def at_sizes(graph: LayerGraph, sizes: Mapping[str, int]) -> LayerGraph:
    """The same graph with other numbers of units; spaces without one keep theirs."""
    new = {**graph.sizes, **sizes}
    tensors: dict[str, GraphTensor] = {}
    for name, node in graph.tensors.items():
        shape = tuple(axis_size(axis.expr, new) for axis in node.axes)
        tensors[name] = replace(node, shape=shape)
    spaces = {id: replace(space, size=new[id]) for id, space in graph.spaces.items()}
    return replace(graph, tensors=tensors, spaces=spaces)


@dataclass(frozen=True)
class Misfit:
    """An axis of a tensor that no sizes of the spaces explain."""

    name: str
    dim: int
    why: str

    @property
    def text(self) -> str:
        """Axis and cause."""
        return f"axis {self.dim}: {self.why}"


def solve_widths(
    graph: LayerGraph,
    shapes: Shapes,
    *,
    whole_groups: bool = False,
    known_sizes: Mapping[str, int] | None = None,
) -> tuple[dict[str, int], tuple[Misfit, ...]]:
    """Sizes of all spaces in another model of the same layers, and every axis that fits none.

    Where nothing tells how two spaces share an axis (heads x dimensions), one keeps the anchor's.

    Args:
        graph: The anchor's graph.
        shapes: The other model's, with the anchor's number of axes; tensors may be missing.
        whole_groups: Of heads and what is inside them, the inside keeps the anchor's size.
        known_sizes: Sizes that were found in another way.
    """
    sizes = {id: s.size for id, s in graph.spaces.items() if s.pinned is not None}
    sizes = {**(known_sizes or {}), **sizes}
    misfits: list[Misfit] = []
    pending: list[tuple[str, int]] = []
    for name in graph.tensors:
        pending.extend((name, dim) for dim in range(len(shapes.get(name, ()))))
    # An axis with two unknown spaces waits until another has told one of them.
    while pending:
        left = []
        for name, dim in pending:
            axis = graph.tensors[name].axes[dim].expr
            try:
                solved = fit_axis(axis, shapes[name][dim], sizes)
            except ValueError as error:
                misfits.append(Misfit(name, dim, f"{error}{_remarks(graph, axis)}"))
                continue
            if solved is None:
                left.append((name, dim))
            sizes |= solved or {}
        if len(left) == len(pending):  # nothing is told any more: one space keeps its size
            name, dim = left[0]
            axis = graph.tensors[name].axes[dim].expr
            unknown = [u for u in axis_units(axis) if u not in sizes]
            if whole_groups:
                # Families first: the inside of the heads keeps its size, their number changes.
                unknown.sort(key=lambda u: graph.spaces[u].per is None)
            sizes[unknown[0]] = graph.spaces[unknown[0]].size
        pending = left
    return sizes, tuple(misfits)


def _remarks(graph: LayerGraph, axis: Axis) -> str:
    """What else a message says of an axis that no sizes explain."""
    spaces = [graph.spaces[u] for u in axis_units(axis)]
    remarks = ""
    if any(space.per is not None for space in spaces):
        remarks += "; heads and groups go whole"
    reasons = {space.pinned for space in spaces if space.pinned is not None}
    if reasons:
        remarks += f"; that axis is pinned: {', '.join(sorted(reasons))}"
    return remarks


def _require_same_names(graph: LayerGraph, shapes: Shapes, label: str, anchor: str) -> None:
    missing = [n for n in graph.tensors if n not in shapes]
    extra = [n for n in shapes if n not in graph.tensors]
    if missing or extra:
        sides = ((missing, anchor, label), (extra, label, anchor))
        parts = [only_in(names, holder, other) for names, holder, other in sides if names]
        raise IncompatibleModels(
            "the checkpoints hold different tensors",
            where=f"{label} and {anchor}",
            why="; ".join(parts),
            fix="fuse checkpoints of one architecture, or add --no-strict to keep what the anchor "
            "alone has and drop what it lacks",
        )
    for name, tensor in graph.tensors.items():
        if len(tensor.shape) != len(shapes[name]):
            raise IncompatibleModels(
                "the checkpoints hold different tensors",
                where=f"{name}: {list(shapes[name])} in {label}, {list(tensor.shape)} in {anchor}",
                why="they have a different number of axes",
                fix="fuse checkpoints of one architecture",
            )


def matched_share(graph: LayerGraph) -> float | None:
    """The share of numbers in tensors with a unit that may move; None of an empty graph."""
    total = movable = 0
    for tensor in graph.tensors.values():
        size = prod(tensor.shape)
        units = [unit for axis in tensor.axes for unit in axis_units(axis.expr)]
        total += size
        movable += size * any(graph.spaces[unit].pinned is None for unit in units)
    return movable / total if total else None
