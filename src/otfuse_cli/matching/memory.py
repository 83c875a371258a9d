"""The memory that matching takes, from shapes alone: one count, for `inspect` and `--max-memory`.

What is in flight at one time: the rows of a space with their copies, its cost with the assignment,
the plans of all spaces, and the tensors that searches keep between their steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..requests.recipe import Recipe
from .alignment import Alignment
from .features import producers
from .large_space import large_space
from .models import Model
from .similarity import Similarity

# Bytes for an entry of a cost: float32, beside it float64 for the assignment, and a flag.
_COST = 13
# A plan holds an index for either side.
_PLAN = 8
# Rows in float32: as read and at unit norm; of a large space once, one side as stored as well.
_ROWS, _LARGE_ROWS = 8, 5


@dataclass(frozen=True)
class Memory:
    """Bytes that matching one source takes beside the program, and the space that takes most.

    Attributes:
        space: The space whose rows and cost are largest together; None where nothing moves.
        rows: Of that space, both models', with copies.
        cost: Its cost with the assignment, and the plans of all spaces.
        kept: Tensors that are kept between the steps of a search.
    """

    space: str | None
    rows: int
    cost: int
    kept: int

    @property
    def total(self) -> int:
        """Everything together."""
        return self.rows + self.cost + self.kept


def matching_memory(source: Model, anchor: Model, recipe: Recipe) -> Memory:
    """What matching `source` to `anchor` takes by the recipe's matcher."""
    kept = 0 if recipe.matcher == "sweep" else Similarity(source, anchor).kept_bytes
    spaces = {space.id: space.size for space in anchor.graph.free()}
    plans = _PLAN * sum(source.graph.spaces[id].size + size for id, size in spaces.items())
    most: tuple[str | None, int, int] = (None, 0, 0)
    for id, size in spaces.items():
        rows = _row_bytes(source, anchor, id, recipe)
        cost = _COST * source.graph.spaces[id].size * size
        if rows + cost > most[1] + most[2]:
            most = (id, rows, cost)
    return Memory(most[0], most[1], most[2] + plans, kept)


def _row_bytes(source: Model, anchor: Model, space: str, recipe: Recipe) -> int:
    """Rows that are in memory together: of a large space one pair of tensors, else all."""
    made = producers(anchor.graph, space)
    pairs = [sum(prod(m.graph.tensors[p.weight].shape) for m in (source, anchor)) for p in made]
    if large_space(source, anchor, made, space, Alignment({}), recipe) is not None:
        return _LARGE_ROWS * max(pairs, default=0)
    return _ROWS * sum(pairs)
