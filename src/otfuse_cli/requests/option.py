"""What a request's field is on the command line: declared once, with the field itself.

A field that `option` makes carries its flag, help, default and range; the command line is built
from these, help tells the default that they hold, and `Options` refuses what lies outside. Imports
neither Typer nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from math import inf, isfinite
from typing import Any, NamedTuple

from ..errors import UsageError

# Sections of the help pages, in their order.
PANELS = ("Pruning", "Fusion", "Matching", "Inputs", "Output", "Run")
PRUNING, FUSION, MATCHING, INPUTS, OUTPUT, RUN = PANELS


class Option(NamedTuple):
    """An option; an argument where there are no flags.

    Attributes:
        flags: `--ridge`; `--refit/--no-refit` for both ways of a switch.
        text: What help says, without the default.
        panel: Its section of the help page.
        kind: The type of a value as it is typed.
        metavar: What stands for a value in the help.
        default: What holds where it isn't given; None where `said` tells.
        said: The default in words, where it depends on something.
        choices: The only values, where the set is closed.
        low: The least number.
        high: The largest number.
        above: Whether a number must be more than `low`.
        several: Whether it takes several values.
        common: Whether the short help of a command with many options shows it.
    """

    flags: tuple[str, ...]
    text: str
    panel: str = RUN
    kind: type = str
    metavar: str = ""
    default: Any = None
    said: str | None = None
    choices: tuple[str, ...] = ()
    low: float = -inf
    high: float = inf
    above: bool = False
    several: bool = False
    common: bool = False

    @property
    def help(self) -> str:
        """What help says: the default comes last, the same way for all."""
        said = self.said
        if said is None and self.kind is not bool and self.default not in (None, ()):
            said = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return self.text if said is None else f"{self.text} [default: {said}]"

    def check(self, value: Any) -> None:
        """Refuse a value outside the choices or the range.

        Raises:
            UsageError: It is outside.
        """
        if self.choices and value not in self.choices:
            raise UsageError(
                f"unknown value {value!r}",
                where=self.flags[0],
                fix=f"use one of: {', '.join(self.choices)}",
            )
        if (self.low, self.high) == (-inf, inf):
            return
        beyond = value < self.low or value > self.high or (self.above and value == self.low)
        if beyond or not isfinite(value):
            raise UsageError(
                "out of range", where=f"{self.flags[0]} {value}", fix=f"use {self._range()}"
            )

    def _range(self) -> str:
        number = "a whole number" if self.kind is int else "a number"
        if self.high < inf:
            return f"{number} from {self.low:.10g} to {self.high:.10g}"
        return f"{number} above {self.low:g}" if self.above else f"{number} from {self.low:g} on"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Options:
    """A group of options; values outside an option's choices or range are refused."""

    def __post_init__(self) -> None:
        for item in fields(self):
            declared, value = option_of(item), getattr(self, item.name)
            if declared is not None and value is not None:
                declared.check(value)


def option(default: Any, /, *flags: str, text: str, **more: Any) -> Any:
    """A field of a request that is an option; see `Option`. MISSING as default: it is required."""
    shown = more.pop("default", None if default is MISSING else default)
    return field(default=default, metadata={"option": Option(flags, text, default=shown, **more)})


def choice(default: Any, flag: str, choices: Sequence[str], *, text: str, **more: Any) -> Any:
    """An option with a closed set of values."""
    return option(
        default, flag, text=text, metavar="|".join(choices), choices=tuple(choices), **more
    )


def switch(default: Any, *flags: str, text: str, **more: Any) -> Any:
    """An option without a value."""
    return option(default, *flags, text=text, kind=bool, **more)


def argument(metavar: str, *, text: str, several: bool = False) -> Any:
    """A field that stands on the command line by its position: a file."""
    from pathlib import Path

    return option(MISSING, text=text, kind=Path, metavar=metavar, several=several)


def unset(owner: type, name: str, default: Any = None, **changes: Any) -> Any:
    """The option of another class, not given unless `default` says so.

    Help tells the other's default, which holds then.
    """
    declared = _declared(owner, name)
    if default is not None:
        changes["default"] = default
    return field(default=default, metadata={"option": declared._replace(**changes)})


def needed(owner: type, name: str) -> Any:
    """The option of another class, for a request that can't do without it."""
    declared = _declared(owner, name)
    return field(metadata={"option": declared._replace(default=None, said=None)})


def _declared(owner: type, name: str) -> Option:
    declared: Option = owner.__dataclass_fields__[name].metadata["option"]  # type: ignore[attr-defined]
    return declared


def option_of(item: Field[Any]) -> Option | None:
    """What a field is on the command line; None for what only the library takes."""
    declared: Option | None = item.metadata.get("option")
    return declared
