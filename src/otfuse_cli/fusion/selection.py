"""Which tensors are averaged, and with which weights: `--skip`, `--only`, `--weights FILE`.

Concerns the average alone: every unit is matched and moved as if all tensors were averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product

from ..errors import UsageError, few
from .average import Aligned

Rule = tuple[str, tuple[float, ...]]


@dataclass(frozen=True)
class Selection:
    """Weights by tensor.

    Attributes:
        weights: Of the models, in the order in which they were named.
        rules: Pattern to weights of the tensors that it matches; the first that does counts.
        skip: Patterns of tensors that are the anchor's.
        only: Patterns of the tensors that are averaged; none for all.
        kept: Names of more tensors that are the anchor's.
        others: Other names of tied tensors, which patterns may mean too.
    """

    weights: tuple[float, ...]
    rules: tuple[Rule, ...] = ()
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def used(self, index: int) -> bool:
        """Whether a model has a weight anywhere."""
        every = [self.weights, *(weights for _, weights in self.rules)]
        return any(weights[index] > 0 for weights in every)

    def keeps(self, name: str) -> bool:
        """Whether the tensor is the anchor's, as it is."""
        return (
            name in self.kept
            or self._matches(self.skip, name)
            or (bool(self.only) and not self._matches(self.only, name))
        )

    def weights_of(self, name: str) -> tuple[float, ...]:
        """The weights of the models in the average of one tensor that is not kept."""
        for pattern, weights in self.rules:
            if self._matches((pattern,), name):
                return weights
        return self.weights

    def of(self, name: str, aligned: Sequence[Aligned]) -> list[Aligned]:
        """The sources that count in the average of one tensor, with their weights there."""
        if self.keeps(name):
            return []
        # Weights are by model, in the order of the command line; `aligned` has the sources only.
        weights = self.weights_of(name)
        shares = (replace(a, weight=weights[a.model.index]) for a in aligned)
        return [a for a in shares if a.weight > 0]

    def require_matches(self, names: Iterable[str]) -> None:
        """Refuse a pattern that means no tensor: it is a mistake.

        Raises:
            UsageError: There is one.
        """
        names = list(names)
        options = (
            ("--skip", self.skip),
            ("--only", self.only),
            ("--weights", [pattern for pattern, _ in self.rules]),
        )
        for option, patterns in options:
            for pattern in patterns:
                if not any(self._matches((pattern,), name) for name in names):
                    raise UsageError(
                        "a pattern that matches no tensor",
                        where=f"{option} {pattern}",
                        why=f"tensors are {few(names)}",
                        fix="a pattern means whole names: `layer1.*`, `*.bias`",
                    )

    def warnings(self, names: Iterable[str]) -> tuple[str, ...]:
        """What `--skip` and `--only` left to the anchor."""
        left = [n for n in names if n not in self.kept and self.keeps(n)]
        if not left:
            return ()
        return (f"not averaged but kept from the anchor (--skip, --only): {few(left)}",)

    def _matches(self, patterns: Iterable[str], name: str) -> bool:
        pairs = product((name, *self.others.get(name, ())), patterns)
        return any(fnmatchcase(one, pattern) for one, pattern in pairs)
