"""docs/paper.md from what was measured: a table for each item, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
from string import Formatter
from textwrap import fill

from jobs import Job, Kept, Results, Values

_WIDE = 130
Rows = list[tuple[Job, Kept]]


def shown(values: Sequence[float]) -> str:
    """Mean and deviation over seeds; a single value as it is."""
    if not values:
        return ""
    spread = f" ± {pstdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}"


def by_column(values: Values) -> dict[str, str]:
    """Cells of a row, one for each column."""
    return {name: shown(found) for name, found in values.items()}


def gathered(form: str) -> Callable[[Values], dict[str, str]]:
    """Cells of columns `NAME, PART`: one for each name, in which `form` says where parts go.

    What has none of its parts, such as `A`, is a cell of its own.
    """
    parts = {name for _, name, _, _ in Formatter().parse(form) if name}

    def cells(values: Values) -> dict[str, str]:
        found: dict[str, dict[str, str]] = {}
        for column, scores in values.items():
            name, _, part = column.rpartition(", ")
            if part not in parts:
                name, part = column, ""
            found.setdefault(name, {})[part] = shown(scores)
        return {n: of[""] if "" in of else form.format(**of) for n, of in found.items()}

    return cells


def curves(values: Values) -> dict[str, tuple[list[float], list[Sequence[float]]]]:
    """Of columns `NAME @x` by name: the places x, and the values there."""
    found: dict[str, tuple[list[float], list[Sequence[float]]]] = {}
    for column, scores in values.items():
        name, at, place = column.partition(" @")
        if at:
            places, heights = found.setdefault(name, ([], []))
            places.append(float(place))
            heights.append(scores)
    return found


def _beside_curves(values: Values) -> dict[str, str]:
    """Cells of what is no curve."""
    return by_column({name: found for name, found in values.items() if " @" not in name})


def best_along(values: Values) -> dict[str, str]:
    """Cells of curves: the highest mean over seeds, and where; what is no curve as it is."""
    cells = _beside_curves(values)
    for name, (places, heights) in curves(values).items():
        at = max(range(len(places)), key=lambda i: mean(heights[i]))
        cells[name] = f"{shown(heights[at])} ({places[at]:g})"
    return cells


def along(values: Values) -> dict[str, str]:
    """Cells of curves over shares: one for each share, the curves' values in turn."""
    cells = _beside_curves(values)
    for places, heights in curves(values).values():
        for place, scores in zip(places, heights, strict=True):
            head = f"{place:.0%}".replace("%", " %")
            cells[head] = f"{cells[head]}, {shown(scores)}" if head in cells else shown(scores)
    return cells


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper.

    Attributes:
        title: What it shows.
        command: `otfuse` command, or what is trained.
        says: Whether it is reproduced, or why not.
        cells: Of a row, from its values.
    """

    title: str
    command: str
    says: str = ""
    cells: Callable[[Values], Mapping[str, str]] = by_column


def measured(items: Mapping[str, Item], jobs: Sequence[Job], results: Results) -> dict[str, Rows]:
    """Rows of each item; of two of one name the first."""
    found: dict[str, dict[str, tuple[Job, Kept]]] = {name: {} for name in items}
    for job in jobs:
        kept = results.of(job)
        if kept is not None:
            found[job.item].setdefault(job.row, (job, kept))
    return {name: list(rows.values()) for name, rows in found.items()}


def written(
    items: Mapping[str, Item], rows: Mapping[str, Rows], pictures: Mapping[str, str], head: str
) -> str:
    """The page; pictures by item, where they are seen from it."""
    parts = [head.rstrip()]
    for name, item in items.items():
        own = rows.get(name)
        if not own:
            continue
        parts += [f"## {name}: {item.title}", f"    {item.command}"]
        if name in pictures:
            parts.append(f"![{item.title}]({pictures[name]})")
        parts.append(_table(own, item))
        if item.says:
            parts.append(fill(item.says, _WIDE))
        parts.append(f"{sum(kept.seconds for _, kept in own) / 60:.1f} CPU minutes.")
    return "\n\n".join(parts) + "\n"


def _table(rows: Rows, item: Item) -> str:
    cells = [item.cells(kept.values) for _, kept in rows]
    columns = list(dict.fromkeys(name for row in cells for name in row))
    from_paper = [c for c in columns if any(c in job.paper for job, _ in rows)]
    heads = ["", *columns, *(f"paper: {c}" for c in from_paper)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (job, _), row in zip(rows, cells, strict=True):
        line = [job.row, *(row.get(c, "") for c in columns)]
        line += [str(job.paper.get(c, "")) for c in from_paper]
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines)
