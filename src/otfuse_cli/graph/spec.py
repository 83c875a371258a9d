"""The spec format: a layer graph written by hand, one line per module (docs/spec.md).

`OUT <- IN` says that axis 0 of a weight is OUT and axis 1 is IN; `IN -> OUT` the reverse
(embeddings, transposed convolutions); a bare `SPACE` is one number per unit (norms); a list
`[A, B, ...]` gives every axis of a tensor. `*` multiplies (outer first), `+` concatenates, numbers
are fixed positions, `in` and `out` never move, `x@h` is a family: one map for each unit of h.
This room parses; `bind` fits a spec to the shapes of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import IncompatibleModels, UnreadableInput
from .axes import Axis, Fixed, Unit, concat, product

PINNED = {"in": "input", "out": "output"}

Captures = Mapping[str, int]


@dataclass(frozen=True)
class Match:
    """What a pattern captured: numbers by name, and the texts that its stars stand for."""

    numbers: Captures
    stars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """A module or tensor name with `{i}` for a number and `*` for anything up to the next dot."""

    text: str

    def match(self, name: str) -> Match | None:
        """What `{i}` and `*` stand for when `name` matches as a whole, else None."""
        found = re.fullmatch(self._regex, name)
        if found is None:
            return None
        groups = found.groupdict()
        numbers = {k: int(v) for k, v in groups.items() if not k.startswith("star")}
        return Match(numbers, tuple(v for k, v in groups.items() if k.startswith("star")))

    @cached_property
    def _regex(self) -> str:
        seen: set[str] = set()
        out = ""
        for at, piece in enumerate(re.split(r"(\{\w+\}|\*)", self.text)):
            if piece == "*":
                out += rf"(?P<star{at}>[^.]*)"
            elif piece.startswith("{"):
                name = piece[1:-1]
                out += f"(?P={name})" if name in seen else rf"(?P<{name}>\d+)"
                seen.add(name)
            else:
                out += re.escape(piece)
        return out


@dataclass(frozen=True)
class Line:
    """One line of `layers`: the patterns it is for, and the axes it gives.

    Attributes:
        patterns: Any of these names.
        text: The right-hand side as written, for messages.
        out: Expression of the axis that makes units, None for a list.
        inp: Expression of the axis that reads, None for a bare space or a list.
        reverse: True for `IN -> OUT`: the weight's axis 0 is IN.
        axes: For a list, the expression of every axis.
    """

    patterns: tuple[Pattern, ...]
    text: str
    out: str | None = None
    inp: str | None = None
    reverse: bool = False
    axes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The line as a message shows it."""
        return f"`{', '.join(p.text for p in self.patterns)}: {self.text}`"


@dataclass(frozen=True)
class Same:
    """`LEFT = RIGHT unless NAME, NAME`: two spaces are one where no such module exists."""

    left: str
    right: str
    unless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A parsed spec.

    Attributes:
        name: File stem or family name.
        lines: In file order; the first that matches a tensor decides.
        chain: Name patterns of a plain feed-forward net, instead of or before `lines`.
        sizes: Sizes that the shapes don't determine.
        same: Conditional identifications of spaces.
        act: `relu` or `other`: the function between layers.
        require: Names that must exist (families only).
        uniform_norms: Every layer has a norm, or none has (families only).
    """

    name: str
    lines: tuple[Line, ...] = ()
    chain: tuple[Pattern, ...] = ()
    sizes: Mapping[str, int] | None = None
    same: tuple[Same, ...] = ()
    act: str = "other"
    require: tuple[Pattern, ...] = ()
    uniform_norms: bool = False


_KEYS = {"name", "layers", "chain", "sizes", "same", "act", "require", "norms", "description"}


def load_specs(path: Path) -> tuple[Spec, ...]:
    """Read a YAML file of one or more spec documents.

    Raises:
        UnreadableInput: Missing or not YAML.
        IncompatibleModels: Not a spec.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableInput(
            "can't read the spec", where=str(path), why=str(error), fix="check --arch"
        ) from error
    return parse_specs(text, where=str(path), name=path.stem)


def parse_specs(text: str, *, where: str, name: str) -> tuple[Spec, ...]:
    """Parse YAML text of one or more spec documents; `where` is for messages."""
    import yaml

    try:
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except yaml.YAMLError as error:
        raise UnreadableInput(
            "the spec is not valid YAML", where=where, why=" ".join(str(error).split())
        ) from error
    if not documents:
        raise _bad(where, "it is empty", "write `layers:` or `chain:`")
    return tuple(_document(d, where, name) for d in documents)


def _document(data: Any, where: str, name: str) -> Spec:
    if not isinstance(data, dict) or not ({"layers", "chain"} & data.keys()):
        raise _bad(where, "it has neither `layers:` nor `chain:`", "see docs/spec.md")
    if unknown := sorted(str(k) for k in data.keys() - _KEYS):
        raise _bad(where, f"unknown key {unknown[0]!r}", f"keys are {', '.join(sorted(_KEYS))}")
    layers = data.get("layers") or {}
    if not isinstance(layers, dict):
        raise _bad(where, "`layers` must map names to axes", "write `conv1: c1 <- in`")
    act = data.get("act", "other")
    if act not in ("relu", "other"):
        raise _bad(where, f"act: {act!r}", "use relu or other")
    sizes = data.get("sizes") or {}
    if not isinstance(sizes, dict) or not all(isinstance(v, int) and v > 0 for v in sizes.values()):
        raise _bad(where, "`sizes` must map spaces to positive numbers", "write `sizes: {h: 12}`")
    return Spec(
        name=str(data.get("name", name)),
        lines=tuple(_line(str(k), v, where) for k, v in layers.items()),
        chain=tuple(Pattern(p) for p in _strings(data.get("chain"), "chain", where)),
        sizes={str(k): v for k, v in sizes.items()},
        same=tuple(_same(s, where) for s in _strings(data.get("same"), "same", where)),
        act=act,
        require=tuple(Pattern(p) for p in _strings(data.get("require"), "require", where)),
        uniform_norms=data.get("norms") == "uniform",
    )


def _strings(value: Any, key: str, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str | int) for v in value):
        raise _bad(where, f"`{key}` must be a list of names", f"write `{key}: [a, b]`")
    return [str(v) for v in value]


def _line(key: str, value: Any, where: str) -> Line:
    patterns = tuple(Pattern(p.strip()) for p in key.split(",") if p.strip())
    if isinstance(value, list):
        axes = tuple(str(v) for v in value)
        line = Line(patterns, f"[{', '.join(axes)}]", axes=axes)
    else:
        text = str(value).strip()
        left, arrow, right = (part.strip() for part in re.split(r"(<-|->|$)", text, maxsplit=1))
        if arrow == "<-":
            line = Line(patterns, text, out=left, inp=right)
        elif arrow == "->":
            line = Line(patterns, text, out=right, inp=left, reverse=True)
        else:
            line = Line(patterns, text, out=left)
    if not patterns:
        raise _bad(where, f"a line without a name: {line.text!r}", "write `NAME: OUT <- IN`")
    for expression in (line.out, line.inp, *line.axes):
        if expression is not None:
            try:
                _Parser(re.sub(r"\{[^}]*\}", "0", expression)).parse()
            except ValueError as error:
                raise _bad(where, f"in {line.label}: {error}", "see docs/spec.md") from error
    return line


def _same(text: str, where: str) -> Same:
    found = re.fullmatch(r"\s*(\S+)\s*=\s*(\S+?)\s*(?:\s+unless\s+(.+))?\s*", text)
    if found is None:
        raise _bad(where, f"can't read {text!r}", "write `s0 = s1 unless layer1.0.shortcut.0`")
    left, right, unless = found.groups()
    names = tuple(n.strip() for n in unless.split(",")) if unless else ()
    return Same(left, right, names)


def _bad(where: str, why: str, fix: str) -> IncompatibleModels:
    return IncompatibleModels("not a valid spec", where=where, why=why, fix=fix)


def substitute(text: str, captures: Captures) -> str:
    """Replace `{i}`, `{i-1}`, `{i+2}`, `{max i}` by captured numbers.

    `{max i}` is the largest number that i stands for anywhere: `captures["max i"]`.

    Raises:
        ValueError: A name that nothing captured.
    """

    def number(found: re.Match[str]) -> str:
        name, sign, offset = found.groups()
        if name not in captures:
            raise ValueError(f"{{{name}}} is not captured by the name pattern")
        return str(captures[name] + int(f"{sign}{offset}" if sign else 0))

    return re.sub(r"\{((?:max )?\w+?)(?:([+-])(\d+))?\}", number, text)


@dataclass(frozen=True)
class Expression:
    """A parsed axis expression and the families it declares (space to index space)."""

    axis: Axis
    families: Mapping[str, str]


def parse_expression(text: str, captures: Captures) -> Expression:
    """Parse one axis expression; `in` and `out` come back as units of those names.

    Raises:
        ValueError: Not an expression.
    """
    return _Parser(substitute(text, captures)).parse()


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
        found = [part()]
        while self._peek() == sign:
            self._take()
            found.append(part())
        return found

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
        if not re.fullmatch(r"[A-Za-z_][\w.]*", token):
            raise ValueError(f"{token!r} is not a space name in {self.text!r}")
        if self._peek() == "@":
            self._take()
            self.families[token] = self._take()
        return Unit(token)
