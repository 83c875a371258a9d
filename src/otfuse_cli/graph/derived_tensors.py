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

# (tensor, dimension) that carries the units of another (tensor, dimension).
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
    return tuple(found for name in shapes if (found := _power(name, shapes)) is not None)


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
    found = tuple(_settled(d, graph) for d in power_vectors(_shapes(graph)))
    if not found:
        return graph
    derived = {name for d in found for name in d.tensors}
    tensors = {
        name: replace(t, axes=tuple(_derived(a) for a in t.axes)) if name in derived else t
        for name, t in graph.tensors.items()
    }
    bound = {id for d in found for id, where in graph.members.items() if d.source in dict(where)}
    spaces = {id: _bound(s) if id in bound else s for id, s in graph.spaces.items()}
    for id, where in graph.members.items():
        if where and derived.issuperset(name for name, _ in where):
            spaces[id] = replace(spaces[id], pinned=spaces[id].pinned or COMPUTED)
    return replace(graph, tensors=tensors, spaces=spaces, derived=(*graph.derived, *found))


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
        held = {self.names.get(n, n): self._renamed(t) for n, t in graph.tensors.items()}
        sources = {d.source for d in self.hidden}
        for derived in self.hidden:
            for part, name in derived.parts.items():
                axes = _vector_axes(held[derived.source], self.whole[name], part)
                held[name] = GraphTensor(name, self.whole[name], axes)
        tensors = {name: held[name] for name in self.whole}
        ops = tuple(self._op(op, sources) for op in graph.ops)
        return marked(replace(graph, tensors=tensors, ops=ops))

    def _renamed(self, tensor: GraphTensor) -> GraphTensor:
        return replace(tensor, name=self.names.get(tensor.name, tensor.name))

    def _op(self, op: Op, sources: set[str]) -> Op:
        """A weight that is computed goes by its own name: nobody takes it for the weight itself."""
        tensors = {}
        for part, name in op.tensors.items():
            own = self.names.get(name, name)
            computed = own in sources and op.kind is not OpKind.NORM
            tensors[f"weight.{own.rpartition('.')[2]}" if computed else part] = own
        return replace(op, tensors=tensors)


def spec_view(shapes: Shapes, *, rename: bool = True) -> Plain:
    """What a spec or a family is to see of these tensors; with `rename` by their plain names."""
    hidden = power_vectors(shapes)
    vectors = {name for d in hidden for name in d.tensors}
    names: dict[str, str] = {}
    for derived in hidden:
        match = _PLAIN.fullmatch(derived.source)
        if match is not None and rename:
            names[f"{match['module'] or ''}{match['part']}"] = derived.source
    back = {own: name for name, own in names.items()}
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
        indices = len(graph.tensors[derived.others[0]].shape)
        for dim, at in enumerate(derived.order):
            if at >= indices:
                yield target, dim, source, at - indices + 1
        return
    rank = range(len(graph.tensors[target].shape))
    order = derived.order if kind == "copy" and derived.order else rank
    yield from ((target, dim, source, at) for dim, at in zip(rank, order, strict=True))
    if kind == "sums":
        yield from ((derived.others[0], i, source, at) for i, at in enumerate(derived.order))
    if kind == "gained":
        gain = graph.tensors[derived.others[0]].shape
        yield from ((derived.others[0], d, source, d) for d in rank if gain[d] > 1)


def related(graph: LayerGraph, found: Sequence[Derived], links: Sequence[Link]) -> LayerGraph:
    """The graph with relations: axes that nothing reaches get the units of those they go with."""
    tensors = dict(graph.tensors)
    for one, dim, other, at in links:
        ends = ((one, dim), (other, at))
        reached = [end for end in ends if not _unreached(tensors[end[0]].axes[end[1]], graph)]
        if len(reached) == 1:
            (name, axis) = next(end for end in ends if end not in reached)
            (owner, own) = reached[0]
            moved = TensorAxis(tensors[owner].axes[own].expr, frozenset({Role.DERIVED}))
            axes = list(tensors[name].axes)
            axes[axis] = moved
            tensors[name] = replace(tensors[name], axes=tuple(axes))
    carried = {u for t in tensors.values() for axis in t.axes for u in axis_units(axis.expr)}
    spaces = {id: s for id, s in graph.spaces.items() if id in carried or s.pinned != UNUSED}
    return replace(graph, tensors=tensors, spaces=spaces, derived=(*graph.derived, *found))


def _unreached(axis: TensorAxis, graph: LayerGraph) -> bool:
    units = list(axis_units(axis.expr))
    return all(graph.spaces[u].pinned == UNUSED for u in units)


def without_vectors(graph: LayerGraph) -> LayerGraph:
    """The graph as a spec is to describe it: vectors are found again by their names."""
    gone = {name for d in graph.derived for name in d.tensors}
    if not gone:
        return graph
    ops = tuple(
        replace(op, tensors={part: n for part, n in op.tensors.items() if n not in gone})
        for op in graph.ops
    )
    tensors = {n: t for n, t in graph.tensors.items() if n not in gone}
    return replace(graph, tensors=tensors, ops=ops, derived=())


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
    if len(weight) < 2 or not total:
        return []
    wanted = [shapes[parts[p]] for p in ("u", "v") if p in parts]
    if any(sum(n > 1 for n in shape) > 1 for shape in wanted):
        return []
    lengths = [prod(shape) for shape in wanted]
    return [d for d, n in enumerate(weight) if lengths == [n, total // n][: len(lengths)]]


def _settled(derived: Derived, graph: LayerGraph) -> Derived:
    """With the axis that `u` stands for: the one with its units, that which makes them first."""
    source = graph.tensors[derived.source]
    u = graph.tensors[derived.parts["u"]].axes[-1].expr
    dims = fitting_dims(derived.source, derived.parts, _shapes(graph))

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
    axes = [Fixed(n) for n in shape]
    if whole is None:
        return tuple(TensorAxis(a, frozenset({Role.FIXED})) for a in axes)
    last = max(range(len(shape)), key=lambda d: shape[d])
    return tuple(
        TensorAxis(whole if d == last else a, frozenset({Role.DERIVED})) for d, a in enumerate(axes)
    )


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
    return {name: tensor.shape for name, tensor in graph.tensors.items()}
