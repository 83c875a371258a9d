"""Labels every axis of every value of an exported program, one operation after the other.

What comes out is a `Propagation`: the axes of all tensors of the state dict as forms over shared
atoms, and the rules' log. Turning it into a `LayerGraph` is `emit`'s work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from ..model import Role
from . import atoms
from .call import Call, Label, Labels, Log, Value
from .nodes import module_path, named_arguments, operator_name, output_shapes, where
from .rules import RULES

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class Step:
    """One operation as it was labelled, for replay."""

    node: Node
    inputs: tuple[tuple[Node, Value], ...]
    outputs: tuple[Labels, ...]


@dataclass
class Propagation:
    """The labels of a whole program.

    Attributes:
        state: Labels by tensor name (tied tensors under their first name), checkpoint order.
        shapes: Shape by tensor name.
        aliases: Tied names by first name.
        outputs: Labels of the outputs that are checked.
        log: What the rules have said.
        values: By node.
        steps: For replay.
        warnings: Operators without a rule.
    """

    state: dict[str, tuple[Label, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    outputs: list[Labels] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    values: dict[Node, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def propagate(
    program: ExportedProgram, *, checked: Sequence[int] | None = None, pin_ends: bool = True,
    pin_outputs: bool = True,
) -> Propagation:  # fmt: skip
    """Label `program`.

    Args:
        program: Decomposed with an empty table (functional ATen, composites kept).
        checked: Positions of the user outputs that matter; None for all.
        pin_ends: Pin network inputs. Rule tests leave them free.
        pin_outputs: Pin the checked outputs.
    """
    result = Propagation()
    _read_state(program, result)
    _label_inputs(program, result, pin_ends=pin_ends)
    label_operations(program.graph, result)
    _finish_outputs(program, result, checked, pin=pin_outputs and pin_ends)
    return result


def label_operations(graph: Graph, result: Propagation) -> None:
    """Label every operation of `graph`; `result.values` has the labels of its inputs."""
    for step, node in enumerate(graph.nodes):
        if node.op == "call_function":
            result.values[node] = _visit(node, step, result)
        elif node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
            labels = tuple(Label(atoms.Atom(n, "constant")) for n in output_shapes(node)[0])
            result.values[node] = Value(labels)


def _read_state(program: ExportedProgram, result: Propagation) -> None:
    first: dict[Any, str] = {}
    for name in checkpoint_order(program.state_dict):
        tensor = program.state_dict[name]
        known = first.setdefault(_identity(tensor), name)
        if known != name:
            result.aliases[known].append(name)
            continue
        result.aliases[name] = []
        result.shapes[name] = tuple(tensor.shape)
        result.state[name] = tuple(
            Label(atoms.Atom(n), frozenset({(name, axis)})) for axis, n in enumerate(tensor.shape)
        )


def checkpoint_order(names: Iterable[str]) -> list[str]:
    """Names as `module.state_dict()` lists them; a program has parameters before buffers."""
    own: list[str] = []
    children: dict[str, list[str]] = {}
    for name in names:
        child, dot, rest = name.partition(".")
        if dot:
            children.setdefault(child, []).append(rest)
        else:
            own.append(name)
    below = ((child, checkpoint_order(rest)) for child, rest in children.items())
    return own + [f"{child}.{rest}" for child, many in below for rest in many]


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tied tensors, even when the tie is a second object over the same memory."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _label_inputs(program: ExportedProgram, result: Propagation, *, pin_ends: bool) -> None:
    from torch.export.graph_signature import InputKind

    names = {alias: name for name, many in result.aliases.items() for alias in (name, *many)}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        spec, shape = specs[node.name], output_shapes(node)
        if not shape:
            result.values[node] = None
        elif spec.target is not None and spec.target in names:
            name = names[spec.target]
            result.values[node] = Value(result.state[name], sources=(name,), plain=True)
        elif spec.kind is InputKind.USER_INPUT:
            reason = "input" if pin_ends else None
            labels = tuple(Label(atoms.Atom(n, reason)) for n in shape[0])
            result.values[node] = Value(labels, data=True)
        else:
            labels = tuple(Label(atoms.Atom(n, "constant")) for n in shape[0])
            result.values[node] = Value(labels)


def _finish_outputs(
    program: ExportedProgram, result: Propagation, checked: Sequence[int] | None, *, pin: bool
) -> None:
    from torch.export.graph_signature import OutputKind

    nodes = {node.name: node for node in program.graph.nodes}
    by_name = {alias: name for name, many in result.aliases.items() for alias in (name, *many)}
    position = 0
    for spec in program.graph_signature.output_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        value = result.values.get(node) if node is not None else None
        if spec.kind is OutputKind.BUFFER_MUTATION and isinstance(value, Value):
            _mutate(result, by_name.get(spec.target or ""), value)
        if spec.kind is not OutputKind.USER_OUTPUT:
            continue
        if isinstance(value, Value) and (checked is None or position in checked):
            if pin:
                for label in value.labels:
                    atoms.pin(label.form, "output")
            result.outputs.append(value.labels)
        position += 1


def _mutate(result: Propagation, name: str | None, value: Value) -> None:
    """A buffer is written back: old and new are one."""
    if name is not None:
        for old, new in zip(result.state[name], value.labels, strict=True):
            atoms.unify(old.form, new.form)


def _visit(node: Node, step: int, result: Propagation) -> Any:
    if node.target is getitem:
        source, index = node.args
        assert isinstance(source, Node)
        made = result.values.get(source)
        return made[index] if isinstance(made, (list, tuple)) and isinstance(index, int) else made
    shapes = output_shapes(node)
    inputs = {n: result.values.get(n) for n in node.all_input_nodes}
    if not shapes:  # an assertion, or a number known when traced
        return None
    # a uniform tensor belongs to nobody: every use of it gets axes of its own
    inputs = {n: _renewed(value) for n, value in inputs.items()}
    call = Call(
        operator_name(node),
        named_arguments(node, inputs),
        shapes,
        log=result.log,
        step=step,
        module=module_path(node),
    )
    entry = RULES.get(call.name)
    seen = len(result.log.roles)
    problem: str | None = f"no rule: {call.name}"
    outputs: list[Labels] | None = None
    if entry is not None:
        try:
            outputs = _checked(entry.apply(call), shapes)
        except (ValueError, KeyError, IndexError) as error:
            problem = f"{call.name}: {error}"
    if outputs is None:
        assert problem is not None
        outputs = _pin_everything(inputs, shapes, problem)
        result.warnings.append(f"{problem}; what it reads and writes stays in place{where(node)}")
    values = _values(call, entry, outputs, inputs, result, roles_seen=seen)
    result.steps.append(
        Step(
            node,
            tuple((n, v) for n, v in inputs.items() if isinstance(v, Value)),
            tuple(outputs),
        )
    )
    for value in values:
        result.log.contexts.append(value.labels)
        if value.data:
            result.log.live.append(value.labels)
    return values if isinstance(node.meta["val"], (list, tuple)) else values[0]


def _values(
    call: Call,
    entry: Any,
    outputs: Sequence[Labels],
    inputs: Mapping[Node, Any],
    result: Propagation,
    *,
    roles_seen: int,
) -> list[Value]:
    operands = [v for value in inputs.values() for v in _flat(value)]
    data = any(value.data for value in operands)
    if data:
        _default_roles(call, operands, result, roles_seen)
    sources = () if data else tuple(dict.fromkeys(s for v in operands for s in v.sources))
    moves = entry is not None and entry.moves
    made_by = call.wrote
    writers = frozenset({call.wrote}) if call.wrote is not None else frozenset()
    if call.wrote is None:
        writers = writers.union(*(value.writers for value in operands))
        made_by = operands[0].made_by if moves and operands else None
    return [
        Value(
            tuple(Label(x.form) for x in labels) if data else tuple(labels),
            data=data,
            uniform=_is_uniform(call, entry, operands),
            sources=sources,
            plain=moves and len(operands) == 1 and operands[0].plain,
            made_by=made_by,
            writers=writers,
        )
        for labels in outputs
    ]


def _is_uniform(call: Call, entry: Any, operands: Sequence[Value]) -> bool:
    if entry is None:
        return False
    if entry.creates:
        return True
    return bool(entry.uniform and operands and all(value.uniform for value in operands))


def _default_roles(
    call: Call, operands: Sequence[Value], result: Propagation, roles_seen: int
) -> None:
    """A weight that meets data in some other way than the rule speaks of is a vector."""
    spoken = {event.origin for event in result.log.roles[roles_seen:]}
    for value in operands:
        if value.data:
            continue
        for label in value.labels:
            if not label.origins & spoken:
                call.role(label, Role.VECTOR)


def _pin_everything(
    inputs: Mapping[Node, Any], shapes: Sequence[tuple[int, ...]], reason: str
) -> list[Labels]:
    for value in inputs.values():
        for one in _flat(value):
            for label in one.labels:
                atoms.pin(label.form, reason)
    return [[Label(atoms.Atom(n, reason)) for n in shape] for shape in shapes]


def _checked(outcome: Any, shapes: Sequence[tuple[int, ...]]) -> list[Labels]:
    many = list(outcome)
    outputs: list[Labels] = [many] if not many or isinstance(many[0], Label) else many
    found = [tuple(label.size for label in labels) for labels in outputs]
    if found != list(shapes):
        raise ValueError(f"the rule gives {found}, the operator {list(shapes)}")
    return outputs


def _renewed(value: Any) -> Any:
    if isinstance(value, Value) and value.uniform:
        labels = tuple(Label(atoms.Atom(label.size)) for label in value.labels)
        return Value(labels, value.data, uniform=True, sources=value.sources)
    if isinstance(value, (list, tuple)):
        return [_renewed(item) for item in value]
    return value


def _flat(value: Any) -> Iterator[Value]:
    if isinstance(value, Value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
