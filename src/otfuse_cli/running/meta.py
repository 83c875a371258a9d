"""Modules without values: every tensor on the meta device, whatever built it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def all_on_meta(module: nn.Module) -> None:
    """Move the parameters and buffers of `module` that hold values to the meta device, in place.

    `torch.device("meta")` reaches functions only: legacy constructors (`torch.Tensor(16, 6)`) and
    what comes from NumPy or a file are on the CPU all the same. Tied tensors stay tied, which
    `module.to("meta")` would untie.
    """
    moved: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []  # their ids must not be given to others meanwhile
    for part in module.modules():
        both: list[dict[str, Any]] = [part._parameters, part._buffers]
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta or is_lazy(tensor):
                    continue
                if id(tensor) not in moved:
                    kept.append(tensor)
                    moved[id(tensor)] = _on_meta(tensor)
                tensors[name] = moved[id(tensor)]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    bare = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(bare, requires_grad=tensor.requires_grad)
    return bare
