"""Name patterns of specs: `{i}` for a number, `*` up to the next dot, groups for alternatives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

Captures = Mapping[str, int]

# Names, numbers by a name (not that of a star), stars.
_PLAIN = re.compile(r"(?:[^(){}*|\\]|\{(?!star)[A-Za-z_]+\}|\*)*")


@dataclass(frozen=True)
class Match:
    """What a pattern captured: numbers by name, and the texts that its stars stand for."""

    numbers: Captures
    stars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """A name with `{i}` for a number, `*` for anything up to the next dot.

    `(a|b)` is either, `(a)?` may be missing.
    """

    text: str

    def match(self, name: str) -> Match | None:
        """What `{i}` and `*` stand for when `name` matches as a whole, else None."""
        found = re.fullmatch(self._regex, name)
        if found is None:
            return None
        groups = {k: v for k, v in found.groupdict().items() if v is not None}
        numbers = {k: int(v) for k, v in groups.items() if not k.startswith("star")}
        return Match(numbers, tuple(v for k, v in groups.items() if k.startswith("star")))

    def check(self) -> None:
        """Raise ValueError where the text isn't a pattern."""
        if _PLAIN.fullmatch(self.text):
            return  # without groups nothing can be wrong, and compiling takes its time
        try:
            re.compile(self._regex)
        except re.error as error:
            raise ValueError(f"{self.text!r} is not a name: {error}") from error

    @cached_property
    def _regex(self) -> str:
        seen: set[str] = set()
        out, depth = "", 0
        for at, piece in enumerate(re.split(r"(\{\w+\}|\*|\(|\)\??|\|)", self.text)):
            if piece == "*":
                out += rf"(?P<star{at}>[^.]*)"
            elif re.fullmatch(r"\{\w+\}", piece):
                name = piece[1:-1]
                out += f"(?P={name})" if name in seen else rf"(?P<{name}>\d+)"
                seen.add(name)
            elif piece == "(":
                out, depth = out + "(?:", depth + 1
            elif piece in (")", ")?"):
                out, depth = out + piece, depth - 1
            elif piece == "|" and depth > 0:
                out += piece
            else:
                out += re.escape(piece)
        return out


def any_exists(patterns: Iterable[Pattern], names: Iterable[str]) -> bool:
    """Is there a tensor or module with such a name?"""
    modules = {n.rpartition(".")[0] for n in names} | set(names)
    return any(p.match(name) for p in patterns for name in modules)
