"""Matching a dense network to its pruned version: survivors stay themselves.

Where every pruned unit is a survivor, all others go to survivors that are near by incoming and
outgoing weights, none of which takes much more than its share (semi-relaxed transport with a
bound). Where some pruned units are new, survivors are fixed points of a plan with uniform
marginals, and the rest is transported.

Legend: N dense units, M pruned ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..graph.axes import units_of
from ..graph.model import Space
from ..matching.alignment import Alignment
from ..matching.alignment_costs import measure
from ..matching.features import joined, producers
from ..matching.match import scale_maps
from ..matching.match_space import read_rows, solve_rows
from ..matching.matchers.sweep import Match, processing_order
from ..matching.models import Model
from ..report.records import Candidate
from ..requests.recipe import Recipe
from ..transport.cost import Metric, cost_matrix
from ..transport.maps import Coupling, Map, Permutation, as_map
from ..transport.plan import Plan
from ..transport.solve import solve
from .choose_units import merge_map
from .survivors import Survivors
from .units import index_spaces


def fixed_points_apply(dense: Model, pruned: Model, survivors: Mapping[str, Survivors]) -> bool:
    """Whether there are survivors to hold on to, and heads or groups that all survived."""
    any_survivor = any(len(s.pruned_S) for s in survivors.values())
    whole = index_spaces(pruned)
    if not any_survivor or not all(survivors[s].complete for s in whole if s in survivors):
        return False
    # What is inside of heads and groups has to be as it was.
    inside = [space for space in pruned.graph.free() if space.per is not None]
    return all(dense.graph.spaces[space.id].size == space.size for space in inside)


def match_survivors(
    dense: Model, pruned: Model, survivors: Mapping[str, Survivors], recipe: Recipe
) -> Match:
    """Maps from every dense unit to the pruned ones, survivors to themselves.

    Raises:
        SolveFailed: A transport problem was not solved.
    """
    maps: dict[str, Map] = {}
    alignment = Alignment(maps)
    whole, flop = index_spaces(pruned), 0.0
    for space in processing_order(pruned.graph):
        size = dense.graph.spaces[space.id].size
        # Every pair of units is compared by all numbers that carry one.
        carried = [
            dense.checkpoint.infos[t].numel / size for t, _ in pruned.graph.members[space.id]
        ]
        flop += 2.0 * size * space.size * sum(carried)
        if space.per is not None:
            continue  # inside heads and groups that survived nothing moves
        if not survivors[space.id].complete:
            maps[space.id] = _transported(
                dense, pruned, space, survivors[space.id], alignment, recipe
            )
        elif size == space.size:
            maps[space.id] = Permutation(survivors[space.id].dense_S)
        elif space.id in whole:
            maps[space.id] = _selection(survivors[space.id])
        else:
            maps[space.id] = merge_map(dense, space.id, survivors[space.id].dense_S)
    spaces, layers = measure(dense, pruned, alignment, recipe, {})
    alignment = scale_maps(dense, pruned, alignment, recipe)
    chosen = Candidate("survivors", dense.index, None, None, flop, True)
    return Match(alignment, spaces, layers, flop, (chosen,))


def _selection(survivors: Survivors) -> Coupling:
    """Survivors to themselves; what else there was is dropped."""
    share = torch.full((len(survivors.dense_S),), 1.0 / len(survivors.dense_S), dtype=torch.float64)
    return Coupling(
        Plan.from_entries(survivors.dense_S, survivors.pruned_S, share, survivors.sizes)
    )


def _transported(
    dense: Model,
    pruned: Model,
    space: Space,
    survivors: Survivors,
    alignment: Alignment,
    recipe: Recipe,
) -> Map:
    """Survivors fixed with mass 1/N each, the exact plan between what is left on both sides."""
    every = producers(pruned.graph, space.id)
    pool: set[str] = set()  # free spaces whose maps are not known yet: their units are summed over
    settled = {*alignment.maps, *alignment.families, space.id}
    for producer in every:
        for unit in units_of(axis.expr for axis in pruned.graph.tensors[producer.weight].axes):
            if pruned.graph.spaces[unit].pinned is None and unit not in settled:
                pool.add(unit)
    rows = read_rows(dense, pruned, every, space.id, alignment, frozenset(pool))
    n, m = survivors.sizes
    # Mass of a survivor, 1/n, has to fit into the 1/m of its place.
    if n < m or not len(survivors.dense_S):
        return as_map(solve_rows(rows, recipe).plan)
    cost_NM = cost_matrix(
        joined(rows.source, unit_norm=recipe.unit_norm),
        joined(rows.anchor, unit_norm=recipe.unit_norm),
        metric=Metric(recipe.metric),
        dead_cost=1.0 if recipe.unit_norm else None,
    ).cpu()
    rest_N = torch.ones(n, dtype=torch.bool)
    rest_N[survivors.dense_S] = False
    left_M = torch.full((m,), 1.0 / m, dtype=torch.float64)
    left_M[survivors.pruned_S] -= 1.0 / n
    open_M = left_M > 1e-12  # 1/m - 1/n is 0 but for rounding where the widths are equal
    from_N, to_M = rest_N.nonzero().flatten(), open_M.nonzero().flatten()
    mass_R = torch.full((len(from_N),), 1.0 / len(from_N), dtype=torch.float64)
    part = solve(cost_NM[from_N][:, to_M], mass_R, left_M[to_M] / left_M[to_M].sum()).plan
    rows_E, cols_E, values_E = part.entries()
    if n == m:
        index_M = torch.empty(m, dtype=torch.int64)
        index_M[survivors.pruned_S] = survivors.dense_S
        index_M[to_M[cols_E]] = from_N[rows_E]
        return Permutation(index_M)
    fixed = torch.full((len(survivors.dense_S),), 1.0 / n, dtype=torch.float64)
    return Coupling(
        Plan.from_entries(
            torch.cat([survivors.dense_S, from_N[rows_E]]),
            torch.cat([survivors.pruned_S, to_M[cols_E]]),
            torch.cat([fixed, values_E * len(from_N) / n]),
            (n, m),
        )
    )
