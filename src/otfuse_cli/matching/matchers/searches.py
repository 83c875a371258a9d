"""The registry of searches: those that `--matcher` names and the portfolio tries.

A new one is a class here or in a module of its own, its place in `FURTHER`, and its name with a
few words of help in `requests/recipe.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...requests.recipe import Recipe
from ..models import Model
from ..similarity import Similarity
from .descent import Found
from .frank_wolfe import MOST_STEPS, relax
from .matcher import Matcher, no_joint_step


class Descent:
    """Descent from the sweep's own maps."""

    name = "descent"
    label = "sweep + descent"

    def hindered(self, source: Model, anchor: Model, recipe: Recipe) -> str | None:
        """Nothing hinders it."""
        return None

    def planned_flop(self, work: Similarity, spaces: Sequence[str]) -> float:
        """Nothing but the descent."""
        return 0.0

    def begin(self, work: Similarity, spaces: Sequence[str], swept: Found) -> Found:
        """The sweep's maps as they are."""
        return swept


class FrankWolfe:
    """Frank-Wolfe from the barycentre, rounded."""

    name = "frank-wolfe"
    label = "frank-wolfe + descent"

    def hindered(self, source: Model, anchor: Model, recipe: Recipe) -> str | None:
        """Maps that are no permutations, or one for each unit of another space."""
        return no_joint_step(source, anchor, recipe)

    def planned_flop(self, work: Similarity, spaces: Sequence[str]) -> float:
        """As many steps as it may take."""
        return MOST_STEPS * (work.dense_flop(spaces) + work.pass_flop(spaces))

    def begin(self, work: Similarity, spaces: Sequence[str], swept: Found) -> Found:
        """The end point of the relaxation."""
        before = work.flop
        rounded = relax(work, spaces, swept.alignment)
        return Found(rounded, 0.0, work.flop - before)


DESCENT: Matcher = Descent()
# What the portfolio tries after descent itself, in this order.
FURTHER: tuple[Matcher, ...] = (FrankWolfe(),)
# By their value of `--matcher`.
SEARCHES: dict[str, Matcher] = {search.name: search for search in (DESCENT, *FURTHER)}
