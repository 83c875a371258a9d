"""An exported forward pass with the meaning of every value's axes: what is run, tapped and refit.

Nodes and labels; no numbers are computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from ..axes import Axis, Unit, rename_units
from ..model import LayerGraph
from .emit import label_values
from .from_module import functional
from .network_outputs import checked_outputs
from .propagate import first_names, propagate
from .rebuilt import Operation, nodes_of, plain_operations

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Axes = tuple[Axis | None, ...]


@dataclass(frozen=True)
class Program:
    """A forward pass, operation by operation.

    Attributes:
        nodes: Operations in execution order.
        tensors: Name in the checkpoint, by placeholder; tied tensors have one name.
        constants: Values of placeholders that the checkpoint does not hold.
        inputs: Placeholders of network inputs, in the order of the flattened arguments; None for
            an argument that is not a tensor.
        outputs: Values that the network returns (the logits, where there are any).
        axes: Expressions of the axes of each value, in the names of the layer graph; None for
            an axis that is not understood. Values of another kind are absent.
        data: Values that depend on a network input.
        batch: Samples that a pass takes: what it was exported with.
    """

    nodes: tuple[Node, ...]
    tensors: Mapping[str, str]
    constants: Mapping[str, Any]
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    axes: Mapping[str, Axes]
    data: frozenset[str]
    batch: int

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process its operations are made again; constants go along."""
        rest = {item.name: getattr(self, item.name) for item in fields(self)[1:]}
        return _made_again, (plain_operations(self.nodes), rest)

    @cached_property
    def position(self) -> dict[str, int]:
        """Place of every value in the order of execution."""
        return {node.name: at for at, node in enumerate(self.nodes)}

    def node(self, name: str) -> Node:
        """The operation that gives a value."""
        return self.nodes[self.position[name]]

    @cached_property
    def last_reader(self) -> dict[str, Node]:
        """The last operation that reads a value."""
        last: dict[str, Node] = {}
        for node in self.nodes:  # in execution order: the last one stays
            for used in node.all_input_nodes:
                last[used.name] = node
        return last


def _made_again(plain: Sequence[Operation], rest: Mapping[str, Any]) -> Program:
    return Program(nodes=nodes_of(plain), **rest)


def labelled_program(
    exported: ExportedProgram,
    *,
    batch: int,
    graph: LayerGraph | None = None,
    name_map: Mapping[str, str] | None = None,
) -> Program:
    """Label every value of an exported program; runs none of its code.

    Args:
        exported: On the device on which it is to run.
        batch: Samples in its example inputs.
        graph: A layer graph of the same network; its names of spaces are taken over.
        name_map: Names of the program's tensors in the checkpoint, where they differ.
    """
    from torch.export.graph_signature import InputKind

    rename = dict(name_map or {})
    plain = functional(exported)
    checked = checked_outputs(exported)
    propagation = propagate(plain, checked=checked)
    first = first_names(propagation.aliases)
    tensors: dict[str, str] = {}
    constants: dict[str, Any] = {}
    inputs: list[str | None] = []
    for spec in plain.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind is InputKind.USER_INPUT:
            is_tensor = not hasattr(spec.arg, "value")
            inputs.append(name if is_tensor else None)
            if not is_tensor:
                constants[name] = spec.arg.value
        elif spec.target in first:
            tensors[name] = rename.get(first[spec.target], first[spec.target])
        elif spec.target is not None:
            constants[name] = plain.constants[spec.target]
    axes, data = label_values(propagation, name_map=rename)
    if graph is not None:
        axes = _renamed(axes, tensors, graph)
    return Program(
        nodes=tuple(plain.graph.nodes),
        tensors=tensors,
        constants={**constants, **_attributes(plain)},
        inputs=tuple(inputs),
        outputs=_outputs(plain, checked),
        axes=axes,
        data=data,
        batch=batch,
    )


def _renamed(
    axes: Mapping[str, Axes], tensors: Mapping[str, str], graph: LayerGraph
) -> dict[str, Axes]:
    """Axes in another graph's names of spaces, told by the tensors that both have."""
    names: dict[str, str] = {}
    for node, tensor in tensors.items():
        for axis, named in zip(axes[node], graph.tensors[tensor].axes, strict=True):
            if isinstance(axis, Unit) and isinstance(named.expr, Unit):
                names[axis.space] = named.expr.space
    renamed: dict[str, Axes] = {}
    for node, labelled in axes.items():
        renamed[node] = tuple(None if a is None else rename_units(a, names) for a in labelled)
    return renamed


def _attributes(exported: ExportedProgram) -> dict[str, Any]:
    """Tensors that the graph holds itself, by node."""
    tensors = {}
    for node in exported.graph.nodes:
        if node.op == "get_attr":
            holder: Any = exported.graph_module
            for part in str(node.target).split("."):
                holder = getattr(holder, part)
            tensors[node.name] = holder
    return tensors


def _outputs(exported: ExportedProgram, checked: Any) -> tuple[str, ...]:
    from torch.export.graph_signature import OutputKind

    names: list[str] = []
    for spec in exported.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            names.append(getattr(spec.arg, "name", ""))  # a constant output has no name
    wanted = range(len(names)) if checked is None else checked
    return tuple(names[at] for at in wanted if names[at])


def same_operations(one: Program, other: Program) -> bool:
    """Whether two programs are one network at different widths."""
    if len(one.nodes) != len(other.nodes):
        return False
    for a, b in zip(one.nodes, other.nodes, strict=True):
        if (a.op, a.name, a.target) != (b.op, b.name, b.target):
            return False
    return True
