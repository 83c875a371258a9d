"""The layer graph of a network that nobody knows: every axis stays where it is.

Enough for a plain average, which moves nothing and asks only that names and shapes agree.
"""

from __future__ import annotations

from collections.abc import Mapping

from .axes import Fixed
from .model import GraphTensor, LayerGraph, Role, Shapes, TensorAxis

PLAIN = "no graph (a plain average needs none)"


def plain_graph(shapes: Shapes, aliases: Mapping[str, tuple[str, ...]]) -> LayerGraph:
    """A graph without spaces.

    Args:
        shapes: Of every tensor, in the order of the file.
        aliases: Other names of tied tensors.
    """
    tensors: dict[str, GraphTensor] = {}
    for name, shape in shapes.items():
        axes = tuple(TensorAxis(Fixed(size), frozenset({Role.FIXED})) for size in shape)
        tensors[name] = GraphTensor(name, shape, axes, tuple(aliases.get(name, ())))
    return LayerGraph(tensors, {}, source=PLAIN)
