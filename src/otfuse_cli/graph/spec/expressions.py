"""Axis expressions as text: captured numbers put in, ranges written out, the rest parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..axes import Axis, Fixed, Unit, concat, product
from .patterns import Captures, Pattern

# `i`, `i-1`, `max i`, between braces or as the end of a range.
_NUMBER = r"((?:max )?[A-Za-z_]\w*?)(?:([+-])(\d+))?"
_CAPTURED = re.compile(r"\{" + _NUMBER + r"\}")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_RANGE = re.compile(r"\{([^{}]*?)\.\.([^{}]*)\}")
_TERM = re.compile(r"(\s*\+\s*)?((?:[\w.]|\{[^{}]*\})+)")


def substitute(text: str, captures: Captures) -> str:
    """Replace `{i}`, `{i-1}`, `{i+2}`, `{max i}` by captured numbers.

    `{max i}` is the largest number that i stands for anywhere: `captures["max i"]`.

    Raises:
        ValueError: A name that nothing captured.
    """
    return "".join([p if isinstance(p, str) else str(p.value(captures)) for p in _pieces(text)])


class _Number(NamedTuple):
    """A captured number with what is added to it: `i-1`."""

    name: str
    offset: int

    @classmethod
    def of(cls, match: re.Match[str]) -> _Number:
        name, sign, offset = match.groups()
        return cls(name, int(f"{sign}{offset}" if sign else 0))

    def value(self, captures: Captures) -> int:
        if self.name not in captures:
            raise ValueError(f"{{{self.name}}} is not captured by the name pattern")
        return captures[self.name] + self.offset


@lru_cache(maxsize=4096)  # the texts of a spec, each met once per tensor of its line
def _pieces(text: str) -> tuple[str | _Number, ...]:
    """`b{i-1}.x` as its fixed texts and its numbers, in order."""
    pieces: list[str | _Number] = []
    done = 0
    for match in _CAPTURED.finditer(text):
        pieces += (text[done : match.start()], _Number.of(match))
        done = match.end()
    return (*pieces, text[done:])


def write_out(text: str, captures: Captures, made: Collection[str]) -> str:
    """Write out the ranges of a concatenation: `s + d{1..3}` is `s + (d1 + d2 + d3)`.

    An end may be a captured number (`{1..j-1}`) or missing (`{1..}`: every space of that name
    that a layer makes, in order). An empty range leaves nothing.

    Raises:
        ValueError: An end that isn't a number, or an empty range with nothing beside it.
    """

    def term(match: re.Match[str]) -> str:
        plus, name = match[1] or "", match[2]
        ranges = list(_RANGE.finditer(name))
        if not ranges:
            return match[0]
        if len(ranges) > 1:
            raise ValueError(f"{name!r} has more than one range")
        low, high = ranges[0].groups()
        before = substitute(name[: ranges[0].start()], captures)
        after = substitute(name[ranges[0].end() :], captures)
        first = _end(low, captures)
        if high.strip():
            numbers = list(range(first, _end(high, captures) + 1))
        else:
            matches = map(Pattern(f"{before}{{n}}{after}").match, made)
            there = {match.numbers["n"] for match in matches if match is not None}
            numbers = sorted(n for n in there if n >= first)
        if not numbers and not plus:
            raise ValueError(f"no number is in the range of {name!r}")
        terms = " + ".join(f"{before}{n}{after}" for n in numbers)
        return f"{plus}({terms})" if numbers else ""

    return _TERM.sub(term, text)


def _end(text: str, captures: Captures) -> int:
    text = text.strip()
    if text.isdigit():
        return int(text)
    match = re.fullmatch(_NUMBER, text)
    if match is None:
        raise ValueError(f"{text!r} is not the end of a range")
    return _Number.of(match).value(captures)


@dataclass(frozen=True)
class Expression:
    """A parsed axis expression and the families it declares (space to index space)."""

    axis: Axis
    families: Mapping[str, str]


def parse_expression(text: str, captures: Captures, *, made: Collection[str] = ()) -> Expression:
    """Parse one axis expression; `in` and `out` come back as units of those names.

    Args:
        text: As written in a spec.
        captures: What `{i}` stands for.
        made: Spaces that layers make, for ranges without an end.

    Raises:
        ValueError: Not an expression.
    """
    if ".." in text:
        text = write_out(text, captures, made)
    text = substitute(text, captures)
    if _NAME.fullmatch(text):  # most axes of most specs
        return Expression(Unit(text), {})
    return _parsed(text)


@lru_cache(maxsize=4096)  # a block has some dozen: enough for a network of hundreds
def _parsed(text: str) -> Expression:
    """The same few expressions stand for all tensors of a block."""
    return _Parser(text).parse()


def check_expression(text: str) -> None:
    """Raise ValueError where `text` can't be an expression, whatever is captured."""
    _Parser(re.sub(r"\{[^}]*\}", "0", text)).parse()  # a number is good wherever a capture is


class _Parser:
    """cat := prod ('+' prod)*; prod := atom ('*' atom)*; atom := n | x | x@h | '(' cat ')'."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [t for t in re.split(r"\s*([*+()@])\s*|\s+", text) if t]
        self.at = 0
        self.families: dict[str, str] = {}

    def parse(self) -> Expression:
        axis = self._cat()
        if self.at != len(self.tokens):
            raise ValueError(f"unexpected {self.tokens[self.at]!r} in {self.text!r}")
        return Expression(axis, self.families)

    def _peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _take(self) -> str:
        token = self._peek()
        if token is None:
            raise ValueError(f"{self.text!r} ends too early")
        self.at += 1
        return token

    def _joined(self, sign: str, part: Callable[[], Axis]) -> list[Axis]:
        parts = [part()]
        while self._peek() == sign:
            self._take()
            parts.append(part())
        return parts

    def _cat(self) -> Axis:
        return concat(*self._joined("+", self._prod))

    def _prod(self) -> Axis:
        return product(*self._joined("*", self._atom))

    def _atom(self) -> Axis:
        token = self._take()
        if token == "(":
            inner = self._cat()
            if self._take() != ")":
                raise ValueError(f"a bracket is not closed in {self.text!r}")
            return inner
        if token.isdigit():
            if int(token) < 1:
                raise ValueError(f"a size must be positive in {self.text!r}")
            return Fixed(int(token))
        if not _NAME.fullmatch(token):
            raise ValueError(f"{token!r} is not a space name in {self.text!r}")
        if self._peek() == "@":
            self._take()
            self.families[token] = self._take()
        return Unit(token)
