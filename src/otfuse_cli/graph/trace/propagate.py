"""Labels a whole exported program: its state, its inputs, its operations, its outputs.

Turning the `Propagation` into a `LayerGraph` is `emit`'s work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import atoms
from .call import Label, Value, pinned_labels
from .label_operations import Propagation, label_operations
from .nodes import output_shapes

if TYPE_CHECKING:
    from torch.export import ExportedProgram


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


def _read_state(program: ExportedProgram, result: Propagation) -> None:
    first: dict[Any, str] = {}
    for name in checkpoint_order(program.state_dict):
        tensor = program.state_dict[name]
        first_name = first.setdefault(_identity(tensor), name)
        if first_name != name:
            result.aliases[first_name].append(name)
            continue
        result.aliases[name] = []
        result.shapes[name] = tuple(tensor.shape)
        labels: list[Label] = []
        for axis, size in enumerate(tensor.shape):
            labels.append(Label(atoms.Atom(size), frozenset({(name, axis)})))
        result.state[name] = tuple(labels)


def checkpoint_order(names: Iterable[str]) -> list[str]:
    """Names as `module.state_dict()` lists them; a program has parameters before buffers."""
    direct: list[str] = []
    children: dict[str, list[str]] = {}
    for name in names:
        child, dot, rest = name.partition(".")
        if dot:
            children.setdefault(child, []).append(rest)
        else:
            direct.append(name)
    # A module lists what it holds itself first, then its children in the order they were made.
    for child, below in children.items():
        direct.extend(f"{child}.{name}" for name in checkpoint_order(below))
    return direct


def first_names(aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The first name of every tensor, by each of its names."""
    first: dict[str, str] = {}
    for name, others in aliases.items():
        for alias in (name, *others):
            first[alias] = name
    return first


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tied tensors, even when the tie is a second object over the same memory."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _label_inputs(program: ExportedProgram, result: Propagation, *, pin_ends: bool) -> None:
    from torch.export.graph_signature import InputKind

    names = first_names(result.aliases)
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
            # A buffer that no checkpoint holds, or a value written into the code.
            result.values[node] = Value(pinned_labels(shape[0], "constant"))


def _finish_outputs(
    program: ExportedProgram, result: Propagation, checked: Sequence[int] | None, *, pin: bool
) -> None:
    from torch.export.graph_signature import OutputKind

    nodes = {node.name: node for node in program.graph.nodes}
    by_name = first_names(result.aliases)
    position = 0  # among the outputs of the user's forward: mutated buffers come out before them
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
