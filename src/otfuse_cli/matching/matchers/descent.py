"""Coordinate descent over spaces (Git Re-Basin's weight matching), for any widths.

One space at a time, the others held: the transport problem of the benefit from producers,
consumers and vectors. A step is taken only if the objective rises, so that it never falls and the
search ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...requests.recipe import Recipe
from ...transport.maps import Map, Permutation, plan_of
from ...transport.plan import Plan
from ...transport.solve import Solver, maximise, solve
from ..alignment import Alignment
from ..match_space import to_map
from ..similarity import Similarity
from .sweep import processing_order, stream_spaces

# Gains below this share of what the space contributes are rounding of float32 products.
_GAIN = 1e-6
# What differs by less than this share has the same value: rounding of float64 sums.
_SAME = 1e-12
MOST_PASSES = 50


@dataclass(frozen=True)
class Found:
    """An alignment with its objective, and how it was come by.

    Attributes:
        alignment: The maps.
        objective: `sum <anchor, aligned source>`.
        flop: Spent on it, counted.
        passes: Passes of descent.
        errors: Marginal error of each soft plan, by space.
    """

    alignment: Alignment
    objective: float
    flop: float = 0.0
    passes: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)


def movable(work: Similarity, recipe: Recipe) -> tuple[str, ...]:
    """Spaces that a search over all maps may change, in graph order.

    Not streams under `--residual identity`, and not the index of a family: which head goes where
    can't be told apart from the maps inside it, so that the sweep's answer stands.
    """
    graph = work.anchor.graph
    held = stream_spaces(graph) if recipe.residual == "identity" else frozenset()
    indices = {s.per for s in graph.free()}
    return tuple(
        s.id
        for s in processing_order(graph)
        if s.id not in held and s.id not in indices and work.places[s.id]
    )


def descend(
    work: Similarity,
    start: Alignment,
    recipe: Recipe,
    generator: torch.Generator,
    *,
    most_passes: int = MOST_PASSES,
) -> Found:
    """Improve `start` in passes over the spaces, each in a fresh random order, until none gains.

    A space whose neighbours have not moved since it was solved is not solved again.

    Maximises `sum <anchor, aligned source>`, for different widths the same (module `similarity`:
    it is the co-optimal transport between the two models' weights), by exact plans with the
    marginals of the start; with `--solver sinkhorn`, by Sinkhorn plans that are kept when they
    gain.

    Args:
        work: The two models.
        start: A map for every movable space, from a sweep, the identity, or a rounding.
        recipe: Its solver, epsilon, residual and scale.
        generator: Draws the order of each pass.
        most_passes: Where to stop at the latest.

    Raises:
        SolveFailed: A transport problem was not solved.
    """
    spaces = movable(work, recipe)
    before = work.flop
    current, errors, passes = start, dict[str, float](), 0
    stale = set(spaces)  # those for which something has changed since they were solved
    proved = False  # on the way solutions need no proof
    while stale and passes < most_passes:
        passes += 1
        for at in torch.randperm(len(spaces), generator=generator).tolist():
            space = spaces[at]
            if space not in stale:
                continue
            stale.discard(space)
            step = _step(work, space, current, recipe, proved=proved)
            if step is not None:
                current, errors[space] = step
                stale |= work.near(space).intersection(spaces)
        # What no step improves, or what time is left for once, is solved with proof: hard maps
        # only, soft plans are checked at every step.
        proved = passes == most_passes - 1 or (not stale and not proved)
        if proved:
            stale |= {s for s in spaces if all(map.hard for map in _maps_of(s, current))}
    return Found(current, work.objective(current), work.flop - before, passes, errors)


def _step(
    work: Similarity, space: str, current: Alignment, recipe: Recipe, *, proved: bool
) -> tuple[Alignment, float] | None:
    """The alignment after the best move of one space and its marginal error; None: no gain.

    A proved solution that is another one of the same value is a move, too: which of equals is
    taken does not depend on the solver.
    """
    benefit = work.benefit(space, current)
    if recipe.solver == "exact":  # on the CPU: one transfer, for plans and what they are worth
        benefit = benefit.cpu()
    old = _maps_of(space, current)
    stack = benefit if benefit.dim() == 3 else benefit[None]
    solved = [_best(part, map, recipe, proved) for part, map in zip(stack, old, strict=True)]
    work.flop += sum(float(max(part.shape)) ** 3 for part in stack)
    new = tuple(plan for plan, _ in solved)
    values = [_value(p, part) for p, part in zip(new, stack, strict=True)]
    past = [_value(plan_of(m), part) for m, part in zip(old, stack, strict=True)]
    threshold = _GAIN * sum(abs(v) for v in (*values, *past))
    gain = sum(values) - sum(past)
    equal = proved and abs(gain) <= _SAME / _GAIN * threshold and not work.twice(space)
    if not gain > threshold and not (equal and _differ(new, old)):
        return None
    maps = tuple(to_map(plan, recipe) for plan in new)
    after = _with(current, space, maps)
    if work.twice(space):
        # The benefit held the space's other axis in place: judge the step by the objective.
        names = [n for n, _ in work.places[space]]
        rise = work.objective(after, names) - work.objective(current, names)
        if not rise > threshold:
            return None
    return after, max(error for _, error in solved)


def _maps_of(space: str, alignment: Alignment) -> tuple[Map, ...]:
    """Its map; of a family, one for each unit of its index."""
    return alignment.families.get(space) or (alignment.maps[space],)


def _differ(plans: Sequence[Plan], maps: Sequence[Map]) -> bool:
    """Whether hard plans are not what the maps are; soft ones count as the same."""
    return any(
        plan.index_M is not None
        and isinstance(map, Permutation)
        and not torch.equal(plan.index_M, map.index_M)
        for plan, map in zip(plans, maps, strict=True)
    )


def _best(benefit_NM: torch.Tensor, old: Map, recipe: Recipe, proved: bool) -> tuple[Plan, float]:
    if old.hard:
        return maximise(benefit_NM, proved=proved), 0.0
    plan = plan_of(old)
    solver = Solver.SINKHORN if recipe.solver == "sinkhorn" else Solver.EXACT
    solution = solve(
        -benefit_NM,
        plan.mass_N,
        plan.mass_M,
        solver=solver,
        epsilon=recipe.epsilon,
        absolute=recipe.epsilon_unit == "cost",
    )
    return solution.plan, solution.marginal_error


def _value(plan: Plan, benefit_NM: torch.Tensor) -> float:
    return plan.shape[1] * plan.cost(benefit_NM)


def _with(alignment: Alignment, space: str, maps: Sequence[Map]) -> Alignment:
    if space in alignment.families:
        return replace(alignment, families={**alignment.families, space: tuple(maps)})
    return replace(alignment, maps={**alignment.maps, space: maps[0]})
