"""One operation of a traced network, as the rules see it: labelled values in, labels out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..model import OpKind, Role
from . import atoms
from .atoms import Atom, Form

Origin = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Label:
    """What an axis of a value is made of, and which tensor axes it comes from.

    Attributes:
        form: Its atoms.
        origins: Axes of state tensors it is, as long as no network input has been mixed in.
    """

    form: Form
    origins: frozenset[Origin] = frozenset()

    @property
    def size(self) -> int:
        """Number of positions."""
        return atoms.size_of(self.form)


Labels = Sequence[Label]


def pinned_labels(shape: Sequence[int], reason: str) -> tuple[Label, ...]:
    """New axes that stay in place, one for each size of `shape`."""
    return tuple(Label(Atom(size, reason)) for size in shape)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the traced network.

    Attributes:
        labels: One per axis.
        data: It depends on a network input.
        uniform: Every element is equal (zeros, ones): its axes belong to nobody.
        sources: State tensors it is computed from, when it doesn't depend on an input.
        plain: It is its one source, at most viewed or transposed.
        made_by: Number of the recorded operation that wrote it, at most moved since.
        writers: Numbers of the recorded operations whose results it is put together from.
    """

    labels: tuple[Label, ...]
    data: bool = False
    uniform: bool = False
    sources: tuple[str, ...] = ()
    plain: bool = False
    made_by: int | None = None
    writers: frozenset[int] = frozenset()

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of every axis."""
        return tuple(label.size for label in self.labels)

    def pick(self, axes: Iterable[int]) -> list[Label]:
        """Labels of some axes, in the order given; negative numbers count from the end."""
        return [self.labels[axis] for axis in axes]

    def without(self, *axes: int) -> list[Label]:
        """Labels of every other axis, in order."""
        return [label for d, label in enumerate(self.labels) if d not in axes]


def forms_of(labels: Labels) -> tuple[Form, ...]:
    """What axes are made of, in order."""
    return tuple(label.form for label in labels)


def longer(labels: Labels) -> list[Label]:
    """Axes of more than one position; a single one broadcasts, and is tied to nothing."""
    return [label for label in labels if label.size != 1]


def any_data(operands: Sequence[Value]) -> bool:
    """Whether something depends on a network input."""
    return any(value.data for value in operands)


def data_and_weights(operands: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Operands that depend on a network input, and those that don't, each in order."""
    data: list[Value] = []
    weights: list[Value] = []
    for value in operands:
        (data if value.data else weights).append(value)
    return data, weights


@dataclass
class OpRecord:
    """An operation before its axes are final; `reads` and `writes` are candidate axes each."""

    kind: OpKind
    name: str
    tensors: dict[str, str]
    reads: tuple[Labels, ...]
    writes: Labels
    detail: str
    inputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RoleEvent:
    """At step `step` of the execution, a tensor axis was seen in a role."""

    origin: Origin
    role: Role
    step: int


@dataclass
class Log:
    """What the rules have found out, besides what the atoms themselves remember.

    Attributes:
        roles: Of tensor axes.
        ops: In execution order.
        contexts: Axes of every value and index space of every contraction.
        live: Those of them that depend on a network input, or that contract.
        weight_products: Pairs of tensor axes multiplied with each other.
        used: Tensors that meet data, alone or in what is computed from them.
    """

    roles: list[RoleEvent] = field(default_factory=list)
    ops: list[OpRecord] = field(default_factory=list)
    contexts: list[Labels] = field(default_factory=list)
    live: list[Labels] = field(default_factory=list)
    weight_products: list[tuple[frozenset[Origin], frozenset[Origin], int]] = field(
        default_factory=list
    )
    used: set[str] = field(default_factory=set)


class Rule(Protocol):
    """Labels of the outputs of an operation, unifying what must move together on the way.

    One sequence of labels, or one per output where there are several.
    """

    def __call__(self, call: Call) -> Any:
        """Apply the rule."""


class Call:
    """An operation with named arguments, and everything a rule may say about it."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        shapes: Sequence[tuple[int, ...]],
        *,
        log: Log,
        step: int = 0,
        module: str = "",
    ) -> None:
        self.name = name
        self.arguments = dict(arguments)
        self.shapes = tuple(shapes)
        self.step = step
        self.module = module
        self._log = log
        self.wrote: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the (first) output."""
        return self.shapes[0]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that not every overload has."""
        return self.arguments.get(name, default)

    def value(self, *names: str) -> Value:
        """The tensor argument called one of `names`."""
        for name in names:
            argument = self.arguments.get(name)
            if isinstance(argument, Value):
                return argument
        raise ValueError(f"{self.name} has no tensor argument {names}")

    def optional(self, name: str) -> Value | None:
        """A tensor argument that may be absent."""
        argument = self.arguments.get(name)
        return argument if isinstance(argument, Value) else None

    def operands(self) -> list[Value]:
        """Tensor arguments, those inside lists included."""
        tensors: list[Value] = []
        for argument in self.arguments.values():
            tensors.extend(_values(argument))
        return tensors

    def flag(self, name: str) -> bool:
        """A boolean argument."""
        return bool(self.arguments.get(name))

    def fresh(self, size: int) -> Label:
        """A new free axis."""
        return Label(Atom(size))

    def fresh_axes(self, shape: Sequence[int]) -> list[Label]:
        """New free axes, one for each size of `shape`."""
        return [self.fresh(size) for size in shape]

    def pinned(self, size: int, reason: str) -> Label:
        """A new axis that stays in place."""
        return Label(Atom(size, reason))

    def pinned_axes(self, shape: Sequence[int], reason: str) -> list[Label]:
        """New axes that stay in place, one for each size of `shape`."""
        return list(pinned_labels(shape, reason))

    def unify(self, first: Label, *others: Label) -> Label:
        """Make axes one."""
        origins = first.origins
        for other in others:
            atoms.unify(first.form, other.form)
            origins |= other.origins
        return Label(first.form, origins)

    def pin(self, labels: Label | Labels, reason: str) -> None:
        """Keep axes in place."""
        for label in (labels,) if isinstance(labels, Label) else labels:
            atoms.pin(label.form, reason)

    def restrict(self, labels: Label | Labels, *kinds: str) -> None:
        """Allow only permutations and the kinds named."""
        for label in (labels,) if isinstance(labels, Label) else labels:
            atoms.allow_only(label.form, frozenset({"perm", *kinds}))

    def keep(self, label: Label) -> None:
        """A contraction over a single position: it is a unit, of a space that has only one."""
        top = atoms.head(label.form)
        if isinstance(top, Atom) and top.size == 1:
            top.kept = True

    def role(self, labels: Label | Labels, role: Role) -> None:
        """Say how the tensor axes behind these labels are used."""
        for label in (labels,) if isinstance(labels, Label) else labels:
            for origin in sorted(label.origins):
                self._log.roles.append(RoleEvent(origin, role, self.step))

    def weight_product(self, left: Label, right: Label) -> None:
        """Two tensors were multiplied over an axis: who produces it is known at the end."""
        self._log.weight_products.append((left.origins, right.origins, self.step))

    def joint(self, labels: Labels) -> None:
        """The index space of a contraction: what a family's index must be part of."""
        self._log.contexts.append(tuple(labels))
        self._log.live.append(tuple(labels))

    def op(
        self,
        kind: OpKind,
        *,
        reads: Sequence[Labels],
        writes: Labels,
        tensors: Mapping[str, Value | None] | None = None,
        detail: str = "",
    ) -> None:
        """Record an operation; parts that are no plain state tensors are listed by own name."""
        data = [value for value in self.operands() if value.data]
        if not data:
            return
        inputs = tuple(tuple(sorted(value.writers)) for value in data[: len(reads)])
        names: dict[str, str] = {}
        for part, value in (tensors or {}).items():
            if value is None or value.data:
                continue
            if value.plain:
                names[part] = value.sources[0]
                continue
            # A weight that is computed (g v / |v|) is none of the tensors that it is made of.
            for source in value.sources:
                names[f"{part}.{source.rpartition('.')[2]}"] = source
        self.wrote = len(self._log.ops)
        self._log.ops.append(
            OpRecord(
                kind, self._op_name(names), names, tuple(reads), writes, detail or self.name, inputs
            )
        )

    def attach_bias(self, value: Value, bias: Value) -> bool:
        """Give the bias to the linear operation that made `value`, when it has none yet."""
        if value.made_by is None or not bias.plain:
            return False
        op = self._log.ops[value.made_by]
        if op.kind not in (OpKind.LINEAR, OpKind.CONV) or "bias" in op.tensors:
            return False
        op.tensors["bias"] = bias.sources[0]
        self.wrote = value.made_by
        return True

    def _op_name(self, names: Mapping[str, str]) -> str:
        owner = next((name.rpartition(".")[0] for name in names.values()), None)
        if owner is not None and owner.startswith(self.module):
            return owner or self.name
        if owner is not None:  # a tied tensor goes by the name of its first owner
            return self.module
        return f"{self.module}:{self.name}" if self.module else self.name


def _values(argument: Any) -> list[Value]:
    if isinstance(argument, Value):
        return [argument]
    tensors: list[Value] = []
    if isinstance(argument, (list, tuple)):
        for item in argument:
            tensors.extend(_values(item))
    return tensors
