"""What a search over the maps of all spaces is, and what hinders searches of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...requests.recipe import Recipe
from ..models import Model
from ..similarity import Similarity
from .descent import Found


class Matcher(Protocol):
    """A search that begins at the sweep's maps; descent improves what it leaves.

    Attributes:
        name: Its value of `--matcher`.
        label: The candidate in reports: where descent begins, and descent.
    """

    name: str
    label: str

    def hindered(self, source: Model, anchor: Model, recipe: Recipe) -> str | None:
        """Why it can't be tried, in words; None where it can."""

    def planned_flop(self, work: Similarity, spaces: Sequence[str]) -> float:
        """Operations that it is planned with, from shapes, the descent after it aside."""

    def begin(self, work: Similarity, spaces: Sequence[str], swept: Found) -> Found:
        """The maps that descent begins at, and what they took."""


def no_permutations(source: Model, anchor: Model, recipe: Recipe) -> str | None:
    """Why the maps can't all be permutations; None when they can."""
    if recipe.solver != "exact" or recipe.mass != "uniform":
        return f"--solver {recipe.solver} --mass {recipe.mass} ask for soft maps"
    for space in anchor.graph.free():
        width = source.graph.spaces[space.id].size
        if width != space.size:
            return f"space {space.id} has {width} units there and {space.size} in the anchor"
    return None


def no_joint_step(source: Model, anchor: Model, recipe: Recipe) -> str | None:
    """Why all maps can't move at once; None when they can."""
    family = next((s for s in anchor.graph.free() if s.per is not None), None)
    inner = None if family is None else f"space {family.id} has a map for each {family.per}"
    return no_permutations(source, anchor, recipe) or inner
