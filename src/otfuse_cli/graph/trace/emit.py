"""From a propagation to a `LayerGraph`: names for spaces, one canonical expression per axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..axes import Axis, Cat, Fixed, Prod, Unit, axis_units, concat, product
from ..derived_tensors import marked
from ..model import GraphTensor, LayerGraph, Op, Role, Space, TensorAxis
from . import atoms
from .atoms import Atom, Form, Times, head
from .call import Label, Labels, OpRecord, Origin, Value, forms_of
from .deferred import is_settled
from .fold_norms import fold_rms
from .label_operations import Propagation
from .roles import settled_roles
from .rules.convolution import KERNEL
from .space_families import find_families, is_unit

# axes that are fixed by what they are; any other pinned axis is a space with a reason
STRUCTURAL = frozenset({KERNEL, "gates", "layers", "positions"})


@dataclass
class Names:
    """Ids of spaces, by what they stand for: a free leaf, or a whole pinned axis."""

    free: dict[Atom, str] = field(default_factory=dict)
    pinned: dict[tuple[Atom, ...], str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def emit(
    propagation: Propagation,
    *,
    source: str = "",
    name_map: Mapping[str, str] | None = None,
) -> LayerGraph:
    """Name what was found."""
    rename = dict(name_map or {})
    # First the roles, which pin what can't move; then names, which tell pinned from free.
    roles = settled_roles(propagation)
    names = _name_spaces(propagation, rename)
    members = find_families(_contexts(propagation))
    tensors = _tensors(propagation, roles, names, rename)
    spaces = _spaces(propagation, names, members)
    graph = LayerGraph(
        tensors=tensors,
        spaces=spaces,
        ops=tuple(_op(record, names, rename) for record in fold_rms(propagation.log.ops)),
        outputs=tuple(_shown(propagation.outputs, names)),
        source=source,
        warnings=tuple(dict.fromkeys(propagation.warnings)),
    )
    return marked(graph)


def label_values(
    propagation: Propagation, *, name_map: Mapping[str, str] | None = None
) -> tuple[dict[str, tuple[Axis | None, ...]], frozenset[str]]:
    """What the axes of every value are, by node, in the names of `emit`; and which are data.

    None stands for an axis whose structure nothing has decided.
    """
    settled_roles(propagation)
    names = _name_spaces(propagation, dict(name_map or {}))
    axes: dict[str, tuple[Axis | None, ...]] = {}
    data: set[str] = set()
    for node, value in propagation.values.items():
        if not isinstance(value, Value):
            continue
        # To look inside a reshape that waits would decide what it is.
        axes[node.name] = tuple(
            _axis(label, names) if is_settled(label.form) else None for label in value.labels
        )
        if value.data:
            data.add(node.name)
    return axes, frozenset(data)


def expression(form: Form, names: Mapping[Atom, str]) -> Axis:
    """The canonical expression: sums outermost where possible, runs of fixed positions merged."""
    top = head(form)
    if isinstance(top, Atom):
        return Unit(names[top]) if is_unit(top) and top in names else Fixed(top.size)
    if isinstance(top, Times):
        return _multiplied([expression(f, names) for f in top.factors])
    return _added([expression(p, names) for p in top.parts])


def _multiplied(factors: Sequence[Axis]) -> Axis:
    # Canonical, so that one layer gives one expression however its network has reshaped it:
    # neighbouring numbers are one, factors of one position are none.
    merged: list[Axis] = []
    for factor in factors:
        for one in factor.factors if isinstance(factor, Prod) else (factor,):
            last = merged[-1] if merged else None
            if one == Fixed(1):
                continue
            if isinstance(one, Fixed) and isinstance(last, Fixed):
                merged[-1] = Fixed(last.size * one.size)
            else:
                merged.append(one)
    if not merged:
        return Fixed(1)
    first, rest = merged[0], merged[1:]
    if isinstance(first, Cat) and rest:  # (a + b) * c is a * c + b * c
        return _added([_multiplied([part, *rest]) for part in first.parts])
    return product(*merged)


def _added(parts: Sequence[Axis]) -> Axis:
    merged: list[Axis] = []
    for part in parts:
        for one in part.parts if isinstance(part, Cat) else (part,):
            last = merged[-1] if merged else None
            if isinstance(one, Fixed) and isinstance(last, Fixed):
                merged[-1] = Fixed(last.size + one.size)
            else:
                merged.append(one)
    return concat(*merged)


def _axis(label: Label, names: Names) -> Axis:
    """Expression of a whole axis; a pinned one is its pinned space."""
    run = _run(label)
    if run in names.pinned:
        return Unit(names.pinned[run])
    return expression(label.form, names.free)


def _run(label: Label) -> tuple[Atom, ...]:
    """Leaves of an axis, without single positions beside others."""
    run = tuple(atoms.leaves(label.form))
    return tuple(leaf for leaf in run if leaf.size > 1) or run[:1]


def _name_spaces(propagation: Propagation, rename: Mapping[str, str]) -> Names:
    """Every space is called after the first tensor axis that has it, in checkpoint order.

    That name depends on no width and no weight, so that two models of one architecture agree.
    """
    names = Names()
    for tensor, labels in propagation.state.items():
        for d, label in enumerate(labels):
            id = f"{rename.get(tensor, tensor)}:{d}"
            run = _run(label)
            if not any(is_unit(leaf) for leaf in run):
                reason = _reason(run)
                if reason is not None and run not in names.pinned:
                    names.pinned[run] = id
                    names.sizes[id], names.reasons[id] = label.size, reason
                continue
            # Leaves without a name get marks, to see where in the expression each of them stands.
            fresh = {leaf: f"?{i}" for i, leaf in enumerate(run) if leaf not in names.free}
            expr = expression(label.form, names.free | fresh)
            for leaf, mark in fresh.items():
                path = _path(expr, mark)
                if path is not None:
                    names.free[leaf] = ".".join((id, *map(str, path)))
                    names.sizes[names.free[leaf]] = leaf.size
    return names


def _reason(run: Sequence[Atom]) -> str | None:
    """Why an axis is pinned, where that is more than what the axis is; the first reason stands."""
    for leaf in run:
        if leaf.reason and leaf.reason not in STRUCTURAL:
            return leaf.reason
    return None


def _path(axis: Axis, mark: str) -> tuple[int, ...] | None:
    """Where `mark` first stands in `axis`: child numbers from the top."""
    if isinstance(axis, Unit):
        return () if axis.space == mark else None
    if isinstance(axis, Fixed):
        return None
    for i, child in enumerate(axis.factors if isinstance(axis, Prod) else axis.parts):
        path = _path(child, mark)
        if path is not None:
            return (i, *path)
    return None


def _contexts(propagation: Propagation) -> Iterable[Sequence[Form]]:
    for labels in (*propagation.state.values(), *propagation.log.contexts):
        yield forms_of(labels)


def _tensors(
    propagation: Propagation,
    roles: Mapping[Origin, set[Role]],
    names: Names,
    rename: Mapping[str, str],
) -> dict[str, GraphTensor]:
    tensors: dict[str, GraphTensor] = {}
    for name, labels in propagation.state.items():
        axes = []
        for d, label in enumerate(labels):
            expr = _axis(label, names)
            axes.append(TensorAxis(expr, _final_roles(expr, roles.get((name, d), set()), names)))
        stored_name = rename.get(name, name)
        aliases = tuple(rename.get(alias, alias) for alias in propagation.aliases[name])
        tensors[stored_name] = GraphTensor(
            stored_name, propagation.shapes[name], tuple(axes), aliases
        )
    return tensors


def _final_roles(expr: Axis, seen: set[Role], names: Names) -> frozenset[Role]:
    units = set(axis_units(expr))
    moving = seen - {Role.FIXED}
    if not units or (not moving and units <= names.reasons.keys()):
        # what a tensor holds matters where its units stay, too: a variance is never negative
        return frozenset({Role.FIXED} | (seen & {Role.VARIANCE}))
    return frozenset(moving or {Role.VECTOR})


def _spaces(
    propagation: Propagation, names: Names, members: Mapping[Atom, Atom]
) -> dict[str, Space]:
    first = _first_steps(propagation, names)
    leaf_of = {id: leaf for leaf, id in names.free.items()}
    # What no operation uses comes last: behind every step that there is.
    ids = sorted(names.sizes, key=lambda id: first.get(id, (1, len(propagation.log.roles) + 1)))
    spaces: dict[str, Space] = {}
    for order, id in enumerate(ids):
        leaf = leaf_of.get(id)
        index = members.get(leaf) if leaf is not None else None
        spaces[id] = Space(
            id=id,
            size=names.sizes[id],
            pinned=names.reasons.get(id),
            per=names.free.get(index) if index is not None else None,
            exact=leaf.exact if leaf is not None else frozenset(),
            order=order,
        )
    return spaces


def _first_steps(propagation: Propagation, names: Names) -> dict[str, tuple[int, int]]:
    """Step at which a space is first produced, or else first used."""
    units: dict[Origin, tuple[str, ...]] = {}
    for name, labels in propagation.state.items():
        for d, label in enumerate(labels):
            units[name, d] = tuple(axis_units(_axis(label, names)))
    first: dict[str, tuple[int, int]] = {}
    for event in propagation.log.roles:
        key = (0 if event.role is Role.PRODUCE else 1, event.step)
        for id in units[event.origin]:
            first[id] = min(first.get(id, key), key)
    # a space with a producer comes in the order of that; others by their first use
    return {id: (0, step) for id, (_, step) in first.items()}


def _op(record: OpRecord, names: Names, rename: Mapping[str, str]) -> Op:
    carriers = [_carrier(labels, names) for labels in record.reads]
    reads = tuple(axis for axis in carriers if axis is not None)
    return Op(
        kind=record.kind,
        name=record.name,
        tensors={part: rename.get(name, name) for part, name in record.tensors.items()},
        reads=reads,
        writes=_carrier(record.writes, names),
        detail=record.detail,
        inputs=record.inputs,
    )


def _carrier(labels: Labels, names: Names) -> Axis | None:
    """The axis that carries units: the last one with free units, else the last one."""
    axes = [_axis(label, names) for label in labels if is_settled(label.form)]
    for axis in reversed(axes):
        if _is_free(axis, names):
            return axis
    return axes[-1] if axes else None


def _is_free(axis: Axis, names: Names) -> bool:
    """Whether some of its units may move."""
    return any(unit not in names.reasons for unit in axis_units(axis))


def _shown(outputs: Sequence[Labels], names: Names) -> Iterator[tuple[int, int, Axis]]:
    for i, labels in enumerate(outputs):
        for d, axis in _moving(labels, names):
            yield i, d, axis


def _moving(labels: Labels, names: Names) -> Iterator[tuple[int, Axis]]:
    """Axes with free units."""
    for d, label in enumerate(labels):
        if is_settled(label.form):
            axis = _axis(label, names)
            if _is_free(axis, names):
                yield d, axis
