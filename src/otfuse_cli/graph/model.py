"""The layer graph: which axes of which tensors carry which units, and in what role.

One type for every source of a graph (spec, family, trace). Names, sizes and roles; no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from .axes import Axis, Cat, Fixed, Prod, Unit, axis_units, units_of

# Shapes of tensors by name.
Shapes = Mapping[str, tuple[int, ...]]

# Spaces of what goes in and what comes out: nobody may move their units.
PINNED = {"in": "input", "out": "output"}


class Role(StrEnum):
    """How a tensor uses the units on one of its axes (docs/architecture.md, The data model)."""

    PRODUCE = "produce"  # rows that make the unit
    CONSUME = "consume"  # columns that read it
    VECTOR = "vector"  # one number per unit, added: bias, running mean, embeddings
    SCALE = "scale"  # one number per unit, multiplied: norm gain, layer scale
    VARIANCE = "variance"  # running variance
    DERIVED = "derived"  # a function of weights: moved, but neither matched nor averaged
    FIXED = "fixed"


class OpKind(StrEnum):
    """Kinds of operation that folding, closed forms and residual policies tell apart."""

    LINEAR = "linear"
    CONV = "conv"
    NORM = "norm"
    ADD = "add"
    ACT = "act"
    OTHER = "other"


@dataclass(frozen=True)
class Space:
    """A set of interchangeable units that move together.

    Attributes:
        id: The spec's name, or `<first tensor>:<axis>` for traced graphs; equal for any width.
        size: Number of units (per unit of `per`, for a family).
        pinned: None when free, else the reason why the units stay in place.
        per: For a family, the space that indexes it: an independent map for each of its units.
        exact: Kinds of map that keep the function: perm, scale, orth, gl.
        order: Processing order: position of the first producer in execution order.
    """

    id: str
    size: int
    pinned: str | None = None
    per: str | None = None
    exact: frozenset[str] = frozenset({"perm"})
    order: int = 0


@dataclass(frozen=True)
class TensorAxis:
    """One axis of a tensor: its expression and the roles it plays there."""

    expr: Axis
    roles: frozenset[Role]


@dataclass(frozen=True)
class GraphTensor:
    """A tensor of the checkpoint: name, shape, one `TensorAxis` per dimension, tied names.

    `stands_for`: names of tensors that the file leaves out, since this one is used in their place.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[TensorAxis, ...]
    aliases: tuple[str, ...] = ()
    stands_for: tuple[str, ...] = ()

    @cached_property
    def exprs(self) -> tuple[Axis, ...]:
        """Expressions of its axes."""
        return tuple(axis.expr for axis in self.axes)

    @cached_property
    def units(self) -> frozenset[str]:
        """Spaces on its axes."""
        return frozenset(units_of(self.exprs))

    def dims(self, space: str, role: Role | None = None) -> tuple[int, ...]:
        """Dimensions whose expression names `space` (in `role`, when given)."""
        dims: list[int] = []
        for d, axis in enumerate(self.axes):
            if space in axis_units(axis.expr) and (role is None or role in axis.roles):
                dims.append(d)
        return tuple(dims)


@dataclass(frozen=True)
class Op:
    """One operation of the network, in execution order.

    Attributes:
        kind: What it is.
        name: Module path, or a made-up name for an operation without tensors.
        tensors: Part to tensor name: weight, bias, running_mean, running_var.
        reads: Axis expressions of the values that it reads (the axis that carries units).
        writes: Axis expression of the value that it writes.
        detail: For `act`, the function (`relu`); for `norm`, its kind (`batch`, `layer`, `rms`).
        inputs: For every read, numbers of the operations whose results it is put together from;
            none for a network input. Empty where the data flow isn't known.
    """

    kind: OpKind
    name: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[Axis, ...] = ()
    writes: Axis | None = None
    detail: str = ""
    inputs: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Derived:
    """Tensors that are a function of others.

    Attributes:
        kind: Which function (`graph/derived_tensors.py`, `fusion/relations.py`).
        source: The tensor that it is a function of first of all.
        parts: Part to tensor name.
        dim: The axis of the source that counts as its rows.
        others: More tensors that it is a function of.
        order: Axes of the source, where the function moves or picks them.
        eps: A small constant in it.
    """

    kind: str
    source: str
    parts: Mapping[str, str]
    dim: int = 0
    others: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    eps: float = 0.0

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of what is computed."""
        return tuple(self.parts.values())

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of what it is computed from."""
        return (self.source, *self.others)


@dataclass(frozen=True)
class LayerGraph:
    """The alignment structure of one model.

    Attributes:
        tensors: By name, in checkpoint order. Scalars have no axes.
        spaces: By id, in processing order.
        ops: In execution order.
        outputs: (output, axis, expression) where a returned tensor shows free units; empty when
            the outputs are pinned.
        source: Where the graph comes from: `family resnet`, `spec net.yaml`, `traced f.py:net`.
        warnings: What the reader of a report must know.
        assumes: What the network is taken to compute, where only names and shapes, or a spec, say
            so; None where the network was traced.
        derived: Tensors that are computed anew for a fused model.
    """

    tensors: Mapping[str, GraphTensor]
    spaces: Mapping[str, Space]
    ops: tuple[Op, ...] = ()
    outputs: tuple[tuple[int, int, Axis], ...] = ()
    source: str = ""
    warnings: tuple[str, ...] = ()
    assumes: str | None = None
    derived: tuple[Derived, ...] = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Units by space."""
        return {id: space.size for id, space in self.spaces.items()}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by tensor name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @cached_property
    def indices(self) -> frozenset[str]:
        """Spaces whose units are heads or groups: each has free units of its own inside."""
        return frozenset(space.per for space in self.free() if space.per is not None)

    @cached_property
    def members(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Space id to every (tensor, dimension) that carries it."""
        places: dict[str, list[tuple[str, int]]] = {id: [] for id in self.spaces}
        for tensor in self.tensors.values():
            for dim, axis in enumerate(tensor.axes):
                # A space may stand on one axis twice (`h + h`): it is one dimension all the same.
                for id in dict.fromkeys(axis_units(axis.expr)):
                    places[id].append((tensor.name, dim))
        return {id: tuple(where) for id, where in places.items()}

    def free(self) -> Iterator[Space]:
        """Spaces that may move, in processing order."""
        return (space for space in self.spaces.values() if space.pinned is None)

    def producers(self, space: str) -> tuple[str, ...]:
        """Tensors whose rows make the units of `space`, in checkpoint order."""
        return self._with_role(space, Role.PRODUCE)

    def consumers(self, space: str) -> tuple[str, ...]:
        """Tensors whose columns read the units of `space`, in checkpoint order."""
        return self._with_role(space, Role.CONSUME)

    def _with_role(self, space: str, role: Role) -> tuple[str, ...]:
        names: dict[str, None] = {}  # a set that keeps the order
        for name, dim in self.members[space]:
            if role in self.tensors[name].axes[dim].roles:
                names[name] = None
        return tuple(names)


__all__ = [
    "Axis",
    "Cat",
    "Derived",
    "Fixed",
    "GraphTensor",
    "LayerGraph",
    "Op",
    "OpKind",
    "Prod",
    "Role",
    "Space",
    "TensorAxis",
    "Unit",
]
