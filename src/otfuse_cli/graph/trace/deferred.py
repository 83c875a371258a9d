"""Reshapes that wait: a product of axes, or a sum of unrelated parts, as their use decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .atoms import Atom, Form, Plus, Times, unify


class Deferred:
    """A reshape of `whole` into `factors` that may still turn out to be a sum.

    `view(..., 3, d)` followed by `select` of each of the three is a split into three unrelated
    parts; followed by anything else it is a product. Whoever looks inside decides.
    """

    def __init__(self, whole: Form, factors: Sequence[Atom]) -> None:
        self.whole = whole
        self.factors = tuple(factors)
        self.selector: Atom | None = None
        self.options: tuple[tuple[Atom, ...], ...] = ()
        for factor in self.factors:
            factor.deferred = self

    def commit(self) -> None:
        """Decide for the product."""
        for factor in self.factors:
            factor.deferred = None
        unify(self.whole, Times(self.factors))

    def select(self, selector: Atom, index: int) -> dict[Atom, Atom]:
        """Decide for the sum over `selector`: what each inner factor is within part `index`."""
        at = self.factors.index(selector)
        inner = self.factors[at + 1 :]
        if self.selector is None:
            self.selector = selector
            for factor in self.factors[:at]:  # the sum is inside of these: they stand as they are
                factor.deferred = None
            # Every part gets inner factors of its own: q, k and v share no units.
            options: list[tuple[Atom, ...]] = []
            parts: list[Form] = []
            for _ in range(selector.size):
                option = tuple(Atom(factor.size) for factor in inner)
                options.append(option)
                parts.append(Times(option) if option else Atom(1))
            self.options = tuple(options)
            unify(self.whole, Times((*self.factors[:at], Plus(tuple(parts)))))
        return dict(zip(inner, self.options[index], strict=True))


def instances(forms: Sequence[Form]) -> Iterator[tuple[Form, ...]]:
    """What a value's axes are, once per part where a reshape turned out to be a split.

    A reshape that nobody has looked at says nothing: no instance.
    """
    for at, form in enumerate(forms):
        if not isinstance(form, Atom) or form.deferred is None:
            continue
        deferred = form.deferred
        if deferred.selector is None:
            return
        for index in range(deferred.selector.size):
            option = deferred.select(deferred.selector, index)
            chosen: list[Form] = []
            for i, other in enumerate(forms):
                # The selector's axis goes: each of its positions is another instance.
                if other is not deferred.selector or i < at:
                    chosen.append(option.get(other, other) if isinstance(other, Atom) else other)
            yield from instances(chosen)
        return
    yield tuple(forms)


def is_settled(form: Form) -> bool:
    """Whether looking inside decides nothing."""
    return not isinstance(form, Atom) or form.deferred is None
