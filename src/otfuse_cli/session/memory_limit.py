"""`--max-memory`: what matching will need, from shapes alone, and no to more than is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..errors import UsageError
from ..matching.alignment import Alignment
from ..matching.features import producers
from ..matching.large_space import large_space
from ..matching.models import Model
from ..requests.recipe import Recipe

# The program itself, with torch.
_PROGRAM = 320 << 20
# Bytes for an entry of a cost: float32, beside it float64 for the assignment, and a flag.
_COST = 13
# Rows in float32: as read and at unit norm; of a large space once, one side as stored as well.
_ROWS, _LARGE_ROWS = 8, 5


def require_memory(
    sources: Sequence[Model], anchor: Model, recipe: Recipe, max_memory: float | None
) -> None:
    """Refuse a merge whose matching needs more than `max_memory` GiB, before it begins.

    Counts the largest space: the rows of both models (of a large space one pair of tensors) and
    the cost in flight. None and 0 refuse nothing.

    Raises:
        UsageError: It needs more; names the space and what it would take.
    """
    if not max_memory or recipe.align == "none":
        return
    needs = [
        (_PROGRAM + _space_bytes(source, anchor, space.id, recipe), space.id)
        for source in sources
        for space in anchor.graph.free()
    ]
    if not needs:
        return
    most, space_id = max(needs)
    if most > max_memory * 2**30:
        names = ", ".join(p.weight for p in producers(anchor.graph, space_id)[:3])
        raise UsageError(
            "matching needs more memory than --max-memory allows",
            where=f"space {space_id} of {anchor.graph.spaces[space_id].size} units ({names})",
            why=f"about {most / 2**30:.2f} GiB, {max_memory:g} GiB are allowed",
            fix="allow more, pin that space in a spec, or use --align none",
        )


def _space_bytes(source: Model, anchor: Model, space: str, recipe: Recipe) -> int:
    made = producers(anchor.graph, space)
    pairs = [sum(prod(m.graph.tensors[p.weight].shape) for m in (source, anchor)) for p in made]
    large = large_space(source, anchor, made, space, Alignment({}), recipe)
    rows = _LARGE_ROWS * max(pairs, default=0) if large is not None else _ROWS * sum(pairs)
    return rows + _COST * source.graph.spaces[space].size * anchor.graph.spaces[space].size
