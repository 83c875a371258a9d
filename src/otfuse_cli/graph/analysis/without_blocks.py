"""A program without some of its residual blocks: the same operations under the same names.

Where a block is gone, the value that it was given is what it hands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Graph, Node

from .fit_targets import fits, norm_fits
from .residual_blocks import ResidualBlock

if TYPE_CHECKING:
    from ..trace.program import Program


def without_blocks(program: Program, blocks: Sequence[ResidualBlock]) -> Program:
    """The program with every reader of a block's end reading its start; what is in vain is gone.

    Operations keep their names, and tensors that nothing reads any more are not asked for.
    """
    given = {block.end: program.node(block.start) for block in blocks}

    def source(node: Node) -> Node:
        while node.name in given:
            node = given[node.name]
        return node

    outputs = tuple(source(program.node(name)) for name in program.outputs)
    live, waiting = set[Node](), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting += map(source, node.all_input_nodes)
    graph, copies = Graph(), dict[Node, Node]()
    for node in program.nodes:
        # Inputs stay although nothing may read them: they are given by position.
        if node in live or node.name in program.inputs:
            copies[node] = graph.node_copy(node, lambda used: copies[source(used)])
            copies[node].name = node.name
    graph.output(tuple(copies[node] for node in outputs))
    names = {node.name for node in copies}
    return replace(
        program,
        nodes=tuple(graph.nodes),
        tensors={node: tensor for node, tensor in program.tensors.items() if node in names},
        outputs=tuple(node.name for node in outputs),
        axes={node: axes for node, axes in program.axes.items() if node in names},
        data=frozenset(program.data & names),
    )


def before_gaps(
    program: Program, small: Program, blocks: Sequence[ResidualBlock]
) -> frozenset[str]:
    """Tensors of layers that come before every gap: they do what they did, and stay as they are."""
    first = min(program.position[block.start] for block in blocks)
    before = set[str]()
    for fit in fits(small)[0]:
        before.update(fit.tensors if program.position[fit.target] <= first else ())
    for norm in norm_fits(small):
        before.update(norm.tensors if program.position[norm.target] <= first else ())
    return frozenset(before)
