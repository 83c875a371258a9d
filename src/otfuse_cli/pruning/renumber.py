"""Names of what stays where numbered modules go: the others close up, as in a list of modules.

No tensors, only their names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

_ENDS_IN_NUMBER = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True)
class NumberedModules:
    """Numbered modules beside one another, some of which go.

    Attributes:
        stem: What comes before the number: `layer1.`, or `encoder.encoder_layer_`.
        numbers: Those that there are, ascending.
        gone: Those of these that go.
    """

    stem: str
    numbers: tuple[int, ...]
    gone: frozenset[int]

    @property
    def name(self) -> str:
        """The module that holds them, or what their names begin with."""
        return self.stem.rstrip(".")

    @property
    def moved(self) -> dict[int, int]:
        """The new number of each that stays: less by as many as go before it."""
        stay = (number for number in self.numbers if number not in self.gone)
        return {number: number - sum(gone < number for gone in self.gone) for number in stay}


def numbered_modules(names: Collection[str], gone: Iterable[str]) -> tuple[NumberedModules, ...]:
    """The lists that modules are taken out of, in their order.

    A module that is numbered in its whole name (`layers.3`) is one of a list. Of those that end in
    a number (`layer_3`) only copies of one module are: with tensors of the same names.

    Args:
        names: Of all tensors.
        gone: Paths of the modules that go.
    """
    by_stem: dict[str, set[int]] = {}
    for path in gone:
        match = _ENDS_IN_NUMBER.fullmatch(path)
        if match is not None:
            by_stem.setdefault(match[1], set()).add(int(match[2]))
    lists: list[NumberedModules] = []
    for stem, out in by_stem.items():
        inside = _inside(names, stem)
        alike = len({frozenset(tensors) for tensors in inside.values()}) == 1
        if stem in ("", ".") or stem.endswith(".") or alike:
            lists.append(NumberedModules(stem, tuple(sorted(inside)), frozenset(out)))
    return tuple(lists)


def renumbered(name: str, lists: Iterable[NumberedModules]) -> str:
    """The new name of a tensor (or module) that stays."""
    changes: dict[int, tuple[str, int]] = {}
    for each in lists:
        number = _number(name, each.stem)
        if number is not None:
            changes[len(each.stem)] = number, each.moved[int(number)]
    # From the last one on, so that the places of the others stay where they are.
    for at, (number, new) in sorted(changes.items(), reverse=True):
        name = f"{name[:at]}{new}{name[at + len(number) :]}"
    return name


def belongs_to(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor is one of those of some modules."""
    return any(name.startswith(f"{module}.") for module in modules)


def _inside(names: Iterable[str], stem: str) -> Mapping[int, set[str]]:
    """By number, what the tensors of the modules behind a stem are called there."""
    inside: dict[int, set[str]] = {}
    for name in names:
        number = _number(name, stem)
        if number is not None:
            inside.setdefault(int(number), set()).add(name[len(stem) + len(number) :])
    return inside


def _number(name: str, stem: str) -> str | None:
    """The number behind a stem, where a module of that name follows."""
    if not name.startswith(stem):
        return None
    number, dot, _ = name[len(stem) :].partition(".")
    return number if dot and number.isdecimal() else None
