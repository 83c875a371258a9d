"""Families: spaces that have an independent map for every unit of another space.

The value dimensions inside a head may be relabelled head by head, when nothing ever mixes heads: a
space D is indexed by H when every value and every contraction that has D has H exactly once, as a
factor beside it or as a factor of another axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .atoms import Atom, Form, Times, head
from .deferred import instances

# Where a leaf stands in an axis: (the parent is a product, number of the child) from the top.
Path = tuple[tuple[bool, int], ...]


@dataclass(frozen=True)
class Occurrence:
    """One occurrence of a leaf in a value."""

    leaf: Atom
    axis: int
    path: Path


def is_unit(leaf: Atom) -> bool:
    """Whether a leaf is a space of its own; a single position is, where it was contracted."""
    return leaf.reason is None and (leaf.size > 1 or leaf.kept)


def find_families(contexts: Iterable[Sequence[Form]]) -> dict[Atom, Atom]:
    """Index by member space, from the index spaces of all values and contractions."""
    candidates: dict[Atom, list[Atom]] = {}
    seen: set[tuple[object, ...]] = set()
    for context in contexts:
        for axes in instances(context):
            places = list(_places(axes))
            key = tuple((id(p.leaf), p.axis, p.path) for p in places)
            if key in seen:
                continue
            seen.add(key)
            for place in places:
                here = _indices(place, places)
                before = candidates.get(place.leaf)
                both = here if before is None else [leaf for leaf in before if leaf in here]
                candidates[place.leaf] = both
    return _without_cycles(candidates)


def _places(axes: Sequence[Form]) -> Iterator[Occurrence]:
    for axis, form in enumerate(axes):
        yield from _descend(form, axis, ())


def _descend(form: Form, axis: int, path: Path) -> Iterator[Occurrence]:
    top = head(form)
    if isinstance(top, Atom):
        if is_unit(top):
            yield Occurrence(top, axis, path)
        return
    product = isinstance(top, Times)
    for i, child in enumerate(top.factors if isinstance(top, Times) else top.parts):
        yield from _descend(child, axis, (*path, (product, i)))


def _indices(place: Occurrence, places: Sequence[Occurrence]) -> list[Atom]:
    """Leaves that index `place` here: exactly one of them beside it. Nearest first."""
    ranked: dict[Atom, list[tuple[int, bool]]] = {}
    for order, other in enumerate(places):
        if other is place:
            continue
        beside = _beside(place, other)
        if beside is not None:
            ranked.setdefault(other.leaf, []).append((_distance(place, other, order), beside))
    good: list[tuple[int, Atom]] = []
    for leaf, uses in ranked.items():
        # Twice in one value (heads against heads), it says no single unit of itself.
        if len(uses) == 1 and uses[0][1] and leaf is not place.leaf:
            good.append((uses[0][0], leaf))
    good.sort(key=lambda item: item[0])
    return [leaf for _, leaf in good]


def _beside(place: Occurrence, other: Occurrence) -> bool | None:
    """True: every position of `place` has one unit of `other`; None: they never meet."""
    common = 0
    if place.axis == other.axis:
        while place.path[common] == other.path[common]:
            common += 1
        if not place.path[common][0]:
            return None  # different parts of a sum
    return all(product for product, _ in other.path[common:])


def _distance(place: Occurrence, other: Occurrence, order: int) -> int:
    """How near `other` stands: outer factors of the same axis, then inner ones, then other axes.

    The steps between the three are larger than any number of factors or values that occurs.
    """
    if place.axis != other.axis:
        return 10_000 + order
    outer = other.path < place.path
    return (0 if outer else 1_000) + abs(len(place.path) - len(other.path)) + _gap(place, other)


def _gap(place: Occurrence, other: Occurrence) -> int:
    for (_, here), (_, there) in zip(place.path, other.path, strict=False):
        if here != there:
            return abs(here - there)
    return 0


def _without_cycles(candidates: dict[Atom, list[Atom]]) -> dict[Atom, Atom]:
    index: dict[Atom, Atom] = {}
    for member, choices in candidates.items():
        for choice in choices:
            # Two spaces that always stand together could each index the other: the first one does.
            above: Atom | None = choice
            while above is not None and above is not member:
                above = index.get(above)
            if above is None:
                index[member] = choice
                break
    return index
