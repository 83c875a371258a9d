"""Reading the nodes of an exported graph: operator, arguments, shapes, where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node


def output_shapes(val: Any) -> list[tuple[int, ...]]:
    """Shapes of the tensors that an operation returned when it was traced."""
    if isinstance(val, torch.Tensor):
        return [tuple(int(n) for n in val.shape)]
    if isinstance(val, (list, tuple)):
        return [shape for item in val for shape in output_shapes(item)]
    return []


def named_arguments(node: Node, inputs: Mapping[Node, Any]) -> dict[str, Any]:
    """Arguments by the operator's own names, defaults included; nodes replaced by `inputs`."""

    def filled(argument: Any) -> Any:
        if isinstance(argument, Node):
            return inputs.get(argument)
        if isinstance(argument, (list, tuple)):
            return [filled(item) for item in argument]
        return argument

    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): filled(argument) for i, argument in enumerate(node.args)}
    named = {
        argument.name: argument.default_value
        for argument in schema.arguments
        if argument.has_default_value()
    }
    for argument, given in zip(schema.arguments, node.args, strict=False):
        named[argument.name] = filled(given)
    named.update({key: filled(given) for key, given in node.kwargs.items()})
    return named


def operator_name(node: Node) -> str:
    """`linear` for aten.linear.default; other libraries keep their namespace."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name.removeprefix("aten::")
    return str(getattr(target, "__name__", target))


def module_path(node: Node) -> str:
    """Path of the innermost module that was running."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return paths[-1] if paths else ""


def where(node: Node) -> str:
    """The user's line that made this operation, ready to follow a sentence."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    file, _, rest = lines[-1].removeprefix("File ").partition(", line ")
    return f" ({file.strip(chr(34))}:{rest.partition(',')[0]})"
