"""`--max-memory`: what matching will need, from shapes alone, and no to more than is allowed."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..matching.features import producers
from ..matching.memory import matching_memory
from ..matching.models import Model
from ..requests.recipe import Recipe

# The program itself, with torch.
_PROGRAM = 320 << 20


def require_memory(
    sources: Sequence[Model], anchor: Model, recipe: Recipe, max_memory: float | None
) -> None:
    """Refuse a merge whose matching needs more than `max_memory` GiB, before it begins.

    None and 0 refuse nothing.

    Raises:
        UsageError: It needs more; names the space and what it would take.
    """
    if not max_memory or recipe.align == "none":
        return
    needs = [matching_memory(source, anchor, recipe) for source in sources]
    most = max(needs, key=lambda memory: memory.total, default=None)
    if most is None or most.space is None:
        return
    total = _PROGRAM + most.total
    if total > max_memory * 2**30:
        names = ", ".join(p.weight for p in producers(anchor.graph, most.space)[:3])
        raise UsageError(
            "matching needs more memory than --max-memory allows",
            where=f"space {most.space} of {anchor.graph.spaces[most.space].size} units ({names})",
            why=f"about {total / 2**30:.2f} GiB, {max_memory:g} GiB are allowed",
            fix="allow more, pin that space in a spec, or use --align none",
        )
