"""Inputs that are moved by gradient steps: what all aims share. Which aim is not said here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..graph.trace.program import Program
from .samples import Samples

Run = tuple[Program, Mapping[str, Tensor]]
# What moves a group of samples: its flat inputs as they are left; it calls the second argument
# after every step.
Mover = Callable[[Samples, Callable[[], None]], list[Tensor]]


def move_inputs(
    groups: Sequence[Samples],
    move: Mover,
    *,
    steps: int,
    progress: Callable[[int, int], None],
) -> Samples:
    """All samples, one group after another, as `move` leaves them after so many `steps`."""
    first = groups[0]
    form = pytree.tree_flatten((first.args, dict(first.kwargs)))[1]
    total, done = steps * len(groups), count(1)
    moved = [move(group, lambda: progress(next(done), total)) for group in groups]
    leaves = [torch.cat(parts).contiguous() for parts in zip(*moved, strict=True)]
    args, kwargs = pytree.tree_unflatten(leaves, form)
    return Samples(args, kwargs)


def variation(images: Tensor) -> Tensor:
    """Mean absolute difference between neighbouring pixels."""
    down = (images[:, :, 1:] - images[:, :, :-1]).abs().mean()
    across = (images[:, :, :, 1:] - images[:, :, :, :-1]).abs().mean()
    return down + across
