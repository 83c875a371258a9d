"""Transport maps as heat maps: masses between source and anchor units, coarse enough to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..matching.matchers.sweep import Match
from ..plot.charts import HeatMap
from ..transport.maps import Map, plan_of

# Cells along a side; wider spaces are summed.
_CELLS = 64


def heat_maps(matches: Sequence[Match]) -> tuple[HeatMap, ...]:
    """One for each space of each source, in the order of the reports; of a family the mean."""
    return tuple(picture for one in matches for picture in _of(one, several=len(matches) > 1))


def _of(one: Match, *, several: bool) -> Iterator[HeatMap]:
    seen: set[str] = set()
    for space in one.spaces:
        if space.id in seen:
            continue
        seen.add(space.id)
        family = one.alignment.families.get(space.id)
        maps = family or tuple(m for m in (one.alignment.maps.get(space.id),) if m is not None)
        if not maps:
            continue
        title = space.id + (f", checkpoint {space.source}" if several else "")
        if family is not None:
            title += f", mean of {len(family)} maps"
        if space.moved_fraction is not None:
            title += f": {100 * space.moved_fraction:.0f} % moved"
        source, anchor = maps[0].sizes
        yield HeatMap(title, "anchor unit", "source unit", _cells(maps), (anchor, source))


def _cells(maps: Sequence[Map]) -> tuple[tuple[float | None, ...], ...]:
    mean = torch.stack([plan_of(map).binned(_CELLS) for map in maps]).mean(0)
    return tuple(tuple(float(f"{value:.3g}") for value in row) for row in mean.tolist())
