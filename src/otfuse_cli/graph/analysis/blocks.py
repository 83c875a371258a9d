"""Blocks of an axis: `h * q + h * q + h * v` is three, each a product of spaces and fixed sizes.

Where each begins, how long its factors are, what they are called. Names and sizes; no numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ..axes import Axis, Cat, Prod, Unit, axis_size
from ..model import GraphTensor


@dataclass(frozen=True)
class AxisBlock:
    """One block of one axis of one tensor.

    Attributes:
        tensor: Its name.
        dim: The axis.
        start: Where the block begins on it.
        sizes: Of its factors, outer first.
        spaces: Their spaces; None for a factor of fixed positions.
    """

    tensor: str
    dim: int
    start: int
    sizes: tuple[int, ...]
    spaces: tuple[str | None, ...]

    @property
    def length(self) -> int:
        """Positions that it takes."""
        return prod(self.sizes)


def blocks(node: GraphTensor, dim: int, sizes: Mapping[str, int]) -> tuple[AxisBlock, ...]:
    """The blocks of one axis, in order."""
    parts, start = [], 0
    for part in _parts(node.axes[dim].expr):
        factors = part.factors if isinstance(part, Prod) else (part,)
        widths = tuple(axis_size(f, sizes) for f in factors)
        names = tuple(f.space if isinstance(f, Unit) else None for f in factors)
        parts.append(AxisBlock(node.name, dim, start, widths, names))
        start += prod(widths)  # blocks follow one another without gaps
    return tuple(parts)


def _parts(axis: Axis) -> tuple[Axis, ...]:
    return axis.parts if isinstance(axis, Cat) else (axis,)
