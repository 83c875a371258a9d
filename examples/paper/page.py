"""docs/paper.md from what was measured: a table for each item, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
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
