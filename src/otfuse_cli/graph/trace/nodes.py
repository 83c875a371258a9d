"""Reading the nodes of an exported graph: operator, arguments, shapes, where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ...errors import IncompatibleModels


def output_shapes(node: Node) -> list[tuple[int, ...]]:
    """Shapes of the tensors that an operation returned when it was traced.

    Raises:
        IncompatibleModels: A size depends on the data.
    """
    tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    try:
        return [tuple(int(n) for n in t.shape) for t in tensors]
    except Exception as error:  # torch's own type for this has moved between releases
        raise IncompatibleModels(
            f"a shape that {operator_name(node)} makes depends on the data",
            where=where(node).strip(" ()") or None,
            why="what is chosen by a condition (x[mask], nonzero) has no fixed size to follow",
            fix="use torch.where there; or describe the network in a spec (--arch spec.yaml)",
        ) from error


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
    named: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.has_default_value():
            named[argument.name] = argument.default_value
    for argument, value in zip(schema.arguments, node.args, strict=False):
        named[argument.name] = filled(value)
    named.update({key: filled(value) for key, value in node.kwargs.items()})
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
    paths = module_paths(node)
    return paths[-1] if paths else ""


def module_paths(node: Node) -> list[str]:
    """Paths of the modules that were running, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()]


def where(node: Node) -> str:
    """The user's line that made this operation, ready to follow a sentence."""
    trace = node.meta.get("stack_trace") or ""
    innermost = ""
    for line in trace.splitlines():
        frame = line.strip()
        # Code that torch has generated has no file: `File "<eval_with_key>", line 3`.
        if frame.startswith("File ") and not frame.startswith('File "<'):
            innermost = frame
    if not innermost:
        return ""
    file, _, rest = innermost.removeprefix("File ").partition(", line ")
    return f" ({file.strip(chr(34))}:{rest.partition(',')[0]})"
