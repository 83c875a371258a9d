"""The compact network computes what the whole one does with the removed units at zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..align.models import Model
from ..errors import IncompatibleModels
from ..graph.model import LayerGraph
from ..network.acid import function_change
from ..network.architecture import Architecture, module_state, real_network
from ..network.mlp import mlp_forward
from .compact import Kept, compact, expand

Read = Callable[[str], torch.Tensor]
_INPUTS = 16


def masked_change(known: Architecture, model: Model, kept: Kept, after: LayerGraph) -> float | None:
    """Largest relative difference of outputs between the masked and the compact network.

    Units are dropped, not merged. None where nothing can be run: names and shapes only, or a
    module that does not take other widths.
    """
    graph = model.graph

    def small(name: str) -> torch.Tensor:
        return compact(model.stored(name), graph.tensors[name], graph, kept)

    def masked(name: str) -> torch.Tensor:
        return expand(small(name), graph.tensors[name], graph, kept)

    if known.network is None:
        return _plain(graph, after, masked, small)
    network = real_network(known)
    assert network is not None
    before, left = (module_state(network, known.names, read) for read in (masked, small))
    for dtype in (torch.float64, torch.float32):
        try:
            return function_change(
                network.module, network.args, network.kwargs, before, left, dtype=dtype
            )
        except (RuntimeError, ValueError):  # a shape that the module has fixed, or a kernel
            continue
    return None


def _plain(before: LayerGraph, after: LayerGraph, masked: Read, small: Read) -> float | None:
    width = _input_width(before)
    if width is None:
        return None
    inputs = torch.randn(_INPUTS, width, generator=torch.Generator().manual_seed(0))
    try:
        old = mlp_forward(before, masked, inputs)
        new = mlp_forward(after, small, inputs)
    except IncompatibleModels:
        return None
    return float((old - new).abs().max() / old.abs().max().clamp_min(1e-30))


def _input_width(graph: LayerGraph) -> int | None:
    """Columns of the first layer, where it is a matrix."""
    first: Any = next((op.tensors.get("weight") for op in graph.ops if op.tensors), None)
    node = graph.tensors.get(first) if first is not None else None
    return node.shape[1] if node is not None and len(node.shape) == 2 else None
