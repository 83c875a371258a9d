"""Axis expressions: what the positions of a tensor's axis mean.

An axis is row-major over its expression, outer factor first: `Prod(Unit("c7"), Fixed(49))` is a
flattened (c7, 49) block, `Cat(Unit("h"), Fixed(4))` is h units followed by 4 fixed positions.
Names and structure only; no numbers but sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod


@dataclass(frozen=True, slots=True)
class Unit:
    """One position per unit of the space named."""

    space: str

    def __str__(self) -> str:
        return self.space


@dataclass(frozen=True, slots=True)
class Fixed:
    """Positions that stay where they are: kernel taps, classes, pixels, rotary dimensions."""

    size: int

    def __str__(self) -> str:
        return str(self.size)


@dataclass(frozen=True, slots=True)
class Prod:
    """A product of factors, outer first: `c * 49`, `head * dim`."""

    factors: tuple[Axis, ...]

    def __str__(self) -> str:
        # A sum needs brackets in a product; a product in a sum doesn't.
        return " * ".join(f"({f})" if isinstance(f, Cat) else str(f) for f in self.factors)


@dataclass(frozen=True, slots=True)
class Cat:
    """A concatenation of parts: fused qkv, dense connections, zero padding."""

    parts: tuple[Axis, ...]

    def __str__(self) -> str:
        return " + ".join(str(p) for p in self.parts)


Axis = Unit | Fixed | Prod | Cat


def axis_size(axis: Axis, sizes: Mapping[str, int]) -> int:
    """Number of positions of `axis`, given the sizes of its spaces."""
    match axis:
        case Unit(space):
            return sizes[space]
        case Fixed(size):
            return size
        case Prod(factors):
            return prod(axis_size(f, sizes) for f in factors)
        case Cat(parts):
            return sum(axis_size(p, sizes) for p in parts)


def axis_units(axis: Axis) -> tuple[str, ...]:
    """Spaces named in `axis`, in order of appearance, repeats included."""
    if isinstance(axis, Unit):
        return (axis.space,)
    if isinstance(axis, Fixed):
        return ()
    children = axis.factors if isinstance(axis, Prod) else axis.parts
    return tuple(chain.from_iterable(map(axis_units, children)))


def units_of(axes: Iterable[Axis]) -> Iterator[str]:
    """Spaces named in several axes, in order of appearance, repeats included."""
    return chain.from_iterable(map(axis_units, axes))


def product(*factors: Axis) -> Axis:
    """A product, nested ones flattened; one factor stands for itself."""
    flat: list[Axis] = []
    for factor in factors:
        flat.extend(factor.factors if isinstance(factor, Prod) else (factor,))
    return flat[0] if len(flat) == 1 else Prod(tuple(flat))


def concat(*parts: Axis) -> Axis:
    """A concatenation, nested ones flattened; one part stands for itself."""
    flat: list[Axis] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Cat) else (part,))
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def rename_units(axis: Axis, names: Mapping[str, str]) -> Axis:
    """`axis` with its spaces renamed by the table; others keep their names."""
    match axis:
        case Unit(space):
            return Unit(names.get(space, space))
        case Prod(factors):
            return Prod(tuple(rename_units(f, names) for f in factors))
        case Cat(parts):
            return Cat(tuple(rename_units(p, names) for p in parts))
        case Fixed():
            return axis
