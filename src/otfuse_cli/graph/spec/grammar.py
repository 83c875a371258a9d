"""The spec format: a layer graph written by hand, one line per module (docs/spec.md).

`OUT <- IN` says that axis 0 of a weight is OUT and axis 1 is IN; `IN -> OUT` the reverse
(embeddings, transposed convolutions); a bare `SPACE` is one number per unit (norms); a list
`[A, B, ...]` gives every axis of a tensor, each with its roles in front where it isn't added.
This room parses documents; `bind` fits a spec to the shapes of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import IncompatibleModels, UnreadableInput
from ..model import Role
from .expressions import check_expression
from .patterns import Pattern


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
        roles: For a list, the roles written in front of every axis; none where there are none.
    """

    patterns: tuple[Pattern, ...]
    text: str
    out: str | None = None
    inp: str | None = None
    reverse: bool = False
    axes: tuple[str, ...] = ()
    roles: tuple[frozenset[Role], ...] = ()

    @property
    def label(self) -> str:
        """The line as a message shows it."""
        return f"`{', '.join(p.text for p in self.patterns)}: {self.text}`"


@dataclass(frozen=True)
class Same:
    """`LEFT = RIGHT unless NAME, NAME`: two spaces are one where no such module exists.

    `LEFT = RIGHT if sizes agree`: where they are as large, too.
    """

    left: str
    right: str
    unless: tuple[str, ...] = ()
    if_sizes_agree: bool = False


@dataclass(frozen=True)
class PinRule:
    """`SPACE: REASON unless NAME, NAME`: units that stay in place where no such module exists."""

    space: Pattern
    reason: str
    unless: tuple[Pattern, ...] = ()


@dataclass(frozen=True)
class TieRule:
    """`TENSOR = OTHER unless NAME, NAME`: a tensor that also plays the part of a missing one."""

    tensor: str
    other: str
    unless: tuple[Pattern, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A parsed spec.

    Attributes:
        name: File stem or family name.
        lines: In file order; the first that matches a tensor decides.
        chain: Name patterns of a plain feed-forward net, instead of or before `lines`.
        sizes: Sizes that the shapes don't determine, by name or pattern: a number, or the keys of
            config.json that give it.
        check: Sizes, or products of sizes, that must be as given or as config.json says.
        same: Conditional identifications of spaces.
        act: `relu` or `other`: the function between layers.
        require: Names that must exist (families only).
        norms: `batch`, `layer`, `rms`: their kind; `uniform`: BatchNorm behind every layer, or
            behind none. Only `rms` means anything outside of families.
        pinned: Spaces that stay in place, and why.
        tied: Tensors that stand for others which the file leaves out.
        family: The bundled family that this spec is, with sizes of its own.
        either: Names of which a network has one (families only).
        models: What a config.json may call such a model (families only).
        assumes: What a network with these names is taken to compute, in plain words.
    """

    name: str
    lines: tuple[Line, ...] = ()
    chain: tuple[Pattern, ...] = ()
    sizes: Mapping[str, int | tuple[str, ...]] = field(default_factory=dict)
    check: Mapping[str, int | tuple[str, ...]] = field(default_factory=dict)
    same: tuple[Same, ...] = ()
    act: str = "other"
    require: tuple[Pattern, ...] = ()
    norms: str = ""
    pinned: tuple[PinRule, ...] = ()
    tied: tuple[TieRule, ...] = ()
    family: str = ""
    either: tuple[tuple[Pattern, ...], ...] = ()
    models: tuple[str, ...] = ()
    assumes: str = ""


# What a document may say at its top, and the keys of which it needs one.
_KEYS = {
    "name", "layers", "chain", "sizes", "same", "act", "require", "norms", "description",
    "pinned", "tied", "family", "check", "assumes", "either", "models",
}  # fmt: skip
_BODY = {"layers", "chain", "family"}


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
        # libyaml's, where PyYAML was built with it: ten times as fast.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents = [d for d in yaml.load_all(text, Loader=loader) if d is not None]
    except yaml.YAMLError as error:
        raise UnreadableInput(
            "the spec is not valid YAML", where=where, why=" ".join(str(error).split())
        ) from error
    if not documents:
        raise _bad(where, "it is empty", "write `layers:` or `chain:`")
    return tuple(_document(d, where, name) for d in documents)


def _document(data: Any, where: str, name: str) -> Spec:
    if not isinstance(data, dict) or not (_BODY & data.keys()):
        raise _bad(where, "it has neither `layers:` nor `chain:`", "see docs/spec.md")
    if unknown := sorted(str(k) for k in data.keys() - _KEYS):
        raise _bad(where, f"unknown key {unknown[0]!r}", f"keys are {', '.join(sorted(_KEYS))}")
    layers = data.get("layers") or {}
    if not isinstance(layers, dict):
        raise _bad(where, "`layers` must map names to axes", "write `conv1: c1 <- in`")
    act = _one_of(data, "act", ("other", "relu"), where)
    pinned = data.get("pinned") or {}
    if not isinstance(pinned, dict):
        raise _bad(where, "`pinned` must map spaces to reasons", "write `pinned: {d: rotary}`")
    groups = _strings(data.get("either"), "either", where)
    return Spec(
        name=str(data.get("name", name)),
        lines=tuple(_line(str(k), v, where) for k, v in layers.items()),
        chain=_patterns(_strings(data.get("chain"), "chain", where), where),
        sizes=_sizes(data.get("sizes") or {}, "sizes", where),
        check=_sizes(data.get("check") or {}, "check", where),
        same=tuple(_same(s, where) for s in _strings(data.get("same"), "same", where)),
        act=act,
        require=_patterns(_strings(data.get("require"), "require", where), where),
        norms=_one_of(data, "norms", ("", "uniform", "batch", "layer", "rms"), where),
        pinned=tuple(_pinned(str(k), str(v), where) for k, v in pinned.items()),
        tied=tuple(_tied(s, where) for s in _strings(data.get("tied"), "tied", where)),
        family=str(data.get("family", "")),
        either=tuple(_patterns(group.split(","), where) for group in groups),
        models=tuple(_strings(data.get("models"), "models", where)),
        assumes=str(data.get("assumes", "")).strip(),
    )


def _one_of(data: Mapping[str, Any], key: str, values: tuple[str, ...], where: str) -> str:
    value = data.get(key, values[0])
    if value not in values:
        raise _bad(where, f"{key}: {value!r}", f"use {' or '.join(v for v in values if v)}")
    return str(value)


def _sizes(sizes: Any, key: str, where: str) -> dict[str, int | tuple[str, ...]]:
    fix = f"write `{key}: {{h: 12}}`"
    if not isinstance(sizes, dict):
        raise _bad(where, f"`{key}` must map spaces to positive numbers", fix)
    parsed: dict[str, int | tuple[str, ...]] = {}
    for space, value in sizes.items():
        keys = [value] if isinstance(value, str) else value
        if isinstance(keys, list) and keys and all(isinstance(k, str) for k in keys):
            parsed[str(space)] = tuple(keys)
        # YAML's `true` is an integer to Python.
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            parsed[str(space)] = value
        else:
            why = f"`{key}` must map spaces to positive numbers or keys of config.json: {value!r}"
            raise _bad(where, why, fix)
        _patterns([str(space)], where)
    return parsed


def _strings(value: Any, key: str, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str | int) for v in value):
        raise _bad(where, f"`{key}` must be a list of names", f"write `{key}: [a, b]`")
    return [str(v) for v in value]


def _patterns(texts: Iterable[str], where: str) -> tuple[Pattern, ...]:
    patterns = tuple(Pattern(text.strip()) for text in texts if text.strip())
    for pattern in patterns:
        try:
            pattern.check()
        except ValueError as error:
            raise _bad(where, str(error), "see docs/spec.md") from error
    return patterns


def _line(key: str, value: Any, where: str) -> Line:
    patterns = _patterns(key.split(","), where)
    if isinstance(value, list):
        texts = tuple(str(v) for v in value)
        axes, roles = zip(*map(_entry, texts), strict=True) if texts else ((), ())
        line = Line(patterns, f"[{', '.join(texts)}]", axes=axes, roles=roles)
    else:
        text = str(value).strip()
        # Split at the arrow or, where there is none, at the end: three parts in any case.
        left, arrow, right = map(str.strip, re.split(r"(<-|->|$)", text, maxsplit=1))
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
                check_expression(expression)
            except ValueError as error:
                raise _bad(where, f"in {line.label}: {error}", "see docs/spec.md") from error
    return line


def _entry(text: str) -> tuple[str, frozenset[Role]]:
    """One axis of a list: words for its roles, then the expression."""
    words = text.split()
    roles = []
    while len(words) > 1 and words[0] in set(Role):
        roles.append(Role(words.pop(0)))
    return " ".join(words), frozenset(roles)


# The end of a rule: names of modules where it doesn't hold.
_UNLESS = r"(?:\s+unless\s+(.+?))?\s*"


def _same(text: str, where: str) -> Same:
    match = re.fullmatch(r"\s*(\S+)\s*=\s*(\S+?)(\s+if sizes agree)?" + _UNLESS, text)
    if match is None:
        raise _bad(where, f"can't read {text!r}", "write `s0 = s1 unless layer1.0.shortcut.0`")
    left, right, agree, unless = match.groups()
    return Same(left, right, _names(unless), agree is not None)


def _tied(text: str, where: str) -> TieRule:
    match = re.fullmatch(r"\s*(\S+)\s*=\s*(\S+?)" + _UNLESS, text)
    if match is None:
        raise _bad(where, f"can't read {text!r}", "write `wte.weight = lm_head.weight unless head`")
    left, right, unless = match.groups()
    return TieRule(left, right, _patterns(_names(unless), where))


def _pinned(space: str, text: str, where: str) -> PinRule:
    reason, _, unless = text.partition(" unless ")
    (pattern,) = _patterns([space], where)
    return PinRule(pattern, reason.strip(), _patterns(_names(unless), where))


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(n.strip() for n in (text or "").split(",") if n.strip())


def _bad(where: str, why: str, fix: str) -> IncompatibleModels:
    return IncompatibleModels("not a valid spec", where=where, why=why, fix=fix)
