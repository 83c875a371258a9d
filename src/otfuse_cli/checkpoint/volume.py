"""Several files seen as one, and a part of a file seen as a file: both read like a `Disk`."""

from __future__ import annotations

import hashlib
import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UnreadableInput
from .disk import Disk

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Volume(Disk):
    """The files of a folder, laid end to end: byte `bases[i]` is the first one of `parts[i]`.

    A tensor lies in one part, so reading it is reading that part, whose name errors give.
    """

    def __init__(self, path: Path, label: str, parts: Sequence[Disk]) -> None:
        self.path = path
        self.label = label
        self.parts = tuple(parts)
        self.remark = "; ".join(part.remark for part in parts if part.remark) or None
        ends = list(accumulate(part.size for part in self.parts))
        self.size = ends[-1] if ends else 0
        self.bases = tuple(end - part.size for end, part in zip(ends, self.parts, strict=True))

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` (bytes) from position `start`, all of it in one part.

        Raises:
            UnreadableInput: The part ends before that, or the device fails.
        """
        if len(buffer):
            at = bisect_right(self.bases, start) - 1
            # An empty part has the base of its successor, which comes later.
            self.parts[at].read_into(buffer, start - self.bases[at])

    def hash_while_reading(self) -> None:
        """See `Disk`: every part does."""
        for part in self.parts:
            part.hash_while_reading()

    def sha256(self) -> str:
        """SHA-256 of what `sha256sum` prints for the parts, in the order of their names."""
        parts = sorted(self.parts, key=lambda part: part.path.name)
        lines = "".join(f"{part.sha256()}  {part.path.name}\n" for part in parts)
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()

    def digests(self) -> tuple[str, ...]:
        """See `Disk`: of every part."""
        return tuple(digest for part in self.parts for digest in part.digests())

    def take_digests(self, digests: Iterator[str]) -> None:
        """See `Disk`: every part takes its own."""
        for part in self.parts:
            part.take_digests(digests)

    def __reduce__(self) -> tuple[Any, ...]:
        """See `Disk`: every part is opened again."""
        return type(self), (self.path, self.label, self.parts)

    def require_unchanged(self) -> None:
        """See `Disk`: every part."""
        for part in self.parts:
            part.require_unchanged()

    def close(self) -> None:
        """Close the parts; closing twice is fine."""
        for part in self.parts:
            part.close()


class Window(Disk):
    """`size` bytes of a disk from `start`, as if they were a file of their own.

    Raises:
        UnreadableInput: They reach beyond the end of the disk.
    """

    def __init__(self, disk: Disk, start: int, size: int, label: str) -> None:
        self.path = disk.path
        self.label = label
        self.remark = None
        self.size = size
        self._outer = disk
        self._start = start
        if start + size > disk.size:
            raise UnreadableInput(
                "a checkpoint that is cut short",
                where=label,
                why=f"its data end at byte {start + size} of {disk.label}, which has {disk.size}",
                fix="copy or download the file again",
            )
        self.file = DiskFile(self)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` (bytes) from position `start` of the window.

        Raises:
            UnreadableInput: It ends before that, or the device fails.
        """
        if start + len(buffer) > self.size:
            raise UnreadableInput("the data end too early", where=self.label)
        self._outer.read_into(buffer, self._start + start)

    def close(self) -> None:
        """Nothing to close: the disk is somebody else's."""


class DiskFile(io.RawIOBase):
    """What `zipfile` wants of a file, for a disk that has none."""

    def __init__(self, window: Disk) -> None:
        super().__init__()
        self._window = window
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The position of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the position of the next read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._window.size}[whence]
        if base + offset < 0:
            raise ValueError("a position before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill a buffer, as far as there are bytes; how many there were."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """At most `size` bytes, all that are left without one."""
        left = max(0, self._window.size - self._at)
        data = self._window.read_bytes(self._at, left if size is None or size < 0 else size)
        self._at += len(data)
        return data
