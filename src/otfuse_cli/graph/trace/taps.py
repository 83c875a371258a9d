"""Taps: the module outputs at which a forward hook sees the units of a space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.fx import Node

from .call import Labels, Value
from .propagate import Propagation

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# what each call of a module returned: the shape of its one tensor, or None for anything else
ModuleOutputs = Mapping[str, Sequence[tuple[int, ...] | None]]


def find_taps(
    program: ExportedProgram, found: Propagation, outputs: ModuleOutputs
) -> Iterator[tuple[str, Labels]]:
    """Labels of module outputs, by path, in execution order.

    Only modules called once that return one tensor: a hook there sees what the graph says.
    """
    inside = _paths(program)
    leaving: dict[str, list[Node]] = {}
    for node, paths in inside.items():
        for path in paths:
            if any(path not in inside.get(user, ()) for user in node.users):
                leaving.setdefault(path, []).append(node)
    for path, nodes in leaving.items():
        calls = outputs.get(path, ())
        value = found.values.get(nodes[0])
        if len(nodes) != 1 or len(calls) != 1 or not isinstance(value, Value):
            continue
        if value.data and calls[0] == value.shape:
            yield path, value.labels


def _paths(program: ExportedProgram) -> dict[Node, frozenset[str]]:
    return {
        node: frozenset(
            str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path
        )
        for node in program.graph.nodes
        if node.op == "call_function"
    }


@contextmanager
def watch_outputs(module: nn.Module) -> Iterator[ModuleOutputs]:
    """Which modules return a single tensor, seen by hooks while the module is traced."""
    seen: dict[str, list[tuple[int, ...] | None]] = {}
    with ExitStack() as hooks:
        for path, child in module.named_modules():

            def note(_: nn.Module, __: object, output: object, path: str = path) -> None:
                shape = tuple(output.shape) if isinstance(output, torch.Tensor) else None
                seen.setdefault(path, []).append(shape)

            handle = child.register_forward_hook(note)
            hooks.callback(handle.remove)
        yield seen
