"""BatchNorms of a program: those whose statistics, gain and shift are the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import Node

from ..model import Op, OpKind
from ..trace.nodes import named_arguments, operator_name

if TYPE_CHECKING:
    from ..trace.program import Program

_PARTS = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class RunningStatistics:
    """What a BatchNorm keeps of its training data.

    Attributes:
        input: The value that it reads, units on axis 1.
        mean: Name in the checkpoint of every unit's mean.
        variance: Of its variance.
        eps: What is added to the variance.
    """

    input: str
    mean: str
    variance: str
    eps: float


@dataclass(frozen=True)
class Norm:
    """A BatchNorm in eval mode: its value, what it reads, tensors by part, and epsilon."""

    node: str
    input: str
    tensors: Mapping[str, str]
    eps: float


def keeps_statistics(op: Op) -> bool:
    """Whether an operation of a layer graph is a BatchNorm with running statistics."""
    return op.kind is OpKind.NORM and op.detail == "batch" and "running_var" in op.tensors


def batch_norm(program: Program, node: Node) -> Norm | None:
    """The BatchNorm that an operation is; None for anything else."""
    read = _read(program, node)
    if read is None or set(read[1]) != set(_PARTS):
        return None  # without gain or statistics of its own there is nothing to solve for
    values, tensors, eps = read
    return Norm(node.name, values, tensors, eps)


def running_statistics(program: Program) -> tuple[RunningStatistics, ...]:
    """What all BatchNorms with running statistics keep, in execution order; gains or none."""
    kept = []
    for node in program.nodes:
        read = _read(program, node)
        if read is not None and {"running_mean", "running_var"} <= set(read[1]):
            values, tensors, eps = read
            kept.append(
                RunningStatistics(values, tensors["running_mean"], tensors["running_var"], eps)
            )
    return tuple(kept)


def _read(program: Program, node: Node) -> tuple[str, dict[str, str], float] | None:
    """What a BatchNorm in eval mode reads: values, the checkpoint's tensors by part, epsilon."""
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
        if stored is not None:
            tensors[part] = stored
    return values.name, tensors, float(arguments["eps"])


def norm_after(program: Program, node: Node) -> Norm | None:
    """The BatchNorm that alone reads a value."""
    after = only_reader(node)
    norm = None if after is None else batch_norm(program, after)
    return norm if norm is not None and norm.input == node.name else None


def only_reader(node: Node) -> Node | None:
    """The operation that alone reads a value."""
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and readers[0].op == "call_function" else None
