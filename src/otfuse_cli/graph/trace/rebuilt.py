"""Operations of a program as plain values, and made of those again: for another process.

What only tracing reads of them is left behind: their results' shapes, where in the code they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg


@dataclass(frozen=True)
class Operation:
    """One operation, the results that it reads by name.

    Attributes:
        op: Its kind, as torch.fx calls it.
        name: Of its result.
        target: What is called, or the name of what is there.
        args: Of the call.
        kwargs: Of the call.
    """

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class _Result:
    """In place of an operation that is read."""

    name: str


def plain_operations(nodes: Sequence[Node]) -> tuple[Operation, ...]:
    """Nodes of one graph as plain values, in their order."""
    plain: list[Operation] = []
    for node in nodes:
        args: Any = map_arg(node.args, _named)
        kwargs: Any = map_arg(node.kwargs, _named)
        plain.append(Operation(node.op, node.name, node.target, args, dict(kwargs)))
    return tuple(plain)


def nodes_of(plain: Sequence[Operation]) -> tuple[Node, ...]:
    """Nodes of a graph of their own."""
    graph, made = Graph(), dict[str, Node]()

    def node_of(part: Any) -> Any:
        return made[part.name] if isinstance(part, _Result) else part

    for operation in plain:
        args, kwargs = (map_aggregate(part, node_of) for part in (operation.args, operation.kwargs))
        node = graph.create_node(operation.op, operation.target, args, kwargs, operation.name)
        node.name = operation.name  # what the graph would call it may have a number behind it
        made[operation.name] = node
    return tuple(graph.nodes)


def _named(node: Node) -> Any:
    return _Result(node.name)
