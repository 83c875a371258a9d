"""Shapes of a checkpoint's tensors in the order of its file, with what their numbers are."""

from __future__ import annotations

from collections.abc import Mapping

from .order import base_order, is_by_name

Shape = tuple[int, ...]


class StoredShapes(dict[str, Shape]):
    """Shapes by name, in the order of the file.

    Attributes:
        dtypes: By name, as torch calls them: `float32`, `int64`, `bool`.
    """

    def __init__(self, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> None:
        super().__init__(shapes)
        self.dtypes = dict(dtypes)


def dtypes_of(shapes: Mapping[str, Shape]) -> Mapping[str, str]:
    """Dtypes by name; nothing where shapes are all that is known."""
    return shapes.dtypes if isinstance(shapes, StoredShapes) else {}


def integers(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Names of tensors of integers or truth values: never averaged, so that they have no units."""
    real = ("float", "bfloat", "complex")
    return frozenset(n for n, dtype in dtypes_of(shapes).items() if not dtype.startswith(real))


def in_order(shapes: Mapping[str, Shape]) -> list[str]:
    """Names in the order of definition, or in natural order where the file sorts them by name."""
    return base_order(list(shapes), dtypes_of(shapes))


def in_defined_order(shapes: Mapping[str, Shape]) -> list[str] | None:
    """Names in the order of definition; None where the file sorts them, which tells nothing."""
    names = list(shapes)
    return None if is_by_name(names, dtypes_of(shapes)) else names
