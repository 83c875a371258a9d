"""docs/paper.md from what was measured: a table for each item, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
from textwrap import fill

from jobs import Job, Kept, Results

_WIDE = 130


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper.

    Attributes:
        title: What it shows.
        command: `otfuse` command, or what is trained.
        says: Whether it is reproduced, or why not.
    """

    title: str
    command: str
    says: str = ""


def written(items: Mapping[str, Item], jobs: Sequence[Job], results: Results, head: str) -> str:
    """The page."""
    parts = [head.rstrip()]
    for name, item in items.items():
        rows = [(job, kept) for job in jobs if job.item == name and (kept := results.of(job))]
        if not rows:
            continue
        parts += [f"## {name}: {item.title}", f"    {item.command}", _table(rows)]
        if item.says:
            parts.append(fill(item.says, _WIDE))
        parts.append(f"{sum(kept.seconds for _, kept in rows) / 60:.1f} CPU minutes.")
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[tuple[Job, Kept]]) -> str:
    columns = list(dict.fromkeys(name for _, kept in rows for name in kept.values))
    from_paper = [c for c in columns if any(c in job.paper for job, _ in rows)]
    heads = ["", *columns, *(f"paper: {c}" for c in from_paper)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for job, kept in rows:
        cells = [job.row, *(shown(kept.values.get(c, ())) for c in columns)]
        cells += [str(job.paper.get(c, "")) for c in from_paper]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(values: Sequence[float]) -> str:
    """Mean and deviation over seeds; a single value as it is."""
    if not values:
        return ""
    spread = f" ± {pstdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}"
