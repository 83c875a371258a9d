"""Which line of a spec covers which tensor, and what it says of each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from ...errors import IncompatibleModels
from ..axes import Axis, Fixed, axis_units, rename_units, units_of
from ..model import PINNED, Role, Shapes
from .expressions import parse_expression, substitute
from .grammar import Line, Same, TieRule
from .patterns import Captured, Pattern, Present
from .stored_shapes import integers

# What modules call the gain of a norm; `weight_g` is that of a weight norm.
GAINS = {"weight", "gamma", "gain", "scale", "weight_g"}

# Most axes have one role: the same sets for all of them.
_ALONE = {role: frozenset({role}) for role in Role}


@dataclass
class Cover:
    """How one tensor is covered: the line and its captures; an expression and roles per axis.

    `others` are the covers of the tensor's other names, when it is tied.
    """

    name: str
    line: Line
    module: str
    key: tuple[object, ...]
    axes: list[Axis]
    roles: list[frozenset[Role]]
    others: list[Cover] = field(default_factory=list)

    def units(self, role: Role | None = None) -> set[str]:
        """Spaces on its axes (in that role, when given)."""
        if role is None:
            return set(units_of(self.axes))
        pairs = zip(self.axes, self.roles, strict=True)
        return set(units_of(axis for axis, roles in pairs if role in roles))

    def first(self, role: Role) -> Axis | None:
        """Its first axis in that role."""
        for axis, roles in zip(self.axes, self.roles, strict=True):
            if role in roles:
                return axis
        return None


def with_ties(
    tied: Sequence[TieRule], shapes: Shapes, aliases: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """`aliases`, and the names that `tied:` says a tensor stands for too."""
    ties = dict(aliases)
    for rule in tied:
        if rule.tensor not in shapes:
            continue
        present = Present([*shapes, *chain.from_iterable(ties.values())])
        if not present.any(rule.unless):
            ties[rule.tensor] = (*ties.get(rule.tensor, ()), rule.other)
    return ties


def cover_tensors(
    lines: Sequence[Line],
    names: Sequence[str],
    shapes: Shapes,
    aliases: Mapping[str, tuple[str, ...]],
    where: str,
) -> tuple[dict[str, Cover], dict[str, str]]:
    """Cover every non-scalar tensor; also the families declared on the way (space to index).

    Integers that no line is for are left uncovered: they are never averaged, and need no units.

    Raises:
        IncompatibleModels: A tensor that no line matches, or one whose line doesn't fit it.
    """
    table = LineTable(lines)
    whole = integers(shapes)
    # Integers that mirror a weight, a mask of a pruned layer for one, are cut as that is.
    mirrored = {(_module(n), shapes[n]) for n in shapes if n not in whole} if whole else set()
    tensors: list[str] = []
    for name in names:
        meant = name not in whole or _meant(table, name, shapes[name], mirrored)
        if shapes[name] and meant:
            tensors.append(name)
    reader = _Reader(where, table, *_survey(table, tensors))
    covers: dict[str, Cover] = {}
    for name in tensors:
        covers[name] = reader.cover(name, shapes[name])
        if name in whole and not covers[name].line.axes:
            # Cut with the units where some are pruned; neither made of units nor read by any.
            covers[name].roles = [_ALONE[Role.FIXED]] * len(shapes[name])
        for alias in aliases.get(name, ()):
            covers[name].others.append(reader.cover(alias, shapes[name]))
    return covers, reader.families


def _meant(
    table: LineTable, name: str, shape: tuple[int, ...], mirrored: set[tuple[str, tuple[int, ...]]]
) -> bool:
    """Whether a line is for these integers: it names them, lists axes, or they mirror a weight."""
    place = table.find(name)
    if place is None:
        return False
    line = table[place[0]]
    named = any(pattern.match(name) for pattern in line.patterns)
    return bool(line.axes) or named or (_module(name), shape) in mirrored


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def identify(
    same: Sequence[Same],
    covers: Mapping[str, Cover],
    present: Present,
    *,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Apply the `same:` lines, in place: one name for spaces that are one."""
    everyone: list[Cover] = []
    used: dict[str, None] = {}
    for tensor_cover in covers.values():
        for cover in (tensor_cover, *tensor_cover.others):
            everyone.append(cover)
            used.update(dict.fromkeys(units_of(cover.axes)))
    renamed: dict[str, str] = {}
    for rule in same:
        right = Pattern(rule.right)
        for space in used:
            match = right.match(space)
            if match is None:
                continue
            left = substitute(rule.left, match.numbers)
            unless = [Pattern(substitute(name, match.numbers)) for name in rule.unless]
            if left not in used or present.any(unless):
                continue
            if not rule.if_sizes_agree or (sizes and sizes.get(left) == sizes.get(space)):
                renamed[space] = left

    # s1 = s0 and s2 = s1 make all three s0, in whatever order the rules come.
    table = {space: _root(space, renamed) for space in used}
    for cover in everyone:
        cover.axes = [rename_units(axis, table) for axis in cover.axes]


def agree(covers: Mapping[str, Cover]) -> None:
    """Require that a tied tensor means the same under each of its names, and join its roles.

    Raises:
        IncompatibleModels: It doesn't (pinned axes may differ).
    """
    for cover in covers.values():
        for other in cover.others:
            for dim, (axis, twin) in enumerate(zip(cover.axes, other.axes, strict=True)):
                pinned = PINNED.keys() >= {*axis_units(axis), *axis_units(twin)}
                if axis != twin and not pinned:
                    raise IncompatibleModels(
                        "two lines disagree about a tied tensor",
                        where=f"{cover.name} = {other.name}, axis {dim}: `{axis}` and `{twin}`",
                        fix="give both names the same space on that axis",
                    )
            cover.roles = [a | b for a, b in zip(cover.roles, other.roles, strict=True)]


def _root(space: str, renamed: dict[str, str]) -> str:
    """The name at the end of a row of renamings, which is shortened on the way."""
    path = []
    while space in renamed:
        path.append(space)
        space = renamed[space]
    renamed.update(dict.fromkeys(path, space))
    return space


class LineTable:
    """The lines of a spec, looked up by name: one that is written out takes no search."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._exact: dict[str, tuple[int, int]] = {}
        self._open: list[tuple[tuple[int, int], Pattern]] = []
        for index, line in enumerate(lines):
            for at, pattern in enumerate(line.patterns):
                if pattern.literal:
                    self._exact.setdefault(pattern.text, (index, at))
                else:
                    self._open.append(((index, at), pattern))
        self._places: dict[str, tuple[int, Captured] | None] = {}

    def __getitem__(self, index: int) -> Line:
        return self._lines[index]

    def find(self, name: str) -> tuple[int, Captured] | None:
        """The first line that matches the tensor `name` or its module, and what it captured."""
        if name not in self._places:
            self._places[name] = self._search(name, name.rpartition(".")[0])
        return self._places[name]

    def _search(self, name: str, module: str) -> tuple[int, Captured] | None:
        places = [self._exact[n] for n in (name, module) if n and n in self._exact]
        exact = min(places, default=None)
        for place, pattern in self._open:
            if exact is not None and place > exact:
                break  # lines are in order: an exact one before this pattern has decided
            match = pattern.match(name) or (pattern.match(module) if module else None)
            if match is not None:
                return place[0], match
        return None if exact is None else (exact[0], Captured({}))


def _survey(table: LineTable, names: Sequence[str]) -> tuple[dict[str, int], set[str]]:
    """`max i` for every number i that any line captures, and the spaces that layers make."""
    matches = [match for name in names if (match := table.find(name)) is not None]
    matched = [(table[at], match.numbers) for at, match in matches]
    largest: dict[str, int] = {}
    for _, numbers in matched:
        for key, value in numbers.items():
            largest[f"max {key}"] = max(value, largest.get(f"max {key}", value))
    made: set[str] = set()
    for line, numbers in matched:
        if line.inp is not None and line.out is not None and "+" not in line.out:
            with suppress(ValueError):  # told again, with its tensor, when that is covered
                made.update(axis_units(parse_expression(line.out, {**largest, **numbers}).axis))
    return largest, made


@dataclass
class _Reader:
    """Reads the lines of one spec for one checkpoint, collecting the families they declare."""

    where: str
    table: LineTable
    largest: Mapping[str, int]
    made: set[str]
    families: dict[str, str] = field(default_factory=dict)

    def cover(self, name: str, shape: tuple[int, ...]) -> Cover:
        module, _, part = name.rpartition(".")
        place = self.table.find(name)
        if place is None:
            raise IncompatibleModels(
                "a tensor is not covered",
                where=f"{name} {list(shape)}",
                why=f"no line of {self.where} matches its name",
                fix=f"add a line for `{module or name}` (OUT <- IN for a layer, SPACE for a norm)",
            )
        index, match = place
        line = self.table[index]
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
    ) -> tuple[list[Axis], list[frozenset[Role]]]:
        if line.axes:
            if len(line.axes) != len(shape):
                raise ValueError(f"the list has {len(line.axes)} axes, the tensor {len(shape)}")
            axes: list[Axis] = []
            roles: list[frozenset[Role]] = []
            for text, stated in zip(line.axes, line.roles, strict=True):
                axes.append(self._parsed(text, numbers))
                default = Role.VECTOR if any(axis_units(axes[-1])) else Role.FIXED
                roles.append(stated or _ALONE[default])
            return axes, roles
        assert line.out is not None
        out = self._parsed(line.out, numbers)
        if len(shape) == 1:
            return [out], [_ALONE[_vector_role(part)]]
        if line.inp is None:
            raise ValueError("a bare space is for tensors of one axis; write OUT <- IN, or a list")
        read = self._parsed(line.inp, numbers)
        reading = Role.CONSUME if any(axis_units(read)) else Role.FIXED  # depthwise: `c <- 1`
        axes, roles = [out, read], [_ALONE[Role.PRODUCE], _ALONE[reading]]
        if line.reverse:
            axes.reverse()
            roles.reverse()
        kernel = shape[2:]
        axes.extend(Fixed(size) for size in kernel)
        roles.extend([_ALONE[Role.FIXED]] * len(kernel))
        return axes, roles

    def _parsed(self, text: str, numbers: Mapping[str, int]) -> Axis:
        expression = parse_expression(text, {**self.largest, **numbers}, made=self.made)
        self.families.update(expression.families)
        return expression.axis


def _vector_role(part: str) -> Role:
    if part == "running_var":
        return Role.VARIANCE
    return Role.SCALE if part in GAINS else Role.VECTOR
