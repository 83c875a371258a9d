"""Sizes of the spaces of a spec, solved from the shapes of the tensors that its lines cover."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import IncompatibleModels
from ..axes import Axis, axis_units, rename_units
from ..model import PINNED, Shapes
from ..sizes import fit_axis
from .line_match import Cover


def solve_sizes(
    covers: Mapping[str, Cover],
    shapes: Shapes,
    given: Mapping[str, tuple[int, str]],
    where: str,
) -> dict[str, int]:
    """Sizes of all spaces of a spec; each axis is solved for the one space not known yet.

    `given` holds sizes that are known, and where each is from.

    Raises:
        IncompatibleModels: An axis doesn't fit (tensor and axis named), or a size stays unknown.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for space, (size, source) in given.items():
        sizes[space], origin[space] = size, source
    pending: list[tuple[Cover, int]] = []
    for cover in covers.values():
        pending.extend((cover, dim) for dim in range(len(cover.axes)))
    while pending:
        left = []
        for cover, dim in pending:
            axis, length = cover.axes[dim], shapes[cover.name][dim]
            try:
                solved = fit_axis(axis, length, sizes)
            except ValueError as error:
                causes = _causes(axis, sizes, origin)
                raise IncompatibleModels(
                    "a size does not fit",
                    where=f"{cover.name} {list(shapes[cover.name])}, axis {dim}, "
                    f"{cover.line.label} of {where}",
                    why=f"{error}" + (f" ({causes})" if causes else ""),
                    fix="correct the line, or the one that gave the size",
                ) from error
            if solved is None:
                left.append((cover, dim))
            for space, size in (solved or {}).items():
                if space not in PINNED:  # `in` and `out` may differ from tensor to tensor
                    sizes[space], origin[space] = size, f"{cover.name} axis {dim}"
        if len(left) == len(pending):  # a round that has told nothing: no other will
            cover, dim = left[0]
            unknown = [u for u in axis_units(cover.axes[dim]) if u not in sizes]
            raise IncompatibleModels(
                "the shapes do not determine a size",
                where=f"{cover.name} axis {dim}: `{cover.axes[dim]}` = {shapes[cover.name][dim]}",
                why=f"{' and '.join(dict.fromkeys(unknown))} could share it in several ways",
                fix=f"add `sizes: {{{unknown[0]}: N}}` to the spec",
            )
        pending = left
    return sizes


def _causes(axis: Axis, sizes: Mapping[str, int], origin: Mapping[str, str]) -> str:
    """Sizes that an axis was held against, and where each is from."""
    solved = [unit for unit in dict.fromkeys(axis_units(axis)) if unit in origin]
    return ", ".join(f"{unit} = {sizes[unit]} from {origin[unit]}" for unit in solved)


def name_pinned(covers: Mapping[str, Cover], shapes: Shapes, sizes: dict[str, int]) -> None:
    """Give `in` and `out` one pinned space for each size they have (`in`, or `in:32`, `in:64`)."""
    sizes_of: dict[str, dict[int, None]] = {name: {} for name in PINNED}
    where: list[tuple[Cover, int, str, int]] = []
    for cover in covers.values():
        for dim, axis in enumerate(cover.axes):
            for name in sorted(PINNED.keys() & set(axis_units(axis))):
                size = (fit_axis(axis, shapes[cover.name][dim], sizes) or {})[name]
                sizes_of[name][size] = None
                where.append((cover, dim, name, size))
    for cover, dim, name, size in where:
        id = name if len(sizes_of[name]) == 1 else f"{name}:{size}"
        cover.axes[dim] = rename_units(cover.axes[dim], {name: id})
        sizes[id] = size
