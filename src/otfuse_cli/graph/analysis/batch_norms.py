"""BatchNorms of a program: those whose statistics, gain and shift are the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from ..trace.nodes import named_arguments, operator_name
from ..trace.program import Program

_PARTS = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class Norm:
    """A BatchNorm in eval mode: its value, what it reads, tensors by part, and epsilon."""

    node: str
    input: str
    tensors: Mapping[str, str]
    eps: float


def batch_norm(program: Program, node: Node) -> Norm | None:
    """The BatchNorm that an operation is; None for anything else."""
    if node.op != "call_function" or "batch_norm" not in operator_name(node):
        return None
    arguments = named_arguments(node, {n: n for n in node.all_input_nodes})
    values = arguments.get("input")
    if arguments.get("training") or not isinstance(values, Node) or values.name not in program.data:
        return None
    tensors = {}
    for part in _PARTS:
        value = arguments.get(part)
        stored = program.tensors.get(value.name) if isinstance(value, Node) else None
        if stored is None:
            return None  # without gain or statistics of its own there is nothing to solve for
        tensors[part] = stored
    return Norm(node.name, values.name, tensors, float(arguments["eps"]))


def norm_after(program: Program, node: Node) -> Norm | None:
    """The BatchNorm that alone reads a value."""
    after = only_reader(node)
    norm = None if after is None else batch_norm(program, after)
    return norm if norm is not None and norm.input == node.name else None


def only_reader(node: Node) -> Node | None:
    """The operation that alone reads a value."""
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and readers[0].op == "call_function" else None
