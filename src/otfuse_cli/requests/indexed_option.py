"""`INDEX=VALUE`, repeatable: options that may differ from checkpoint to checkpoint. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index as whole_number
from typing import Any, Generic, TypeVar

from ..errors import UsageError

Value = TypeVar("Value")

# Other text before an `=` belongs to the value: a folder may be called `lr=0.1`.
_INDEXED = re.compile(r"([+-]?\d+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class PerIndex(Generic[Value]):
    """What an option says for each checkpoint.

    Attributes:
        single: Values by the checkpoint's position, from 0.
        rest: The value for all others; None where none was given.
    """

    single: Mapping[int, Value]
    rest: Value | None = None

    def __getitem__(self, position: int) -> Value | None:
        """The value for one checkpoint; None where none was given."""
        return self.single.get(position, self.rest)


def per_index(values: Any, count: int, option: str) -> PerIndex[Any]:
    """Read an option that takes `VALUE` for all checkpoints and `INDEX=VALUE` for one of them.

    Args:
        values: None; one value for all; a mapping of positions to values; or a sequence of texts
            `INDEX=VALUE`, with at most one value for all others among them.
        count: Number of checkpoints.
        option: What messages call it: `--arch`.

    Raises:
        UsageError: No such checkpoint, two values for one, or a position without a value.
    """
    single: dict[int, Any] = {}
    rest: Any = None
    for position, value in _given(values, option):
        where = f"{option} {value if position is None else f'{position}={value}'}"
        if value is None or value == "":
            raise UsageError("a position without a value", where=where, fix=_example(option))
        if position is None:
            if rest is not None:
                raise UsageError(
                    "two values for all checkpoints",
                    where=f"{where}, {option} {rest}",
                    fix=f"say which checkpoint each is for: {_example(option)}",
                )
            rest = value
            continue
        if not 0 <= position < count:
            counted = "is 1 checkpoint" if count == 1 else f"are {count} checkpoints"
            raise UsageError(
                "no such checkpoint",
                where=where,
                why=f"there {counted}, and positions count from 0",
                fix=f"use a position from 0 to {count - 1}" if count > 1 else "use 0",
            )
        if position in single:
            raise UsageError(
                "two values for one checkpoint",
                where=f"{where}, {option} {position}={single[position]}",
                fix="give one of them",
            )
        single[position] = value
    return PerIndex(single, rest)


def _given(values: Any, option: str) -> Iterator[tuple[int | None, Any]]:
    """Positions, None for all, with their values."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield _position(key, option), value
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes):
        for value in values:
            yield _split(value)
    elif values is not None:
        yield _split(values)


def _split(value: Any) -> tuple[int | None, Any]:
    match = _INDEXED.fullmatch(value) if isinstance(value, str) else None
    return (None, value) if match is None else (int(match[1]), match[2])


def _position(key: Any, option: str) -> int:
    try:
        return whole_number(int(key) if isinstance(key, str) else key)
    except (TypeError, ValueError) as error:
        raise UsageError(
            "a position is a whole number",
            where=f"{option}, key {key!r}",
            fix="count the checkpoints from 0, for example {0: ..., 1: ...}",
        ) from error


def _example(option: str) -> str:
    return f"for example {option} 0=..., {option} 1=..."
