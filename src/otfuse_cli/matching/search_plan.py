"""What `--matcher auto` does after the sweep, in order, with the operations that it plans for.

The portfolio follows this plan, and `inspect` shows it; neither has rules of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..requests.recipe import Recipe
from .matchers.matcher import Matcher, no_permutations
from .matchers.searches import FURTHER
from .similarity import Similarity

# Orders of descent from the sweep that are tried.
ORDERS = 3
# Passes that a descent is planned with, and those that it gets when they are too dear.
USUAL_PASSES, FEW_PASSES = 6, 3


@dataclass(frozen=True)
class PlannedSearch:
    """A search, with descent after it.

    Attributes:
        name: In an estimate.
        label: In the report, as a candidate.
        flop: Planned operations, descent included.
        matcher: What is searched with; None for descent from the identity or from the sweep.
        order: The order of descent from the sweep; 0 for all else.
    """

    name: str
    label: str
    flop: float
    matcher: Matcher | None = None
    order: int = 0


def usual_flop(work: Similarity, spaces: Sequence[str]) -> float:
    """Operations that a descent is planned with."""
    return USUAL_PASSES * work.pass_flop(spaces)


def takes_few_passes(spent: float, usual: float, recipe: Recipe) -> bool:
    """Whether the first descent is cut short.

    Entropic plans gain a little in every pass, and each solve is a long iteration.
    """
    return recipe.solver != "exact" or spent + usual > recipe.effort


def further_steps(
    work: Similarity, spaces: Sequence[str], recipe: Recipe
) -> tuple[PlannedSearch, ...]:
    """What comes after the first descent, as far as the effort goes."""
    usual = usual_flop(work, spaces)
    steps = [
        PlannedSearch(m.name, m.label, m.planned_flop(work, spaces) + usual, matcher=m)
        for m in FURTHER
    ]
    if no_permutations(work.source, work.anchor, recipe) is None:
        steps.append(PlannedSearch("identity + descent", "identity + descent", usual))
    for order in range(1, 1 if recipe.solver != "exact" else ORDERS):
        name = f"descent, order {order}"
        steps.append(PlannedSearch(name, f"sweep + {name}", usual, order=order))
    return tuple(steps)
