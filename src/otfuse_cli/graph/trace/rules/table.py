"""The table of rules: ATen operator name to rule. What isn't here is pinned and reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..call import Rule


@dataclass(frozen=True)
class Entry:
    """A rule and two properties of the operator.

    Attributes:
        apply: The rule.
        moves: It only moves or renames elements: a viewed weight is still that weight.
        uniform: All elements of its output are equal when those of every operand are.
        creates: All elements of its output are equal.
    """

    apply: Rule
    moves: bool = False
    uniform: bool = False
    creates: bool = False


RULES: dict[str, Entry] = {}


def rule(
    *names: str, moves: bool = False, uniform: bool = False, creates: bool = False
) -> Callable[[Rule], Rule]:
    """Register a rule for the operators `aten.<name>`, every overload of them."""

    def register(apply: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = Entry(apply, moves, uniform or moves, creates)
        return apply

    return register
