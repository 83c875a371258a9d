"""Operations that write in place, such as an activation with `inplace=True`, as ones that don't.

torch does this for any program by running it once more (`ExportedProgram.run_decompositions`),
which takes longer than the export itself. Nearly all networks write in place in one simple way,
for which a change of the graph is enough: onto a value that an operation has just made and that no
other value shares memory with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload
from torch.fx import Node

from .nodes import operator_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# What these return is new memory, whatever they are given: no view of an argument. (A reshape, a
# dropout that drops nothing and a cast to the same dtype may return the argument itself.)
_MAKE_NEW = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("linear", "matmul", "bmm", "batch_norm", "layer_norm", "group_norm"),
        *("add", "sub", "mul", "div", "cat", "clamp", "max_pool2d", "avg_pool2d"),
        *("relu", "relu6", "silu", "gelu", "hardswish", "hardsigmoid", "hardtanh"),
        *("sigmoid", "tanh", "leaky_relu", "elu", "mish"),
    }
)


def write_apart(program: ExportedProgram) -> None:
    """Rewrite the simple in-place operations of a program, which computes the same afterwards.

    Others are left as they are: those that write to a view, to what a view was taken of, to an
    input, a parameter or a buffer, or to a value that is an output under its own name.
    """
    order = {node: at for at, node in enumerate(program.graph.nodes)}
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            plain = _without_writing(node.target)
            if plain is None:
                continue
            if _drops_nothing(node):
                node.target = plain
            elif _is_alone(node, order):
                written = node.args[0]
                for user in list(written.users):
                    if order[user] > order[node]:
                        user.replace_input_with(written, node)
                node.target = plain


def _without_writing(target: OpOverload) -> OpOverload | None:
    """`relu` for `relu_`: the same overload of the same arguments; None where there is none."""
    library, _, name = target._schema.name.partition("::")
    if library != "aten" or not name.endswith("_") or not target._schema.is_mutable:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    plain: OpOverload | None = getattr(packet, target._overloadname, None)
    if plain is None or plain._schema.is_mutable:
        return None
    # The first, which is written to, is called `self` or `input`.
    ours, theirs = (op._schema.arguments[1:] for op in (target, plain))
    same = [(a.name, a.kwarg_only) for a in ours] == [(a.name, a.kwarg_only) for a in theirs]
    return plain if same else None


def _drops_nothing(node: Node) -> bool:
    """Whether it is a dropout of a network that isn't being trained: it writes what is there."""
    return operator_name(node) == "dropout_" and node.args[2:3] == (False,)


def _is_alone(node: Node, order: dict[Node, int]) -> bool:
    """Whether nothing but later readers of what is written sees the write."""
    written = node.args[0] if node.args else None
    if not isinstance(written, Node) or not _makes_new(written):
        return False
    if any(user.op == "output" for user in written.users):
        return False  # outputs are told by their names
    values = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    # In place, the result has the dtype and the shape of what is written, whatever is added.
    if len(tensors) < len(values) or len({value.dtype for value in tensors}) > 1:
        return False
    before = (user for user in written.users if order[user] < order[node])
    return all(_makes_new(user) for user in before)


def _makes_new(node: Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and operator_name(node) in _MAKE_NEW
    )
