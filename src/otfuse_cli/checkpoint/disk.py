"""An open file read by position: exact, thread-safe, and never through a memory map.

A mapped file that shrinks kills the process (SIGBUS); a short `pread` is an error we can name.
No file formats here.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import UnreadableInput
from .digest import Trail

_HASH_CHUNK = 1 << 22  # bytes: large enough that reading, not Python, takes the time
_HASH_GAP = 1 << 20  # between tensors: headers of archives, padding
_READ_CHUNK = 1 << 30  # Linux returns at most 2 GiB - 4 KiB per call
_MARK_BYTES = 1 << 12  # at either end: headers, and weights
_MAX_AXES = 64  # torch has no more
_EXPANDED_LIMIT = 1 << 30  # bytes that even a tiny file may ask for
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies in a file: byte position of its first element, shape, strides.

    Two names with equal blocks share their storage, that is, they are tied.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False

    def shifted(self, base: int) -> Extent:
        """The same tensor `base` bytes further on."""
        return replace(self, start=self.start + base)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return element_count(self.shape)

    def rows(self, first: int, last: int) -> Extent | None:
        """The part with indices from `first` to before `last` on axis 0; None for 0-d."""
        if not self.shape:
            return None
        step = self.stride[0] * self.dtype.itemsize
        shape = (last - first, *self.shape[1:])
        return replace(self, start=self.start + first * step, shape=shape)

    @property
    def span(self) -> int:
        """Elements between the first and the last one, both included (0 when empty)."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


class Disk:
    """One regular file, open for reading.

    With `fd`, that of a file which is open already and may have no name; it is closed in the end.
    `sha256` is its digest, where somebody knows it.

    Attributes:
        remark: What its reader should know of how it is read; None for nothing.

    Raises:
        UnreadableInput: It is missing, a folder, not a regular file, or may not be read.
    """

    def __init__(
        self, path: Path, label: str, *, fd: int | None = None, sha256: str | None = None
    ) -> None:
        self.path = path
        self.label = label
        self.remark: str | None = None
        self.file: io.RawIOBase = _open_regular(path, label) if fd is None else io.FileIO(fd, "rb")
        self.size = os.fstat(self.file.fileno()).st_size
        self._trail: Trail | None = None
        self._sha256 = sha256
        self._lock = threading.Lock()
        self._position = threading.Lock()

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` (bytes) from position `start`.

        Raises:
            UnreadableInput: The file ends before that, or the device fails.
        """
        self._fill(buffer, start)
        trail = self._trail
        if trail is not None and start + len(buffer) > trail.position:
            if 0 < start - trail.position <= _HASH_GAP:
                gap = memoryview(bytearray(start - trail.position))
                self._fill(gap, start - len(gap))
                trail.saw(gap, start - len(gap))
            trail.saw(buffer, start)

    def hash_while_reading(self) -> None:
        """From now on take the digest from what is read, as far as that goes in order."""
        if self._trail is None:
            self._trail = Trail()

    def _fill(self, buffer: memoryview, start: int) -> None:
        done = 0
        while done < len(buffer):
            part = buffer[done : done + _READ_CHUNK]
            try:
                got = self._read_at(part, start + done)
            except OSError as error:
                raise UnreadableInput(
                    "reading failed", where=self.label, why=error.strerror
                ) from error
            if got == 0:
                raise UnreadableInput(
                    "the file ends too early",
                    where=self.label,
                    why=f"byte {start + done} is gone; the file had {self.size} bytes when opened",
                    fix="don't change an input while it is being read",
                )
            done += got

    def _read_at(self, buffer: memoryview, start: int) -> int:
        """Read once; how many bytes came."""
        if hasattr(os, "preadv"):
            return os.preadv(self.file.fileno(), [buffer], start)
        # Windows, and macOS before 11, have one position for all threads.
        with self._position:
            self.file.seek(start)
            return self.file.readinto(buffer) or 0

    def read_bytes(self, start: int, size: int) -> bytes:
        """At most `size` bytes from `start`; fewer only at the end of the file."""
        data = bytearray(max(0, min(size, self.size - start)))
        self.read_into(memoryview(data), start)
        return bytes(data)

    def read_each(self, starts: list[int], size: int) -> list[bytes]:
        """`read_bytes` for every position; a file that is far away brings several at a time."""
        return [self.read_bytes(start, size) for start in starts]

    def fetch_whole(self) -> None:
        """Make reads by position cheap, for a format that needs many; they are on a disk."""

    def read_block(self, block: Extent) -> torch.Tensor:
        """The tensor of a block: on the CPU, contiguous, in memory of its own."""
        if block.numel == 0:
            return torch.empty(block.shape, dtype=block.dtype)
        self._refuse_bomb(block)
        itemsize = block.dtype.itemsize
        buffer = torch.empty(block.span * itemsize, dtype=torch.uint8)
        self.read_into(buffer.numpy().data, block.start)
        # Gathered as integers: not every dtype has a copy kernel.
        bits = buffer.view(_BITS[itemsize])
        if is_contiguous(block.shape, block.stride):
            tensor = bits.reshape(block.shape).view(block.dtype)
        else:
            tensor = bits.as_strided(block.shape, block.stride).clone(
                memory_format=torch.contiguous_format
            )
            tensor = tensor.view(block.dtype)
        if block.conjugate:
            tensor = tensor.conj_physical()
        return tensor.neg() if block.negative else tensor

    def sha256(self) -> str:
        """SHA-256 of the whole file, computed once; what was not hashed yet is read."""
        with self._lock:
            if self._sha256 is None:
                trail = self._trail or Trail()
                buffer = memoryview(bytearray(min(_HASH_CHUNK, self.size)))
                while trail.position < self.size:
                    part = buffer[: self.size - trail.position]
                    self._fill(part, trail.position)
                    trail.saw(part, trail.position)
                self._sha256 = trail.hexdigest()
            return self._sha256

    def digests(self) -> tuple[str, ...]:
        """SHA-256 of every file."""
        return (self.sha256(),)

    def take_digests(self, digests: Iterator[str]) -> None:
        """Take over what `digests` gave where somebody else read all of it."""
        with self._lock:
            self._sha256 = next(digests)

    def mark(self) -> tuple[Any, ...]:
        """What tells this file from others of its name: its size, and what is at its ends."""
        ends = self.read_bytes(0, _MARK_BYTES)
        ends += self.read_bytes(max(0, self.size - _MARK_BYTES), _MARK_BYTES)
        return self.size, hashlib.sha256(ends).hexdigest()

    def require_unchanged(self) -> None:
        """Nothing to ask: an open file stays what it is, whatever takes its name."""

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self.file.close()

    def open_files(self) -> tuple[IO[bytes] | io.RawIOBase, ...]:
        """What `close` closes."""
        return (self.file,)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is opened again, by its path."""
        path = self.path if self.path.is_absolute() else self.path.absolute()
        return _opened_again, (type(self), path, self.label, self.mark())

    def _refuse_bomb(self, block: Extent) -> None:
        size = block.numel * block.dtype.itemsize
        if size > _EXPANDED_LIMIT and size > 8 * self.size:
            raise UnreadableInput(
                "a tensor far larger than its file",
                where=self.label,
                why=f"shape {list(block.shape)} needs {size} bytes from a file of {self.size}",
                fix="save the tensor without expand()",
            )


def _opened_again(kind: type[Disk], path: Path, label: str, mark: tuple[Any, ...]) -> Disk:
    """The file in another process, perhaps on another machine.

    Raises:
        UnreadableInput: It isn't there, or another one is.
    """
    disk = kind(path, str(path))
    if disk.mark() != mark:
        disk.close()
        raise UnreadableInput(
            "another file than the one that was opened",
            where=str(path),
            why="its size or its contents differ",
            fix="every node has to see the same files under one path, which nobody changes",
        )
    disk.label = label
    for file in disk.open_files():  # whoever it was sent to has nothing to close
        weakref.finalize(disk, file.close)
    return disk


def _open_regular(path: Path, label: str) -> io.FileIO:
    try:
        # Checked before opening: opening a FIFO would wait for a writer.
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UnreadableInput(
                "a folder, not a file",
                where=label,
                why="a file is expected here",
                fix="name a file inside it",
            )
        if not stat.S_ISREG(mode):
            raise UnreadableInput(
                "not a regular file",
                where=label,
                why="weights are read by position, which a pipe or device can't do",
                fix="save the checkpoint to a file first",
            )
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise UnreadableInput("no such file", where=label, fix="check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableInput("can't open the file", where=label, why=why) from error


def bits_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same item size that every kernel knows."""
    return _BITS[dtype.itemsize]


def element_count(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    total = 1
    for size in shape:
        total *= size
    return total


def plausible(shape: tuple[int, ...]) -> bool:
    """Whether torch can represent the shape at all: few axes, sizes that don't overflow."""
    return len(shape) <= _MAX_AXES and element_count(tuple(max(n, 1) for n in shape)) < 1 << 63


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides are row-major wherever they matter."""
    wanted = contiguous_stride(shape)
    return all(n == 1 or a == b for n, a, b in zip(shape, stride, wanted, strict=True))
