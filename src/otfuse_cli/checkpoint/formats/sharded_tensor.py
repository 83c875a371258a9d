"""A tensor in pieces: what a sharded training run wrote, put together when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import UnreadableInput
from ..contents import LazyTensor
from ..disk import Disk, bits_dtype, element_count
from ..volume import Window
from .rebuild import TensorRef
from .torch_zip import read_zip

_MOST_PIECES = 1 << 13  # more than ranks write of a tensor; pairs of them are compared


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where the archive that holds it lies: `size` bytes from `start`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    disk: Disk
    start: int
    size: int


@dataclass(frozen=True, eq=False)
class Mosaic(LazyTensor):
    """A tensor of `shape` and `dtype`, whose `pieces` cover it exactly (see `covers`)."""

    label: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read(self) -> torch.Tensor:
        """The tensor: on the CPU, contiguous, in memory of its own.

        Raises:
            UnreadableInput: A piece is broken, or is not what the checkpoint's metadata say.
        """
        # Copied as integers: not every dtype has a copy kernel.
        bits = torch.empty(self.shape, dtype=bits_dtype(self.dtype))
        for piece in self.pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True))
            bits[box] = self._read(piece).view(bits.dtype)
        return bits.view(self.dtype)

    def _read(self, piece: Piece) -> torch.Tensor:
        window = Window(piece.disk, piece.start, piece.size, f"{piece.disk.label}, {self.label}")
        file = read_zip(window)
        if not isinstance(file.root, TensorRef):
            raise self._broken("a piece of it is no plain tensor")
        if file.root.shape != piece.shape or file.root.dtype != self.dtype:
            raise self._broken("a piece of it has another shape or dtype than the metadata say")
        return window.read_block(file.block(self.label, file.root))

    def _broken(self, why: str) -> UnreadableInput:
        return UnreadableInput(
            "a broken distributed checkpoint",
            where=self.label,
            why=why,
            fix="copy the folder again, or save it again",
        )


def covers(shape: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    """Whether the pieces lie inside the shape, don't overlap and leave nothing out."""
    for piece in pieces:
        if len(piece.offsets) != len(shape) or len(piece.shape) != len(shape):
            return False
        ends = (o + n for o, n in zip(piece.offsets, piece.shape, strict=True))
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            return False
    if len(pieces) > _MOST_PIECES or _larger_than_its_files(pieces):
        return False
    full = [piece for piece in pieces if element_count(piece.shape)]
    if sum(element_count(piece.shape) for piece in full) != element_count(shape):
        return False
    return not _overlap(shape, full)


def _larger_than_its_files(pieces: Sequence[Piece]) -> bool:
    """Whether some bytes must be counted twice: no honest checkpoint does that."""
    files = {id(piece.disk): piece.disk.size for piece in pieces}
    return sum(piece.size for piece in pieces) > sum(files.values())


def _overlap(shape: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    """Whether two pieces share an element."""
    clash = torch.ones(len(pieces), len(pieces), dtype=torch.bool).fill_diagonal_(False)
    for dim in range(len(shape)):
        begin = torch.tensor([piece.offsets[dim] for piece in pieces])
        end = begin + torch.tensor([piece.shape[dim] for piece in pieces])
        clash &= (begin[:, None] < end) & (begin < end[:, None])
    return bool(clash.any())
