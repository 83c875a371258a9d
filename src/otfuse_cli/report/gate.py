"""The gate: a report passes if no space costs or moves more than a limit."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import GateFailed
from .records import Report


def gate(report: Report, max_cost: float | None, max_moved: float | None = None) -> Report:
    """`report` itself, if no space costs more than `max_cost` or moves more than `max_moved`.

    What was not measured passes no gate.

    Raises:
        GateFailed: One does; carries the report.
    """
    for option, noun, limit, values in (
        ("--max-cost", "cost", max_cost, [s.ot_cost for s in report.spaces]),
        ("--max-moved", "move", max_moved, [s.moved_fraction for s in report.spaces]),
    ):
        if limit is not None:
            _hold(report, option, noun, limit, values)
    return report


def _hold(
    report: Report, option: str, noun: str, limit: float, values: Sequence[float | None]
) -> None:
    """Every space's value against one limit."""
    measured = [
        (value, s) for value, s in zip(values, report.spaces, strict=True) if value is not None
    ]
    above = [(value, space) for value, space in measured if value > limit]
    if above:
        value, worst = max(above, key=lambda pair: pair[0])
        raise GateFailed(
            f"{len(above)} of {len(report.spaces)} spaces {noun} more than {limit:g}",
            where=f"{worst.id} (source {worst.source}): {value:.6g}",
            why=option,
            report=report,
        )
    if option == "--max-moved" and 0 < len(measured) < len(values):
        at = next(s.id for s in report.spaces if s.moved_fraction is None)
        raise GateFailed(
            "units of different number don't stay in place",
            where=f"{at} and {len(values) - len(measured) - 1} more spaces",
            why=option,
            fix="hold models of different widths against --max-cost",
            report=report,
        )
    if not measured:
        what = "no OT costs" if noun == "cost" else "no moved fractions"
        raise GateFailed(
            f"{what} to hold against {option}",
            why="the report has none, as after --align none",
            fix="compare two checkpoints, or give the report of an aligned fusion",
            report=report,
        )
