"""The compact network computes what the whole one does with the removed units at zero."""

from __future__ import annotations

import torch
from torch import nn

from ..matching.models import Model
from ..running.architecture import Architecture, module_state, real_network
from ..running.function_change import Change, change_allowed
from ..running.runnable import network_at
from .compact import Kept, compact, expand


def masked_change(architecture: Architecture, model: Model, kept: Kept) -> Change | None:
    """Largest relative difference of outputs between masked and compact network, and the allowed.

    Units are dropped, not merged. None where nothing can be run: names and shapes only, or a
    module that does not take other widths.
    """
    graph = model.graph

    def small(name: str) -> torch.Tensor:
        return compact(model.stored(name), graph.tensors[name], graph, kept)

    def masked(name: str) -> torch.Tensor:
        return expand(small(name), graph.tensors[name], graph, kept)

    network = real_network(architecture)
    if network is None:
        return None
    reduced: nn.Module | None = None
    if architecture.takes_shapes:
        reduced = network_at(architecture, {name: small(name) for name in graph.tensors}).module
    before, left = (module_state(network, architecture.names, read) for read in (masked, small))
    called = network.module, network.args, network.kwargs
    try:
        return change_allowed(*called, before, left, other=reduced)
    except (RuntimeError, ValueError):  # a shape that the module has fixed
        return None
