"""What a unit is worth, and what it is like: norms, draws, features of both sides.

N units, K features.
"""

from __future__ import annotations

import torch

from ..graph.model import Role
from ..matching.features import joined, producers, raw_rows
from ..matching.models import Model
from ..matching.unfold import unfold
from ..runtime import Runtime
from ..transport import mass


def weight_norms(model: Model, space: str, order: int) -> torch.Tensor:
    """L1 or L2 norm of the incoming weights of every unit, summed over the tensors that make it.

    Weights as they are, without bias and norm (Li et al., ICLR 2017; the paper's section 5.2).

    Returns:
        norms_N, float64.
    """
    node_norms = []
    for producer in producers(model.graph, space):
        node = model.graph.tensors[producer.weight]
        exprs = node.exprs
        weight = model.read(producer.weight)
        for rows in unfold(weight, exprs, producer.dim, space, model.graph.sizes):
            node_norms.append(rows.double().norm(p=order, dim=-1).cpu())
    return torch.stack(node_norms).sum(0)


def random_order(model: Model, space: str, runtime: Runtime) -> torch.Tensor:
    """A draw for every unit, N; the same for a space whatever else is pruned."""
    salt = list(model.graph.spaces).index(space)
    size = model.graph.spaces[space].size
    return torch.rand(size, generator=runtime.generator(7919 * (salt + 1)), dtype=torch.float64)


def both_sides(model: Model, space: str) -> torch.Tensor:
    """Incoming and outgoing weights of every unit of `space` side by side, features_NK.

    Each tensor's rows at unit norm; incoming ones with bias and BatchNorm folded in. Inside heads
    and groups only what does not depend on the order of their units counts.
    """
    graph = model.graph
    pool = frozenset(s.id for s in graph.free() if s.per == space)
    rows = [raw_rows(model, p, space, pool=pool) for p in producers(graph, space)]
    for name in graph.consumers(space):
        node = graph.tensors[name]
        exprs = node.exprs
        tensor = model.read(name)
        for dim in node.dims(space, Role.CONSUME):
            rows += unfold(tensor, exprs, dim, space, graph.sizes, pool=pool)
    return joined(rows, unit_norm=True)


def norm_mass(model: Model, space: str) -> torch.Tensor:
    """Mass of every unit in proportion to the length of its incoming weights, mass_N."""
    return mass.from_norms(weight_norms(model, space, 2))


def index_spaces(model: Model) -> frozenset[str]:
    """Spaces whose units are heads or groups: each has units of its own inside."""
    return model.graph.indices


__all__ = ["both_sides", "index_spaces", "norm_mass", "random_order", "weight_norms"]
