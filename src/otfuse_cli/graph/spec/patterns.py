"""Name patterns of specs: `{i}` for a number, `*` up to the next dot, groups for alternatives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

Captures = Mapping[str, int]

# Names, numbers by a name (not that of a star), stars.
_PLAIN = re.compile(r"(?:[^(){}*|\\]|\{(?!star)[A-Za-z_]+\}|\*)*")
# What makes a text more than a name.
_SIGNS = re.compile(r"[{*()]")


@dataclass(frozen=True)
class Captured:
    """What a pattern captured: numbers by name, and the texts that its stars stand for."""

    numbers: Captures
    stars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """A name with `{i}` for a number, `*` for anything up to the next dot.

    `(a|b)` is either, `(a)?` may be missing.
    """

    text: str

    def match(self, name: str) -> Captured | None:
        """What `{i}` and `*` stand for when `name` matches as a whole, else None."""
        if self.literal:
            return Captured({}) if name == self.text else None
        if not name.startswith(self._start):
            return None
        match = self._compiled.fullmatch(name)
        if match is None:
            return None
        numbers: dict[str, int] = {}
        stars: list[str] = []
        for key, text in match.groupdict().items():
            if text is None:  # inside an alternative that was not taken
                continue
            if key.startswith("star"):
                stars.append(text)
            else:
                numbers[key] = int(text)
        return Captured(numbers, tuple(stars))

    def check(self) -> None:
        """Raise ValueError where the text isn't a pattern."""
        if _PLAIN.fullmatch(self.text):
            return  # without groups nothing can be wrong, and compiling takes its time
        try:
            re.compile(self._regex)
        except re.error as error:
            raise ValueError(f"{self.text!r} is not a name: {error}") from error

    @cached_property
    def literal(self) -> bool:
        """Whether it matches its own text and nothing else."""
        return _SIGNS.search(self.text) is None

    @cached_property
    def _start(self) -> str:
        """What every name begins with that matches; nothing where a group has alternatives."""
        return "" if "|" in self.text else _SIGNS.split(self.text, maxsplit=1)[0]

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self._regex)

    @cached_property
    def _regex(self) -> str:
        seen: set[str] = set()
        out, depth = "", 0
        for at, piece in enumerate(re.split(r"(\{\w+\}|\*|\(|\)\??|\|)", self.text)):
            if piece == "*":
                out += rf"(?P<star{at}>[^.]*)"
            elif re.fullmatch(r"\{\w+\}", piece):
                name = piece[1:-1]
                # The same number a second time: `{i}.conv{i}` has equal numbers.
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


class Present:
    """Names of tensors and of the modules that hold them, to ask which patterns meet one."""

    def __init__(self, names: Iterable[str]) -> None:
        tensors = set(names)
        self._names = tensors | {name.rpartition(".")[0] for name in tensors}
        self._met: dict[str, bool] = {}

    def __contains__(self, pattern: Pattern) -> bool:
        if pattern.literal:
            return pattern.text in self._names
        if pattern.text not in self._met:
            self._met[pattern.text] = any(pattern.match(name) for name in self._names)
        return self._met[pattern.text]

    def any(self, patterns: Iterable[Pattern]) -> bool:
        """Is there a tensor or module with a name of one of these patterns?"""
        return any(pattern in self for pattern in patterns)

    def all(self, patterns: Iterable[Pattern]) -> bool:
        """Is there a tensor or module for every one of these patterns?"""
        return all(pattern in self for pattern in patterns)
