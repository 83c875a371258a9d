"""A file in a store, read as one on the disk is: by ranges, or whole where that can't be."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from ..errors import UnreadableInput
from ..remote.kept_blocks import KeptBlocks, kept_folder
from ..remote.location import NO_ACCESS, RemotePath
from ..remote.ranges import RangeReader
from ..remote.store import RemoteFailure, Standing, download, fetch, look_at, takes_ranges
from .disk import Disk
from .volume import DiskFile


class RemoteDisk(Disk):
    """One file of a store, open for reading.

    Attributes:
        remark: What its reader should know of how it is read; None for nothing.

    Raises:
        UnreadableInput: It is missing, a folder, or the store says no.
        UsageError: A library is missing.
    """

    def __init__(self, path: RemotePath, label: str) -> None:
        self.path: RemotePath = path
        self.label = label
        found = self._look()
        if found.folder:
            raise UnreadableInput(
                "a folder, not a file",
                where=label,
                why="a file is expected here",
                fix="name a file inside it",
            )
        self.remark: str | None = None
        self._version = found.version
        self._whole: IO[bytes] | None = None
        self._trail = None
        self._sha256 = None
        self._lock = threading.Lock()
        self._position = threading.Lock()
        self.size = found.size or 0
        self.file = DiskFile(self)
        kept = kept_folder(path, found)
        self._kept = kept is not None
        wanted = self._fetch if kept is None else KeptBlocks(kept, self._fetch, self.size).fetch
        self._reader = RangeReader(wanted, self.size)
        if found.size != 0 and not self._takes_ranges(found):
            self._fetch_whole("its server sends files whole only")

    def fetch_whole(self) -> None:
        """Copy the file to a temporary one, and read that from now on."""
        if self._whole is None and not self._kept:
            self._fetch_whole("its format is not read by ranges")

    def hash_while_reading(self) -> None:
        """See `Disk`; what comes next is asked for early as well."""
        super().hash_while_reading()
        self._reader.read_ahead()

    def read_each(self, starts: list[int], size: int) -> list[bytes]:
        """See `Disk`: several at a time."""
        if self._whole is not None:
            return super().read_each(starts, size)
        try:
            return self._reader.read_each(starts, size)
        except (RemoteFailure, FileNotFoundError) as error:
            raise self._unreadable(error) from error

    def sha256(self) -> str:
        """See `Disk`. It is taken last, so that what was read has to be what is there still.

        Raises:
            UnreadableInput: The file changed, or the store doesn't answer.
        """
        digest = super().sha256()
        self.require_unchanged()
        return digest

    def mark(self) -> tuple[Any, ...]:
        """See `Disk`: the version that its store tells, or the ends where it tells none."""
        return (self.size, *self._version) if self._version else super().mark()

    def require_unchanged(self) -> None:
        """Require that the file is the one that was opened.

        Raises:
            UnreadableInput: It changed, or the store doesn't answer.
        """
        found = self._look()
        if found.version != self._version or (found.size is not None and found.size != self.size):
            raise UnreadableInput(
                "the file changed while it was read",
                where=self.label,
                why="the store has another version of it now",
                fix="don't change an input while it is being read; run again",
            )

    def close(self) -> None:
        """Drop what was copied; closing twice is fine."""
        if self._whole is not None:
            self._whole.close()

    def open_files(self) -> tuple[IO[bytes], ...]:
        """See `Disk`."""
        return () if self._whole is None else (self._whole,)

    def _read_at(self, buffer: memoryview, start: int) -> int:
        if self._whole is not None:
            with self._position:
                self._whole.seek(start)
                return self._whole.readinto(buffer)  # type: ignore[attr-defined, no-any-return]
        return self._reader.read_into(buffer, start)

    def _fetch(self, start: int, end: int) -> bytes:
        data = fetch(self.path, start, end)
        if len(data) > end - start:
            raise RemoteFailure(f"{len(data)} bytes came where {end - start} were asked for")
        return data

    def _fetch_whole(self, why: str) -> None:
        file = tempfile.TemporaryFile(prefix="otfuse-")  # noqa: SIM115 - closed with the disk
        try:
            download(self.path, file)
            file.flush()
            self.size = file.seek(0, 2)
        except (RemoteFailure, FileNotFoundError) as error:
            file.close()
            raise self._unreadable(error) from error
        except OSError as error:
            file.close()
            raise UnreadableInput(
                "the file can't be copied to this machine",
                where=self.label,
                why=error.strerror,
                fix=f"make room in {tempfile.gettempdir()}, or set TMPDIR",
            ) from error
        except BaseException:
            file.close()
            raise
        self._whole = file
        self.remark = f"{self.label} was fetched whole ({self.size} bytes): {why}"

    def _takes_ranges(self, found: Standing) -> bool:
        try:
            return takes_ranges(self.path, found)
        except (RemoteFailure, FileNotFoundError) as error:
            raise self._unreadable(error) from error

    def _look(self) -> Standing:
        try:
            return look_at(self.path)
        except (RemoteFailure, FileNotFoundError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> UnreadableInput:
        if isinstance(error, FileNotFoundError):
            return UnreadableInput("no such file", where=self.label, fix="check the URL")
        return UnreadableInput(
            "can't read the file from its store",
            where=self.label,
            why=error.strerror,
            fix=NO_ACCESS,
        )


def open_disk(path: Path, label: str) -> Disk:
    """A file opened for reading, wherever it lies.

    Raises:
        UnreadableInput: It is missing, a folder, no file that is read by position, or not readable.
        UsageError: A library that its store needs is missing.
    """
    return RemoteDisk(path, label) if isinstance(path, RemotePath) else Disk(path, label)
