"""Forward pass of networks that are linear layers and ReLU, straight from their layer graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import IncompatibleModels
from ..graph.model import LayerGraph, OpKind

Read = Callable[[str], torch.Tensor]


def mlp_forward(graph: LayerGraph, read: Read, inputs: torch.Tensor) -> torch.Tensor:
    """Logits of a plain chain of linear layers with ReLU between them.

    Args:
        graph: Its operations in execution order.
        read: Gives a tensor by name.
        inputs: Batch x features, flattened if it has more axes.

    Raises:
        IncompatibleModels: The graph holds another operation; it can't be run from its names.
    """
    values = inputs.flatten(1).to(torch.float32)
    for op in graph.ops:
        if op.kind is OpKind.LINEAR:
            weight = read(op.tensors["weight"]).to(torch.float32)
            bias = read(op.tensors["bias"]).to(torch.float32) if "bias" in op.tensors else None
            values = torch.nn.functional.linear(values, weight, bias)
        elif op.kind is OpKind.ACT and op.detail == "relu":
            values = values.relu()
        else:
            raise IncompatibleModels(
                "this network can't be run from its checkpoint",
                where=f"operation {op.name} ({op.kind})",
                why="names and shapes don't say what it computes",
                fix="only plain MLPs run without their module",
            )
    return values


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of rows whose largest logit is the label's, in percent."""
    return 100.0 * float((logits.argmax(1) == labels).double().mean())
