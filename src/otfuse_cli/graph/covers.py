"""Which line of a spec covers which tensor, and what it says of each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import IncompatibleModels
from .axes import Axis, Fixed, axis_units, rename_units
from .model import Role
from .spec import PINNED, Line, Match, Pattern, Same, parse_expression, substitute

Shapes = Mapping[str, tuple[int, ...]]

_GAINS = {"weight", "gamma", "gain", "scale", "weight_g"}


@dataclass
class Cover:
    """How one tensor is covered: the line and its captures, and an expression per axis."""

    name: str
    line: Line
    module: str
    key: tuple[object, ...]
    axes: list[Axis]
    roles: list[Role]


def cover_tensors(
    lines: Sequence[Line],
    names: Sequence[str],
    shapes: Shapes,
    aliases: Mapping[str, tuple[str, ...]],
    where: str,
) -> tuple[dict[str, Cover], dict[str, str]]:
    """Cover every non-scalar tensor; also the families declared on the way (space to index).

    Raises:
        IncompatibleModels: A tensor that no line matches, or one whose line doesn't fit it.
    """
    tensors = [name for name in names if shapes[name]]
    reader = _Reader(where, _largest(lines, tensors))
    covers: dict[str, Cover] = {}
    for name in tensors:
        covers[name] = reader.cover(lines, name, shapes[name])
        for alias in aliases.get(name, ()):
            _agree(covers[name], reader.cover(lines, alias, shapes[name]), alias)
    return covers, reader.families


def identify(same: Sequence[Same], covers: Mapping[str, Cover], names: Sequence[str]) -> None:
    """Apply the `same:` lines, in place: one name for spaces that are one."""
    used = dict.fromkeys(u for c in covers.values() for a in c.axes for u in axis_units(a))
    modules = {n.rpartition(".")[0] for n in names} | set(names)
    renamed: dict[str, str] = {}
    for rule in same:
        for space in used:
            found = Pattern(rule.right).match(space)
            if found is None:
                continue
            left = substitute(rule.left, found.numbers)
            unless = (substitute(name, found.numbers) for name in rule.unless)
            if left in used and not any(name in modules for name in unless):
                renamed[space] = left

    def root(space: str) -> str:
        while space in renamed:
            space = renamed[space]
        return space

    table = {space: root(space) for space in used}
    for cover in covers.values():
        cover.axes = [rename_units(axis, table) for axis in cover.axes]


def find_line(lines: Sequence[Line], name: str) -> tuple[int, Match] | None:
    """The first line that matches the tensor `name` or its module, and what it captured."""
    module = name.rpartition(".")[0]
    for index, line in enumerate(lines):
        for pattern in line.patterns:
            found = pattern.match(name) or (pattern.match(module) if module else None)
            if found is not None:
                return index, found
    return None


def _largest(lines: Sequence[Line], names: Sequence[str]) -> dict[str, int]:
    """`max i` for every number i that any line captures."""
    largest: dict[str, int] = {}
    for name in names:
        found = find_line(lines, name)
        for key, value in found[1].numbers.items() if found else ():
            largest[f"max {key}"] = max(value, largest.get(f"max {key}", value))
    return largest


@dataclass
class _Reader:
    """Reads the lines of one spec for one checkpoint, collecting the families they declare."""

    where: str
    largest: Mapping[str, int]
    families: dict[str, str] = field(default_factory=dict)

    def cover(self, lines: Sequence[Line], name: str, shape: tuple[int, ...]) -> Cover:
        module, _, part = name.rpartition(".")
        found = find_line(lines, name)
        if found is None:
            raise IncompatibleModels(
                "a tensor is not covered",
                where=f"{name} {list(shape)}",
                why=f"no line of {self.where} matches its name",
                fix=f"add a line for `{module or name}` (OUT <- IN for a layer, SPACE for a norm)",
            )
        index, match = found
        line = lines[index]
        try:
            axes, roles = self._axes(line, part, shape, match.numbers)
        except ValueError as error:
            raise IncompatibleModels(
                "a line of the spec does not fit",
                where=f"{name} {list(shape)}, {line.label} of {self.where}",
                why=str(error),
                fix="correct the line; docs/spec.md shows worked examples",
            ) from error
        key = (index, tuple(sorted(match.numbers.items())), match.stars)
        return Cover(name, line, module or name, key, axes, roles)

    def _axes(
        self, line: Line, part: str, shape: tuple[int, ...], numbers: Mapping[str, int]
    ) -> tuple[list[Axis], list[Role]]:
        if line.axes:
            if len(line.axes) != len(shape):
                raise ValueError(f"the list has {len(line.axes)} axes, the tensor {len(shape)}")
            axes = [self._parsed(text, numbers) for text in line.axes]
            return axes, [Role.VECTOR] * len(shape)
        assert line.out is not None
        out = self._parsed(line.out, numbers)
        if len(shape) == 1:
            return [out], [_vector_role(part)]
        if line.inp is None:
            raise ValueError("a bare space is for tensors of one axis; write OUT <- IN, or a list")
        pair: list[tuple[Axis, Role]] = [
            (out, Role.PRODUCE),
            (self._parsed(line.inp, numbers), Role.CONSUME),
        ]
        if line.reverse:
            pair.reverse()
        kernel: list[tuple[Axis, Role]] = [(Fixed(n), Role.FIXED) for n in shape[2:]]
        return [axis for axis, _ in pair + kernel], [role for _, role in pair + kernel]

    def _parsed(self, text: str, numbers: Mapping[str, int]) -> Axis:
        expression = parse_expression(text, {**self.largest, **numbers})
        self.families.update(expression.families)
        return expression.axis


def _vector_role(part: str) -> Role:
    if part == "running_var":
        return Role.VARIANCE
    return Role.SCALE if part in _GAINS else Role.VECTOR


def _agree(cover: Cover, other: Cover, alias: str) -> None:
    """A tied tensor must mean the same under each of its names (pinned axes may differ)."""
    for dim, (mine, theirs) in enumerate(zip(cover.axes, other.axes, strict=True)):
        if mine != theirs and not {*axis_units(mine), *axis_units(theirs)} <= PINNED.keys():
            raise IncompatibleModels(
                "two lines disagree about a tied tensor",
                where=f"{cover.name} = {alias}, axis {dim}: `{mine}` and `{theirs}`",
                fix="give both names the same space on that axis",
            )
