"""Rebalancing (`--scale balanced`): equal say for both models where widths differ.

A plan between different widths keeps the function but not the size of the weights: consumers of
merged units add, consumers of split ones are divided. Where the activation is positively
homogeneous, a unit's incoming weights may be multiplied and its outgoing ones divided, and the
function stays; here by as much as makes incoming weights as long as the anchor's.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..graph.axes import Unit
from ..graph.model import LayerGraph, Role
from .alignment import Alignment
from .apply import transport
from .matchers.sweep import processing_order
from .models import Model

_NOTHING = 1e-6


def balance(source: Model, anchor: Model, alignment: Alignment) -> Alignment:
    """Give `alignment` scales, if a width differs; in graph order, each with those before it.

    Unit m of a space gets `|anchor's incoming weights| / |aligned incoming weights|`, biases
    included; 1 where either is zero. Spaces with a norm, or with more than one place on a tensor,
    are left alone, and so are maps that differ from place to place or keep anchor units.
    """
    graph = anchor.graph
    different = any(source.graph.spaces[s.id].size != s.size for s in graph.free())
    special = alignment.overrides or any(m.kept is not None for m in alignment.maps.values())
    if not different or special:
        return alignment
    scales: dict[str, torch.Tensor] = {}
    for space in processing_order(graph):
        if _may_scale(graph, space.id):
            here = replace(alignment, scales=dict(scales))
            scale_M = _scale(source, anchor, here, space.id)
            if bool((scale_M != 1).any()):
                scales[space.id] = scale_M
    return replace(alignment, scales=scales)


def _may_scale(graph: LayerGraph, space: str) -> bool:
    """Plain layers with a homogeneous activation: producers, biases, consumers, nothing else."""
    if "scale" not in graph.spaces[space].exact or graph.spaces[space].per is not None:
        return False
    seen: set[str] = set()
    for name, dim in graph.members[space]:
        axis = graph.tensors[name].axes[dim]
        plain_roles = len(axis.roles) == 1 and axis.roles <= {
            Role.PRODUCE,
            Role.VECTOR,
            Role.CONSUME,
        }
        plain = Role.CONSUME in axis.roles or axis.expr == Unit(space)
        if not (plain_roles and plain) or name in seen or name.endswith("running_mean"):
            return False
        seen.add(name)
    return True


def _scale(source: Model, anchor: Model, alignment: Alignment, space: str) -> torch.Tensor:
    ours = theirs = torch.zeros(anchor.graph.spaces[space].size, dtype=torch.float64)
    for name, dim in anchor.graph.members[space]:
        if Role.CONSUME not in anchor.graph.tensors[name].axes[dim].roles:
            moved = transport(source.read(name), name, source.graph, alignment)
            ours = ours + _squares(moved, dim)
            theirs = theirs + _squares(anchor.read(name), dim)
    live = (ours > 0) & (theirs > 0)
    scale_M = torch.where(live, (theirs / ours).sqrt(), 1.0)
    return torch.where((scale_M - 1).abs() > _NOTHING, scale_M, 1.0)


def _squares(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).double().square().sum(1).cpu()
