"""A tensor seen from one space: a row per unit, whatever the structure of its axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..graph.axes import Axis, Cat, Fixed, Prod, Unit, axis_size, axis_units


def unfold(
    tensor: torch.Tensor,
    exprs: Sequence[Axis],
    dim: int,
    space: str,
    sizes: Mapping[str, int],
    *,
    index: str | None = None,
    pool: frozenset[str] = frozenset(),
) -> list[torch.Tensor]:
    """What a tensor says about the units of `space` on dimension `dim`.

    Args:
        tensor: Any tensor.
        exprs: The expression of each of its axes.
        dim: The axis to look along.
        space: Whose units to tell apart.
        sizes: Units by space.
        index: For a family, the space that indexes it, on any axis of the tensor.
        pool: Spaces whose order is not known yet: only what doesn't depend on it is kept
            (mean and mean square along them).

    Returns:
        One (units, rest) matrix, with an index one (index units, units, rest) stack, for each
        appearance of the space on that axis.
    """
    wanted = {space, *pool} | ({index} if index else set())
    opened = [
        expr if at == dim or (wanted - {space}) & set(axis_units(expr)) else Fixed(tensor.shape[at])
        for at, expr in enumerate(exprs)
    ]
    unfolded = []
    marked: list[tuple[Axis, bool]] = [(expr, at == dim) for at, expr in enumerate(opened)]
    for block, atoms in _blocks(tensor, marked, sizes, wanted):
        names = [a.space if isinstance(a, Unit) else None for a, _ in atoms]
        for at, (name, (_, here)) in enumerate(zip(names, atoms, strict=True)):
            if name != space or not here:
                continue
            front = [at] if index is None else [names.index(index), at]
            rest = [d for d in range(block.dim()) if d not in front]
            # One unit has one order: nothing about it is open.
            loose = [d for d in rest if names[d] in pool and block.shape[d] > 1]
            tight = [d for d in rest if d not in loose]
            moved = block.permute(*front, *tight, *loose)
            if loose:
                moved = _pooled(moved, len(front) + len(tight))
            unfolded.append(moved.reshape(*moved.shape[: len(front)], -1))
    return unfolded


def _pooled(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Mean and mean square over the axes from `first`; a slice at a time, since tensors are large.

    Slices are along axis 0, which is one of the axes that stay.
    """
    pooled = tensor.new_empty((*tensor.shape[:first], 2))
    for part, out in zip(tensor, pooled, strict=True):
        flat = part.flatten(first - 1)
        torch.stack([flat.mean(-1), flat.square().mean(-1)], -1, out=out)
    return pooled


def _blocks(
    tensor: torch.Tensor,
    dims: list[tuple[Axis, bool]],
    sizes: Mapping[str, int],
    wanted: set[str],
) -> Iterator[tuple[torch.Tensor, list[tuple[Axis, bool]]]]:
    """Take products and concatenations apart where they mention a wanted space."""
    for at, (expr, here) in enumerate(dims):
        if wanted.isdisjoint(axis_units(expr)):
            continue
        match expr:
            case Prod(factors):
                apart = torch.unflatten(tensor, at, [axis_size(f, sizes) for f in factors])
                inner = [(f, here) for f in factors]
                yield from _blocks(apart, [*dims[:at], *inner, *dims[at + 1 :]], sizes, wanted)
                return
            case Cat(parts):
                pieces = torch.split_with_sizes(tensor, [axis_size(p, sizes) for p in parts], at)
                for piece, part in zip(pieces, parts, strict=True):
                    yield from _blocks(
                        piece, [*dims[:at], (part, here), *dims[at + 1 :]], sizes, wanted
                    )
                return
    yield tensor, dims
