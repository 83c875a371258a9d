"""Options that are written as text: numbers by commas, names with shares. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan

from ..errors import UsageError


def parse_weights(text: str) -> tuple[float, ...]:
    """`0.7,0.3` as numbers.

    Raises:
        UsageError: A part isn't a number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            "weights must be numbers, separated by commas",
            where=f"--weights {text}",
            fix="one per checkpoint, for example --weights 0.7,0.3",
        ) from error


def parse_widths(text: str) -> tuple[float, ...]:
    """`1,1.5,2` as numbers.

    Raises:
        UsageError: A part is no number above 0.
    """
    try:
        widths = tuple(float(part) for part in text.split(","))
    except ValueError:
        widths = (nan,)
    if not all(isfinite(width) and width > 0 for width in widths):
        raise UsageError(
            "widths are numbers above 0, separated by commas",
            where=f"--widths {text}",
            fix="for example --widths 1,1.25,1.5,2",
        )
    return widths


def parse_shape(text: str) -> tuple[int, ...]:
    """`1,28,28` as numbers.

    Raises:
        UsageError: A part isn't a positive whole number.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            "a shape is whole numbers, separated by commas",
            where=f"--input-shape {text}",
            fix="for example --input-shape 1,28,28",
        )
    return tuple(int(part) for part in parts)


def parse_shares(texts: Sequence[str]) -> dict[str, float]:
    """`fc1=0.9`, repeated, as numbers by name.

    Raises:
        UsageError: A part is missing, isn't a number, or a name comes twice.
    """
    shares: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            share = float(number)
        except ValueError:
            share = nan
        if not name or not isfinite(share):
            raise UsageError(
                "a layer and its share belong together",
                where=f"--layer {text}",
                fix="for example --layer fc1=0.9",
            )
        if shares.setdefault(name, share) != share:
            raise UsageError(
                "two amounts for the same layer", where=f"--layer {text}", fix="give one of them"
            )
    return shares
