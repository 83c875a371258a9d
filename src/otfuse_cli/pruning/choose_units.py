"""Which units of each space stay, and for `ot` where the others go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..matching.models import Model
from ..runtime import Runtime
from ..transport.cost import cost_matrix
from ..transport.maps import Coupling
from ..transport.semi_relaxed import bounded_plan, choose_support, nearest_plan
from .amounts import kept_count
from .units import both_sides, index_spaces, norm_mass, random_order, weight_norms

# Of what is merged, no kept unit takes more than this times an equal share
# (docs/methods/pruning.md, prune-fuse).
_BOUND = 1.25


@dataclass(frozen=True)
class KeptUnits:
    """What stays of every pruned space.

    Attributes:
        kept: By space, the units that stay, ascending (int64).
        merges: By space, the map from all units to those; empty where units are dropped.
    """

    kept: Mapping[str, torch.Tensor]
    merges: Mapping[str, Coupling] = field(default_factory=dict)


def choose_kept(
    model: Model, amounts: Mapping[str, float], criterion: str, runtime: Runtime
) -> KeptUnits:
    """Apply a criterion (`l1`, `l2`, `random`, `ot`) to every space of `amounts`.

    For `reconstruct`, which decides on inputs (`reduce_widths`), only the numbers of units are.

    Ties go to the lowest index. Heads and channel groups are chosen, never merged: the units
    inside them have no common order.
    """
    kept: dict[str, torch.Tensor] = {}
    merges: dict[str, Coupling] = {}
    whole = index_spaces(model)
    for done, (space, amount) in enumerate(amounts.items()):
        runtime.progress("prune", done, len(amounts))
        size = model.graph.spaces[space].size
        keep = kept_count(size, amount)
        if keep == size:
            continue  # an amount that rounds to nothing
        if criterion == "reconstruct":
            kept[space] = torch.arange(keep)
        elif criterion == "ot":
            kept[space], merge = _by_transport(model, space, keep)
            if space not in whole:
                merges[space] = merge
        else:
            kept[space] = _largest(_worth(model, space, criterion, runtime), keep)
    runtime.progress("prune", len(amounts), len(amounts))
    return KeptUnits(kept, merges)


def merge_map(model: Model, space: str, kept_M: torch.Tensor) -> Coupling:
    """The map of every unit to kept ones that are near by incoming and outgoing weights.

    No kept unit receives much more than its share (`_BOUND`). Produce: the mean of what arrives,
    by the length of incoming weights; consume: outgoing weights add up. Duplicated units are
    merged without a change of the function, as far as the bound lets them.
    """
    features_NK = both_sides(model, space)
    cost_NM = cost_matrix(features_NK, features_NK[kept_M.to(features_NK.device)], dead_cost=1.0)
    return Coupling(bounded_plan(cost_NM, norm_mass(model, space), kept_M, _BOUND))


def _by_transport(model: Model, space: str, keep: int) -> tuple[torch.Tensor, Coupling]:
    features_NK = both_sides(model, space)
    cost_NN = cost_matrix(features_NK, features_NK, dead_cost=1.0).cpu()
    cost_NN.fill_diagonal_(0)  # to stay costs nothing, whatever rounding makes of it
    mass_N = norm_mass(model, space)
    kept_M = choose_support(cost_NN, mass_N, keep)
    return kept_M, Coupling(nearest_plan(cost_NN[:, kept_M], mass_N, kept_M))


def _worth(model: Model, space: str, criterion: str, runtime: Runtime) -> torch.Tensor:
    if criterion == "random":
        return random_order(model, space, runtime)
    return weight_norms(model, space, {"l1": 1, "l2": 2}[criterion])


def _largest(worth_N: torch.Tensor, keep: int) -> torch.Tensor:
    order = torch.argsort(worth_N, descending=True, stable=True)
    return order[:keep].sort().values
