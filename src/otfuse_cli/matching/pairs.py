"""Every model against every other: who is like whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..report.records import Pair, SpaceRecord
from ..requests.recipe import Recipe
from ..runtime import Runtime
from .match import match
from .matchers.sweep import Match
from .models import Model


def all_pairs(
    models: Sequence[Model],
    matches: Mapping[tuple[int, int], Match],
    recipe: Recipe,
    runtime: Runtime,
) -> tuple[Pair, ...]:
    """Costs of each model to each other, by source, then anchor.

    Args:
        models: By index.
        matches: Those that exist already, by (source, anchor).
        recipe: How to match.
        runtime: Where.
    """
    pairs: dict[tuple[int, int], Pair] = {}
    every = [(a, b) for a in models for b in models if a.index != b.index]
    every.sort(key=lambda pair: (pair[0].index, pair[1].index) not in matches)
    for source, anchor in every:
        key, back = (source.index, anchor.index), (anchor.index, source.index)
        if key not in pairs:
            done = matches.get(key) or match(source, anchor, recipe, runtime, random=True)
            pairs[key] = _pair(key, done.spaces)
            if done.alignment.hard:
                pairs.setdefault(back, _pair(back, _reversed(done.spaces, back[0])))
    return tuple(pairs[key] for key in sorted(pairs))


def _pair(key: tuple[int, int], spaces: tuple[SpaceRecord, ...]) -> Pair:
    units = sum(s.sizes[1] for s in spaces)
    moved = _sum([s.moved_fraction and s.moved_fraction * s.sizes[1] for s in spaces])
    return Pair(
        *key,
        ot_cost=_sum([s.ot_cost for s in spaces]) or 0.0,
        identity_cost=_sum([s.identity_cost for s in spaces]),
        random_cost=_sum([s.random_cost for s in spaces]),
        moved_fraction=None if moved is None or not units else moved / units,
        spaces=spaces,
    )


def _sum(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None


def _reversed(spaces: tuple[SpaceRecord, ...], source: int) -> tuple[SpaceRecord, ...]:
    """Permutations the other way round: they cost the same."""
    return tuple(s.replace(source=source, sizes=s.sizes[::-1]) for s in spaces)
