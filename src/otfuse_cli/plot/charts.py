"""Charts as plain data, whatever draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Okabe and Ito: told apart by colour-blind readers too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
Style = Literal["solid", "dashed", "dotted"]


@dataclass(frozen=True)
class Series:
    """A line: one value for each x; None leaves a gap. Lines of one `colour` belong together."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    style: Style = "solid"
    colour: int | None = None


@dataclass(frozen=True)
class LineChart:
    """Lines over one axis of numbers, or of `categories` at 0, 1, 2, ..."""

    title: str
    xlabel: str
    ylabel: str
    series: tuple[Series, ...]
    categories: tuple[str, ...] | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class HeatMap:
    """A matrix as colours, the first row on top; None leaves a cell empty.

    Attributes:
        extent: What the columns and rows stand for, where a cell is more than one: [columns, rows].
        numbers: Write the values into the cells.
    """

    title: str
    xlabel: str
    ylabel: str
    values: tuple[tuple[float | None, ...], ...]
    extent: tuple[int, int]
    columns: tuple[str, ...] | None = None
    rows: tuple[str, ...] | None = None
    numbers: bool = False


@dataclass(frozen=True)
class Picture:
    """Charts under one title, and a sentence on what they show."""

    title: str
    note: str
    lines: tuple[LineChart, ...] = ()
    maps: tuple[HeatMap, ...] = ()


def ticks(categories: Sequence[str], most: int) -> list[tuple[int, str]]:
    """At most `most` of the categories, evenly spaced, with their positions."""
    step = max(1, -(-len(categories) // most))  # rounded up
    return [(at, categories[at]) for at in range(0, len(categories), step)]
