"""A checkpoint that stores one tensor several times, seen with one; how copies are found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from .contents import Entry
from .derived import DerivedCheckpoint
from .open import Checkpoint

_AT_ONCE = 1 << 22  # numbers compared at a time


class Tied(DerivedCheckpoint):
    """The checkpoint `whole`, with one tensor for each class of names.

    The first name of a class that the file has is where the tensor stands, and the first of all is
    what it is called: checkpoints that keep it under different names then agree.
    """

    def __init__(self, whole: Checkpoint, classes: Iterable[Sequence[str]]) -> None:
        called: dict[str, str] = {}
        ties = {name: list(others) for name, others in whole.aliases.items()}
        for names in classes:
            stored = [name for name in names if name in whole.infos]
            if not stored:
                continue
            # In order, without repeats.
            others: dict[str, None] = {}
            for name in stored:
                others |= dict.fromkeys((name, *ties.pop(name, ())))
            others.pop(names[0], None)
            if others:
                ties[names[0]] = list(others)
            called.update(dict.fromkeys(stored, names[0]))
        entries: dict[str, Entry] = {}
        for name, entry in whole.entries.items():
            if name in whole.infos:
                entries.setdefault(called.get(name, name), entry)
        aliases = {name: tuple(others) for name, others in ties.items()}
        super().__init__(whole, entries=entries, aliases=aliases)


def copies(checkpoint: Checkpoint) -> list[tuple[str, ...]]:
    """Groups of matrices with the same bits; those of one number everywhere are left out.

    Of tensors of one shape the first row is read, of those that share it the whole.
    """
    shapes: dict[tuple[object, ...], list[str]] = {}
    for info in checkpoint.infos.values():
        if len(info.shape) > 1 and info.numel:
            shapes.setdefault((info.shape, info.dtype), []).append(info.name)
    starts: dict[tuple[object, ...], list[str]] = {}
    for kind, names in shapes.items():
        if len(names) == 1:
            continue
        for name in names:
            start = _bits(checkpoint.read_rows(name, 0, 1)).numpy().tobytes()
            starts.setdefault((*kind, start), []).append(name)
    groups: list[tuple[str, ...]] = []
    for names in starts.values():
        groups += _groups(checkpoint, names)
    return [group for group in groups if not _is_constant(checkpoint, group[0])]


def same_values(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors hold the same bits; with another shape or dtype they don't."""
    first, second = checkpoint.infos[one], checkpoint.infos[other]
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if not first.shape:
        return torch.equal(_bits(checkpoint.read(one)), _bits(checkpoint.read(other)))
    step = max(1, _AT_ONCE * first.shape[0] // max(first.numel, 1))
    for start in range(0, first.shape[0], step):
        end = min(start + step, first.shape[0])
        mine = _bits(checkpoint.read_rows(one, start, end))
        if not torch.equal(mine, _bits(checkpoint.read_rows(other, start, end))):
            return False
    return True


def known_names(checkpoints: Sequence[Checkpoint]) -> Mapping[str, None]:
    """Every name of any checkpoint, in order, those of tied tensors included."""
    names: dict[str, None] = {}
    for checkpoint in checkpoints:
        for name in checkpoint.infos:
            names |= dict.fromkeys((name, *checkpoint.aliases.get(name, ())))
    return names


def _groups(checkpoint: Checkpoint, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Names of equal tensors, of which there are two at least."""
    left, groups = list(names), []
    while len(left) > 1:
        first, *rest = left
        same = [name for name in rest if same_values(checkpoint, first, name)]
        if same:
            groups.append((first, *same))
        left = [name for name in rest if name not in same]
    return groups


def _is_constant(checkpoint: Checkpoint, name: str) -> bool:
    bits = _bits(checkpoint.read(name)).view(-1, checkpoint.infos[name].dtype.itemsize)
    return bool((bits == bits[0]).all())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: 8-bit floats have no comparison, and NaN would differ from itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
