"""Labels what every operation of an exported program computes, one after the other.

What comes out is a `Propagation`: the axes of all tensors of the state dict as forms over shared
atoms, and the rules' log. An operation without a rule, or one whose rule gives up, pins all it
touches, which is always sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from ..model import Role
from . import atoms
from .call import Call, Label, Labels, Log, Value, any_data, pinned_labels
from .nodes import module_path, named_arguments, operator_name, output_shapes, where
from .rules import RULES


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


def label_operations(graph: Graph, result: Propagation) -> None:
    """Label every operation of `graph`; `result.values` has the labels of its inputs."""
    for step, node in enumerate(graph.nodes):
        if node.op == "call_function":
            result.values[node] = _visit(node, step, result)
        elif node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
            result.values[node] = Value(pinned_labels(output_shapes(node)[0], "constant"))


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
    # A uniform tensor belongs to nobody: every use of it gets axes of its own.
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
    tensors = tuple((n, v) for n, v in inputs.items() if isinstance(v, Value))
    result.steps.append(Step(node, tensors, tuple(outputs)))
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
    operands = list(_flat(list(inputs.values())))
    data = any_data(operands)
    if data:
        _default_roles(call, operands, result, roles_seen)
        for value in operands:
            result.log.used.update(value.sources)
    sources: dict[str, None] = {}  # a set that keeps the order
    if not data:
        for value in operands:
            sources.update(dict.fromkeys(value.sources))
    moves = entry is not None and entry.moves
    made_by = call.wrote
    writers = frozenset({call.wrote}) if call.wrote is not None else frozenset()
    if call.wrote is None:
        # Nothing was recorded: what comes out is still what the operands' writers made.
        writers = writers.union(*(value.writers for value in operands))
        made_by = operands[0].made_by if moves and operands else None
    values: list[Value] = []
    for labels in outputs:
        # Once an input is mixed in, an axis is no longer that of a tensor: its origins go.
        kept = tuple(Label(label.form) for label in labels) if data else tuple(labels)
        values.append(
            Value(
                kept,
                data=data,
                uniform=_is_uniform(call, entry, operands),
                sources=tuple(sources),
                plain=moves and len(operands) == 1 and operands[0].plain,
                made_by=made_by,
                writers=writers,
            )
        )
    return values


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
    for value in _flat(list(inputs.values())):
        for label in value.labels:
            atoms.pin(label.form, reason)
    return [pinned_labels(shape, reason) for shape in shapes]


def _checked(outcome: Any, shapes: Sequence[tuple[int, ...]]) -> list[Labels]:
    # A rule returns the labels of one output, or a list of them for several.
    many = list(outcome)
    outputs: list[Labels] = [many] if not many or isinstance(many[0], Label) else many
    made = [tuple(label.size for label in labels) for labels in outputs]
    if made != list(shapes):
        raise ValueError(f"the rule gives {made}, the operator {list(shapes)}")
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
