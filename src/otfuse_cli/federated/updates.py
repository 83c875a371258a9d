"""What a client sends, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..checkpoint.finite import is_finite
from ..errors import few

ModelTensors = Mapping[str, torch.Tensor]
TensorShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Update:
    """A model that a client has trained.

    Attributes:
        node: The client.
        tensors: Its state dict.
        weight: How much it counts: the examples that it was trained on.
        sent: The client was sent a model in this round, and began there.
    """

    node: int
    tensors: ModelTensors
    weight: float
    sent: bool = True


def widths_of(tensors: ModelTensors) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def misfit(shapes: TensorShapes, like: TensorShapes) -> str | None:
    """Why these are no shapes of a network like that one, of any widths; None: they may be."""
    missing = [name for name in like if name not in shapes]
    extra = [name for name in shapes if name not in like]
    if missing:
        return f"it lacks {few(missing)}"
    if extra:
        return f"the global model has no {few(extra)}"
    for name, shape in shapes.items():
        if len(shape) != len(like[name]):
            return f"{name} is {list(shape)}, {list(like[name])} in the global model"
    return None


def fault(update: Update, like: ModelTensors, shapes: TensorShapes | None) -> str | None:
    """Why an update can't be used; None where it can.

    Args:
        update: What was sent.
        like: The global model.
        shapes: Of the client's model, where it is known.
    """
    if not (math.isfinite(update.weight) and update.weight > 0):
        return f"its weight is {update.weight:g}"
    sent = widths_of(update.tensors)
    wrong = misfit(sent, widths_of(like))
    if wrong is not None:
        return wrong
    for name, tensor in update.tensors.items():
        if shapes is not None and sent[name] != shapes[name]:
            return f"{name} is {list(sent[name])}, and was {list(shapes[name])} before"
        if tensor.is_floating_point() != like[name].is_floating_point():
            return f"{name} is {_dtype(tensor)}, {_dtype(like[name])} in the global model"
        if not is_finite(tensor):
            return f"{name} holds NaN or infinity"
    return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
