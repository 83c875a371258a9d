"""Atoms: what a traced axis is made of, while its structure is still being discovered.

An axis starts as one atom. Operations unify axes: an atom may turn out to be a product (reshape) or
a sum of parts (slice, cat) of finer atoms. What is left unbound at the end is a set of positions
that move together; a pinned one stays in place. Names, sizes and structure only: no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Protocol

ALL_KINDS = frozenset({"perm", "scale", "orth", "gl"})
INCOMPATIBLE = "incompatible factorings"


class Undecided(Protocol):
    """A reshape that waits for its use (`deferred.Deferred`), as far as atoms know it."""

    selector: Atom | None

    def commit(self) -> None:
        """Decide for the product."""

    def select(self, selector: Atom, index: int) -> dict[Atom, Atom]:
        """Decide for the sum over `selector`."""


class Atom:
    """A run of positions. Unbound: interchangeable as far as is known, unless pinned.

    Attributes:
        size: Number of positions.
        bound: The finer form it turned out to be.
        reason: Why it is pinned; None while free.
        exact: Kinds of map that keep the function.
        kept: A single position that is a unit all the same (the one head of multi-query attention).
        deferred: A reshape that hasn't been committed to yet.
    """

    __slots__ = ("bound", "deferred", "exact", "kept", "reason", "size")

    def __init__(
        self, size: int, reason: str | None = None, exact: frozenset[str] = ALL_KINDS
    ) -> None:
        self.size = size
        self.bound: Form | None = None
        self.reason = reason
        self.exact = exact
        self.kept = False
        self.deferred: Undecided | None = None

    def __repr__(self) -> str:
        return f"<{self.size}{'!' if self.reason else ''}{'=' if self.bound else ''}>"


@dataclass(frozen=True, eq=False)
class Times:
    """A product, outer factor first."""

    factors: tuple[Form, ...]


@dataclass(frozen=True, eq=False)
class Plus:
    """A sum of consecutive parts."""

    parts: tuple[Form, ...]


Form = Atom | Times | Plus


def head(form: Form) -> Form:
    """`form` with the bindings at its top resolved and nested products and sums flattened."""
    while isinstance(form, Atom):
        # Whoever asks for the head looks inside: a reshape that waited has to decide now.
        if form.deferred is not None:
            form.deferred.commit()
        if form.bound is None:
            return form
        form = form.bound
    if isinstance(form, Times):
        factors = _flat_factors(form.factors)
        return factors[0] if len(factors) == 1 else Times(tuple(factors))
    parts = _flat_parts(form.parts)
    return parts[0] if len(parts) == 1 else Plus(tuple(parts))


def size_of(form: Form) -> int:
    """Number of positions."""
    match form:
        case Atom():
            return form.size
        case Times(factors):
            return prod(size_of(f) for f in factors)
        case Plus(parts):
            return sum(size_of(p) for p in parts)


def leaves(form: Form) -> Iterator[Atom]:
    """Unbound atoms of `form`, in order, repeats included."""
    top = head(form)
    match top:
        case Atom():
            yield top
        case Times(children) | Plus(children):
            for child in children:
                yield from leaves(child)


def pin(form: Form, reason: str) -> None:
    """Keep every position in place; the first reason given stands."""
    # The list is taken first: walking the leaves may commit a reshape, which binds atoms.
    for leaf in list(leaves(form)):
        leaf.reason = leaf.reason or reason


def allow_only(form: Form, kinds: frozenset[str]) -> None:
    """Allow only maps of these kinds."""
    for leaf in list(leaves(form)):
        leaf.exact &= kinds


def is_fixed(form: Form) -> bool:
    """Whether no position can move."""
    return all(leaf.reason is not None for leaf in leaves(form))


def unify(a: Form, b: Form) -> None:
    """Make two axes one, refining both by common factors and common split points.

    Structures with no common refinement are pinned, which is always sound.
    """
    a, b = head(a), head(b)
    if a is b:
        return
    if size_of(a) != size_of(b):
        raise ValueError(f"axes of sizes {size_of(a)} and {size_of(b)} can't be one")
    if isinstance(a, Atom):
        _bind(a, b)
    elif isinstance(b, Atom):
        _bind(b, a)
    elif isinstance(a, Times) and isinstance(b, Times):
        _match_factors(list(a.factors), list(b.factors))
    elif isinstance(a, Plus) and isinstance(b, Plus):
        _match_parts(list(a.parts), list(b.parts))
    elif isinstance(a, Plus):
        _match_sum(a, b)
    elif isinstance(b, Plus):
        _match_sum(b, a)


def cut(form: Form, at: int) -> tuple[Form, Form]:
    """Split an axis before position `at` (0 < at < size)."""
    total = size_of(form)
    left, right = _split(form, at, total - at)
    return left, right


def _flat_factors(factors: Sequence[Form]) -> list[Form]:
    flat: list[Form] = []
    for factor in factors:
        top = head(factor)
        flat.extend(top.factors if isinstance(top, Times) else (top,))
    return flat


def _flat_parts(parts: Sequence[Form]) -> list[Form]:
    flat: list[Form] = []
    for part in parts:
        top = head(part)
        flat.extend(top.parts if isinstance(top, Plus) else (top,))
    return flat


def _bind(atom: Atom, form: Form) -> None:
    if isinstance(form, Atom):
        form.reason = form.reason or atom.reason
        form.exact &= atom.exact
        form.kept |= atom.kept
        atom.bound = form
        return
    if any(leaf is atom for leaf in leaves(form)):
        # An atom that contains itself has no finer form, but for c = 1 * c, which says nothing.
        if isinstance(form, Times):
            rest = [f for f in form.factors if size_of(f) != 1]
            if len(rest) == 1 and head(rest[0]) is atom:
                return
        pin(form, INCOMPATIBLE)
        return
    if atom.reason is not None:
        pin(form, atom.reason)
    allow_only(form, atom.exact)
    atom.bound = form


def _match_factors(a: list[Form], b: list[Form]) -> None:
    """Unify two products from the inside, splitting by the gcd where sizes differ."""
    # From the inside, since row-major positions of the innermost factors are next to each other.
    while a and b:
        # Unifying the factors before may have refined those that are left.
        a, b = _flat_factors(a), _flat_factors(b)
        x, y = a.pop(), b.pop()
        m, n = size_of(x), size_of(y)
        if m == n:
            unify(x, y)
        elif m == 1:
            b.append(y)
        elif n == 1:
            a.append(x)
        else:
            common = gcd(m, n)
            if common == 1:  # 2 * 3 against 3 * 2: there is no common refinement
                for rest in (*a, x, *b, y):
                    pin(rest, INCOMPATIBLE)
                return
            for side, factor in ((a, x), (b, y)):
                if size_of(factor) == common:
                    side.append(factor)
                else:
                    outer, inner = Atom(size_of(factor) // common), Atom(common)
                    unify(factor, Times((outer, inner)))
                    side.extend((outer, inner))


def _match_parts(a: list[Form], b: list[Form]) -> None:
    """Unify two sums at the union of their split points."""
    while a and b:
        x, y = a.pop(0), b.pop(0)
        m, n = size_of(x), size_of(y)
        if m > n:
            x, rest = _split(x, n, m - n)
            a.insert(0, rest)
        elif n > m:
            y, rest = _split(y, m, n - m)
            b.insert(0, rest)
        unify(x, y)


def _match_sum(total: Plus, product: Form) -> None:
    """Unify a sum with a product: distribute the sum over the product's inner factors."""
    assert isinstance(product, Times)
    inner = product.factors[-1]
    step = size_of(inner)
    # (p * c) + (q * c) is (p + q) * c: every part has to be made of whole inner blocks.
    if all(size_of(part) % step == 0 for part in total.parts):
        outers: list[Form] = []
        for part in total.parts:
            outers.append(Atom(size_of(part) // step))
            unify(part, inner if size_of(part) == step else Times((outers[-1], inner)))
        unify(Plus(tuple(outers)), Times(product.factors[:-1]))
        return
    # the parts don't align with the product: its blocks are all alike, and stay where they are
    outer, rest = product.factors[0], Times(product.factors[1:])
    pin(outer, INCOMPATIBLE)
    block = size_of(rest)
    _match_parts(list(total.parts), [Atom(block) for _ in range(size_of(outer))])
    remaining: Form = total
    for _ in range(size_of(outer) - 1):
        piece, remaining = _split(remaining, block, size_of(remaining) - block)
        unify(piece, rest)
    unify(remaining, rest)


def _split(form: Form, left: int, right: int) -> tuple[Form, Form]:
    """The two pieces of `form`, `left` and `right` positions long."""
    top = head(form)
    if isinstance(top, Atom):
        first, rest = Atom(left), Atom(right)
        _bind(top, Plus((first, rest)))
        return first, rest
    if isinstance(top, Plus):
        return _split_sum(top, left)
    # The outermost factor that can be cut: the inner ones make whole blocks of `left`.
    for at in range(1, len(top.factors)):
        inner = Times(top.factors[at:])
        step = size_of(inner)
        if left % step:
            continue
        before: Form
        after: Form
        if at == 1:
            before, after = _split(top.factors[0], left // step, right // step)
        else:  # the cut falls inside a product: what is outside of it can't move any more
            for factor in top.factors[:at]:
                pin(factor, INCOMPATIBLE)
            before, after = _pinned(left // step), _pinned(right // step)
        return Times((before, inner)), Times((after, inner))
    pin(top, INCOMPATIBLE)
    return _pinned(left), _pinned(right)


def _split_sum(form: Plus, left: int) -> tuple[Form, Form]:
    before: list[Form] = []
    parts = list(form.parts)
    while left:
        part = parts.pop(0)
        n = size_of(part)
        if n > left:
            part, rest = _split(part, left, n - left)
            parts.insert(0, rest)
            n = left
        before.append(part)
        left -= n
    return Plus(tuple(before)), Plus(tuple(parts))


def _pinned(n: int) -> Atom:
    return Atom(n, INCOMPATIBLE)
