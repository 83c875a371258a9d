"""Fits of layers that are read through a ReLU: what it cuts off is not aimed at.

Where the target is below zero, whatever the layer gives below zero is as good. So behind the plain
fit the targets of such rows move to what the layer gives them, or to zero where it gives more, and
the same system is solved once more: a step that majorises the squared miss behind the ReLU, made
longer (docs/methods/refit.md, Behind a ReLU).

Legend: g groups, n rows, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graph.trace.nodes import operator_name
from ..graph.trace.program import Program
from .ridge import RidgeFit

_RELU = frozenset({"relu", "relu_"})
# A majorising step falls short; twice as long is the most that still descends.
_LONGER = 1.7


def behind_relu(program: Program, name: str) -> bool:
    """Whether a value is read through ReLUs alone."""
    readers = list(program.node(name).users)
    return bool(readers) and all(
        node.op == "call_function" and operator_name(node) in _RELU for node in readers
    )


def target_change(
    inputs_gnD: Tensor, target_gnO: Tensor, zero_gnO: Tensor | float, fit: RidgeFit
) -> Tensor:
    """How far the targets of a layer move, in the dtype of the rows.

    Args:
        inputs_gnD: What the layer reads.
        target_gnO: What it was fitted to.
        zero_gnO: What it would have to give for the ReLU to read zero.
        fit: Its plain fit.
    """
    given_gnO = inputs_gnD @ fit.weight_gOD.to(inputs_gnD).transpose(1, 2)
    if fit.bias_gO is not None:
        given_gnO += fit.bias_gO.to(given_gnO)[:, None]
    zero = torch.as_tensor(zero_gnO).to(given_gnO)
    aim_gnO = torch.where(target_gnO > zero, target_gnO, given_gnO.clamp(max=zero))
    change: Tensor = given_gnO + _LONGER * (aim_gnO - given_gnO) - target_gnO
    return change
