"""Tensors that are a function of weights: found by their names and shapes, moved, never averaged.

Spectral normalisation (Miyato et al. 2018) divides a weight W by u W v, where u and v are its
leading singular vectors, kept up by power iteration. Their mean is none of the mean weight, and
their signs are arbitrary: u and v of one model may be the negatives of the other's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..errors import few
from .axes import Axis, Fixed, Prod, axis_units, product
from .model import Derived, GraphTensor, LayerGraph, Op, OpKind, Role, Shapes, Space, TensorAxis

POWER = "power"
COMPUTED = "computed from a weight"
UNUSED = "unused"  # the reason of axes that no forward pass reaches

# A tensor's dimension, and the dimension of another tensor whose units it carries.
Link = tuple[str, int, str, int]

# The vector's name: old hooks (`weight_orig`, `weight_u`, `weight_v`, the last one missing before
# torch 1.1; `weight_bar` in code older than that), the parametrisation, and BigGAN's.
_HOOK = re.compile(r"(?P<stem>.+)_u")
_PARAMETRISATION = re.compile(r"(?P<stem>(.+\.)?parametrizations\.[^.]+)\.0\._u")
# Behind another parametrisation, the weight that is normed is no tensor of the checkpoint.
_BEHIND = re.compile(r"(.+\.)?parametrizations\.[^.]+\.[1-9]\d*\._u")
_PLAIN = re.compile(r"(?P<module>.+\.)?parametrizations\.(?P<part>[^.]+)\.original")
_BIGGAN = re.compile(r"(?P<module>.+\.)?u0")


def power_vectors(shapes: Shapes) -> tuple[Derived, ...]:
    """Every weight with its power-iteration vectors: lengths must be its rows and all the rest."""
    candidates = (_power(name, shapes) for name in shapes)
    return tuple(derived for derived in candidates if derived is not None)


def marked(graph: LayerGraph) -> LayerGraph:
    """The graph with its power-iteration vectors marked: their axes stay what they are.

    A unit's row can't be scaled alone any more: the norm is of all rows.
    """
    behind = [n for n in graph.tensors if _BEHIND.fullmatch(n)]
    if behind:
        warning = (
            f"{few(behind)}: the spectral norm of a weight that is parametrised before it: its "
            "vectors are averaged, and the fused weight's norm is near 1 only; run the network "
            "once in training mode to renew them"
        )
        graph = replace(graph, warnings=(*graph.warnings, warning))
    powers = tuple(_settled(d, graph) for d in power_vectors(_shapes(graph)))
    if not powers:
        return graph
    derived = _names(powers)
    tensors = dict(graph.tensors)
    for name in derived:
        axes = tuple(_derived(axis) for axis in tensors[name].axes)
        tensors[name] = replace(tensors[name], axes=axes)
    sources = {power.source for power in powers}
    spaces = dict(graph.spaces)
    for id, places in graph.members.items():
        carriers = {name for name, _ in places}
        if sources & carriers:
            spaces[id] = _bound(spaces[id])
        if carriers and carriers <= derived:
            spaces[id] = replace(spaces[id], pinned=spaces[id].pinned or COMPUTED)
    return replace(graph, tensors=tensors, spaces=spaces, derived=(*graph.derived, *powers))


@dataclass(frozen=True)
class Plain:
    """Shapes as a network without spectral normalisation has them, and the way back.

    Attributes:
        shapes: Without vectors, parametrised weights under the names that they stand for.
        names: Plain name to the checkpoint's, where they differ.
        hidden: What was left out.
    """

    shapes: Shapes
    names: Mapping[str, str]
    hidden: tuple[Derived, ...]
    whole: Shapes

    def restored(self, graph: LayerGraph) -> LayerGraph:
        """The graph of what the checkpoint holds, in its order."""
        if not self.hidden:
            return graph
        by_name = {self.names.get(n, n): self._renamed(t) for n, t in graph.tensors.items()}
        sources = {d.source for d in self.hidden}
        for derived in self.hidden:
            for part, name in derived.parts.items():
                axes = _vector_axes(by_name[derived.source], self.whole[name], part)
                by_name[name] = GraphTensor(name, self.whole[name], axes)
        tensors = {name: by_name[name] for name in self.whole}
        ops = tuple(self._op(op, sources) for op in graph.ops)
        return marked(replace(graph, tensors=tensors, ops=ops))

    def _renamed(self, tensor: GraphTensor) -> GraphTensor:
        return replace(tensor, name=self.names.get(tensor.name, tensor.name))

    def _op(self, op: Op, sources: set[str]) -> Op:
        """A weight that is computed goes by its own name: nobody takes it for the weight itself."""
        tensors = {}
        for part, name in op.tensors.items():
            stored_name = self.names.get(name, name)
            computed = stored_name in sources and op.kind is not OpKind.NORM
            tensors[f"weight.{stored_name.rpartition('.')[2]}" if computed else part] = stored_name
        return replace(op, tensors=tensors)


def spec_view(shapes: Shapes, *, rename: bool = True) -> Plain:
    """What a spec or a family is to see of these tensors; with `rename` by their plain names."""
    hidden = power_vectors(shapes)
    vectors = _names(hidden)
    names: dict[str, str] = {}
    for derived in hidden:
        match = _PLAIN.fullmatch(derived.source)
        if match is not None and rename:
            names[f"{match['module'] or ''}{match['part']}"] = derived.source
    back = {stored_name: name for name, stored_name in names.items()}
    left = {back.get(n, n): shape for n, shape in shapes.items() if n not in vectors}
    return Plain(left, names, hidden, shapes)


def linked(derived: Derived, graph: LayerGraph) -> Iterator[Link]:
    """Which axes of a relation (`fusion/relations.py`) carry units of which axes of its source."""
    (target,) = derived.tensors
    source, kind = derived.source, derived.kind
    if kind in ("norms", "squares"):
        yield target, 0, source, derived.dim
        return
    if kind == "looked up":
        # Axes of the indices stand where rows of the table (axis 0) stood.
        indices = len(graph.tensors[derived.others[0]].shape)
        for dim, at in enumerate(derived.order):
            if at >= indices:
                yield target, dim, source, at - indices + 1
        return
    rank = range(len(graph.tensors[target].shape))
    order = derived.order if kind == "copy" and derived.order else rank
    for dim, at in zip(rank, order, strict=True):
        yield target, dim, source, at
    if kind == "sums":
        for dim, at in enumerate(derived.order):
            yield derived.others[0], dim, source, at
    if kind == "gained":
        gain = graph.tensors[derived.others[0]].shape
        for dim in rank:
            if gain[dim] > 1:  # a single number is broadcast, and goes with no unit
                yield derived.others[0], dim, source, dim


def related(graph: LayerGraph, relations: Sequence[Derived], links: Sequence[Link]) -> LayerGraph:
    """The graph with relations: axes that nothing reaches get the units of those they go with."""
    tensors = dict(graph.tensors)
    for one, dim, other, at in links:
        ends = ((one, dim), (other, at))
        reached = [end for end in ends if not _unreached(tensors[end[0]].axes[end[1]], graph)]
        # With both ends reached the network says already what they carry; with none nobody does.
        if len(reached) == 1:
            (name, axis) = next(end for end in ends if end not in reached)
            (owner, owner_dim) = reached[0]
            moved = TensorAxis(tensors[owner].axes[owner_dim].expr, frozenset({Role.DERIVED}))
            axes = list(tensors[name].axes)
            axes[axis] = moved
            tensors[name] = replace(tensors[name], axes=tuple(axes))
    carried: set[str] = set()
    for tensor in tensors.values():
        carried |= tensor.units
    # A space that stood only for axes that nothing reaches is gone with them.
    spaces = {id: s for id, s in graph.spaces.items() if id in carried or s.pinned != UNUSED}
    return replace(graph, tensors=tensors, spaces=spaces, derived=(*graph.derived, *relations))


def _unreached(axis: TensorAxis, graph: LayerGraph) -> bool:
    units = list(axis_units(axis.expr))
    return all(graph.spaces[u].pinned == UNUSED for u in units)


def without_vectors(graph: LayerGraph) -> LayerGraph:
    """The graph as a spec is to describe it: vectors are found again by their names."""
    gone = _names(graph.derived)
    if not gone:
        return graph
    ops: list[Op] = []
    for op in graph.ops:
        left = {part: name for part, name in op.tensors.items() if name not in gone}
        ops.append(replace(op, tensors=left))
    tensors = {n: t for n, t in graph.tensors.items() if n not in gone}
    return replace(graph, tensors=tensors, ops=tuple(ops), derived=())


def _names(derived: Sequence[Derived]) -> set[str]:
    """Names of all tensors that are computed."""
    names: set[str] = set()
    for one in derived:
        names.update(one.tensors)
    return names


def _power(name: str, shapes: Shapes) -> Derived | None:
    for parts, sources in _candidates(name):
        present = {part: n for part, n in parts.items() if n in shapes}
        if "sigma" in parts and ("sigma" not in present or prod(shapes[present["sigma"]]) != 1):
            continue  # `u0` alone may be anything
        for source in sources:
            if source in shapes and fitting_dims(source, present, shapes):
                return Derived(POWER, source, present)
    return None


def _candidates(name: str) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """Names of the parts that go with a vector u, and those of the weight."""
    if (match := _PARAMETRISATION.fullmatch(name)) is not None:
        stem = match["stem"]
        yield {"u": name, "v": f"{stem}.0._v"}, (f"{stem}.original",)
    elif (match := _HOOK.fullmatch(name)) is not None:
        stem = match["stem"]
        yield {"u": name, "v": f"{stem}_v"}, (f"{stem}_orig", f"{stem}_bar")
    elif (match := _BIGGAN.fullmatch(name)) is not None:
        module = match["module"] or ""
        yield {"u": name, "sigma": f"{module}sv0"}, (f"{module}weight",)


def fitting_dims(source: str, parts: Mapping[str, str], shapes: Shapes) -> list[int]:
    """Axes of the weight that `u` may stand for: one number each, and `v` one for all the rest."""
    weight, total = shapes[source], prod(shapes[source])
    if len(weight) < 2 or not total:  # a vector has no norm of this kind
        return []
    lengths: list[int] = []
    for part in ("u", "v"):
        if part not in parts:
            continue
        shape = shapes[parts[part]]
        if len([n for n in shape if n > 1]) > 1:  # a matrix: (1, n), as BigGAN's u, is a vector
            return []
        lengths.append(prod(shape))
    # Old hooks keep no `v`: then the rows alone decide.
    return [d for d, n in enumerate(weight) if lengths == [n, total // n][: len(lengths)]]


def _settled(derived: Derived, graph: LayerGraph) -> Derived:
    """With the axis that `u` stands for: the one with its units, that which makes them first."""
    source = graph.tensors[derived.source]
    u = graph.tensors[derived.parts["u"]].axes[-1].expr
    dims = fitting_dims(derived.source, derived.parts, _shapes(graph))

    # A square weight may have two such axes: the lengths of the vectors don't tell them apart.
    def rank(dim: int) -> tuple[bool, bool, int]:
        axis = source.axes[dim]
        return (axis.expr != u, Role.PRODUCE not in axis.roles, dim)

    return replace(derived, dim=min(dims, key=rank))


def _vector_axes(weight: GraphTensor, shape: tuple[int, ...], part: str) -> tuple[TensorAxis, ...]:
    """Axes of a vector that no graph has traced."""
    made = [d for d, axis in enumerate(weight.axes) if Role.PRODUCE in axis.roles]
    dim = made[0] if made else 0
    rest = [axis.expr for d, axis in enumerate(weight.axes) if d != dim]
    whole = {"u": weight.axes[dim].expr, "v": _flat(rest)}.get(part)
    if whole is None:
        return tuple(TensorAxis(Fixed(n), frozenset({Role.FIXED})) for n in shape)
    role = frozenset({Role.DERIVED})
    axes = [TensorAxis(Fixed(n), role) for n in shape]
    # A vector may be stored as (1, n): its units are on the one long axis.
    last = max(range(len(shape)), key=lambda d: shape[d])
    axes[last] = TensorAxis(whole, role)
    return tuple(axes)


def _flat(axes: list[Axis]) -> Axis:
    """The product of axes, neighbouring numbers made one."""
    merged: list[Axis] = []
    for axis in axes:
        for factor in axis.factors if isinstance(axis, Prod) else (axis,):
            before = merged[-1] if merged else None
            if isinstance(factor, Fixed) and isinstance(before, Fixed):
                merged[-1] = Fixed(before.size * factor.size)
            elif factor != Fixed(1):
                merged.append(factor)
    return product(*merged) if merged else Fixed(1)


def _derived(axis: TensorAxis) -> TensorAxis:
    return replace(axis, roles=frozenset({Role.DERIVED}))


def _bound(space: Space) -> Space:
    return replace(space, exact=space.exact - {"scale", "gl"})


def _shapes(graph: LayerGraph) -> Shapes:
    return dict(graph.shapes)
