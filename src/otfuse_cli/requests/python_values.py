"""What Python callers write for an option, brought to the plain value that is meant, or refused.

Numbers of numpy and torch, paths, sets and generators mean what they say; a text is never a flag
or a number. Nothing of ours but `errors` and names of files may be imported here, torch never.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from operator import index
from pathlib import Path
from typing import Any, get_type_hints

from ..errors import UsageError
from ..remote.location import RemotePath, location

Reader = Callable[[str, Any], Any]

# The longest text of a value that messages repeat.
_SHOWN = 60


def options_of(
    kind: type, given: Mapping[str, Any], special: Mapping[str, Reader] | None = None
) -> dict[str, Any]:
    """Options of a dataclass as its fields have them; None stands for one that was not given.

    Args:
        kind: The dataclass.
        given: Values by the names of its fields.
        special: Readers of fields whose type says too little, by name.

    Raises:
        UsageError: No such option, or a value that can't be meant.
    """
    hints = _types(kind)
    default = {
        f.name: f.default is not MISSING or f.default_factory is not MISSING for f in fields(kind)
    }
    values = {}
    for name, value in given.items():
        if name not in default:
            near = get_close_matches(name, default, 1)
            raise UsageError(
                "no such option",
                where=f"{name}=...",
                fix=f"did you mean {near[0]}?" if near else f"use one of: {', '.join(default)}",
            )
        if value is None and default[name]:
            continue
        reader = (special or {}).get(name) or READERS[hints[name]]
        values[name] = reader(name, value)
    return values


@cache  # reading annotations takes milliseconds, and a class never changes
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def flag(name: str, value: Any) -> bool:
    """True or False, numpy's as well."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise bad_value(name, value, "True or False is meant")


def whole(name: str, value: Any) -> int:
    """A whole number: of Python, numpy or torch."""
    if not _is_flag(value):
        try:
            return index(value)
        except (TypeError, ValueError):
            pass
    raise bad_value(name, value, "a whole number is meant")


def real(name: str, value: Any) -> float:
    """A number: of Python, numpy or torch, a fraction."""
    single = getattr(value, "ndim", 0) == 0 and hasattr(type(value), "__float__")
    if single and not _is_flag(value):
        try:
            return float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise bad_value(name, value, "a number is meant")


def text(name: str, value: Any) -> str:
    """A text."""
    if isinstance(value, str):
        return str(value)
    raise bad_value(name, value, "a text is meant")


def text_or_path(name: str, value: Any) -> str:
    """A text that isn't empty, or a path as one."""
    if isinstance(value, os.PathLike):
        return str(path(name, value))
    said = text(name, value)
    if not said:
        raise bad_value(name, value, "it is empty")
    return said


def path(name: str, value: Any) -> Path:
    """A path, given as one or as text."""
    if isinstance(value, RemotePath):
        return value
    if isinstance(value, str | os.PathLike):
        where = os.fspath(value)
        if isinstance(where, str) and where:
            return location(where)
    raise bad_value(name, value, "a path is meant")


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Several texts; one stands for itself."""
    return (str(value),) if isinstance(value, str) else tuple(many(name, value, text))


def wholes(name: str, value: Any) -> tuple[int, ...]:
    """Several whole numbers; one stands for itself."""
    if hasattr(type(value), "__index__") and getattr(value, "ndim", 0) == 0:
        return (whole(name, value),)
    return tuple(many(name, value, whole))


def many(name: str, value: Any, one: Reader) -> list[Any]:
    """The values of a sequence, a set, an array or a generator; those of a set in order."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise bad_value(name, value, "several values are meant")
    try:
        items = list(value)
    except (TypeError, RuntimeError) as error:  # an array without axes
        raise bad_value(name, value, "several values are meant") from error
    items = [one(name, item) for item in items]
    return sorted(items) if isinstance(value, Set) else items


def bad_value(name: str, value: Any, why: str, fix: str | None = None) -> UsageError:
    """A value that can't be meant."""
    return UsageError(
        f"{name} can't be {_said(value)}", where=f"{name}={_shown(value)}", why=why, fix=fix
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def _said(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    """The value, where it is short; its kind where it would fill the screen."""
    if not isinstance(value, str | bytes | int | float | Collection | Path | None):
        return type(value).__name__
    if isinstance(value, Collection) and not isinstance(value, str | bytes) and len(value) > 4:
        return f"{type(value).__name__} of {len(value)}"
    line = " ".join(repr(value).split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


READERS: Mapping[Any, Reader] = {
    bool: flag,
    bool | None: flag,
    int: whole,
    int | None: whole,
    float: real,
    float | None: real,
    str: text,
    str | None: text,
    Path: path,
    Path | None: path,
    tuple[str, ...]: texts,
    tuple[int, ...] | None: wholes,
}
