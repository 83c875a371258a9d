"""An output on its way into a store: sent while it is written, and not seen before the end.

What is written front to back goes out at once. What comes early waits in a temporary file; so does
all of a file that is written otherwise (`torch.save`), or that has to be read before it is sent.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import OutputRefused
from ..remote.location import RemotePath
from ..remote.store import RemoteFailure, copy_inside, holds_files, listing, look_at, remove
from ..remote.upload import WRITABLE, Upload
from .digest import Trail
from .disk import Disk
from .draft import Draft, FilesDraft, beside, refused_by_system

_CHUNK = 1 << 22  # bytes copied at once out of the temporary file


class RemoteDraft:
    """A new file at a URL.

    Raises:
        OutputRefused: The temporary file can't be made.
    """

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.size = 0
        self._trail = Trail()
        self._waiting = Draft(path, folder=Path(tempfile.gettempdir()))
        self._early: dict[int, int] = {}
        self._head = b""
        self._upload: Upload | None = None
        self._streams = False

    @property
    def fd(self) -> int:
        """The temporary file, for who writes all of it."""
        return self._waiting.fd

    def stream(self, size: int) -> None:
        """Send what is written as it comes: `size` bytes, each once.

        Only what is written first, at the beginning, can be read again.

        Raises:
            OutputRefused: The store says no.
        """
        try:
            self._upload = Upload(self.path, size)
        except OSError as error:
            raise refused_by_system(self.path, error) from error
        self._streams = True

    def write_at(self, data: memoryview, position: int) -> None:
        """Write all of `data` (bytes) at a position.

        Raises:
            OutputRefused: The store says no, or the disk for temporary files is full.
        """
        if not self._streams:
            self._waiting.write_at(data, position)
            return
        if position < self.size:
            raise ValueError("these bytes were sent already")
        if position > self.size:
            self._waiting.write_at(data, position)
            self._early[position] = len(data)
            return
        if not position:
            self._head = bytes(data)
        self._send(data)
        while (length := self._early.pop(self.size, None)) is not None:
            self._send_waiting(self.size, length)

    def flush(self) -> None:
        """Send all but the last step.

        Raises:
            OutputRefused: The store says no.
            ValueError: A part was never written.
        """
        if self._early:
            raise ValueError("a part of the output was not written")
        try:
            if not self._streams:
                self._stream_waiting()
            assert self._upload is not None
            self._upload.close()
        except OSError as error:
            raise refused_by_system(self.path, error) from error

    def disk(self, label: str) -> Disk:
        """What was written, to be read: all of it, or, of what was sent already, the first part.

        Raises:
            OutputRefused: The system has no file handles left.
        """
        if self._streams:
            return SentDisk(self.path, label, self._head, self.size, self._trail.hexdigest())
        return self._waiting.disk(label)

    def commit(self) -> None:
        """Let the file appear.

        Raises:
            RemoteFailure: The store says no.
        """
        assert self._upload is not None
        self._upload.commit()

    @property
    def appeared(self) -> bool:
        """Whether the file is at its place."""
        return self._upload is not None and self._upload.committed

    def discard(self) -> None:
        """Drop the file, unless it has appeared."""
        if self._upload is not None and not self._upload.committed:
            self._upload.abort()
        self._waiting.discard()

    def withdraw(self) -> None:
        """Drop the file, also one that has appeared."""
        if self._upload is not None:
            self._upload.abort()

    def _stream_waiting(self) -> None:
        disk = self._waiting.disk(str(self.path))
        try:
            if self._upload is None:
                self._upload = Upload(self.path, disk.size)
            while self.size < disk.size:
                self._send(memoryview(disk.read_bytes(self.size, _CHUNK)))
        finally:
            disk.close()

    def _send_waiting(self, start: int, length: int) -> None:
        disk = self._waiting.disk(str(self.path))
        try:
            for at in range(start, start + length, _CHUNK):
                part = disk.read_bytes(at, min(_CHUNK, start + length - at))
                self._send(memoryview(part))
        finally:
            disk.close()

    def _send(self, data: memoryview) -> None:
        assert self._upload is not None
        try:
            self._upload.write(data)
        except OSError as error:
            raise refused_by_system(self.path, error) from error
        self._trail.saw(data, self.size)
        self.size += len(data)


class SentDisk(Disk):
    """A file that was sent, of which the first bytes are still here."""

    def __init__(self, path: RemotePath, label: str, head: bytes, size: int, sha256: str) -> None:
        self.path = path
        self.label = label
        self.remark = None
        self.size = size
        self._head = head
        self._digest = sha256

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` (bytes) from position `start`, all of it in the part that is here."""
        part = self._head[start : start + len(buffer)]
        if len(part) < len(buffer):
            raise ValueError("these bytes were sent already")
        buffer[:] = part

    def read_bytes(self, start: int, size: int) -> bytes:
        """At most `size` bytes from `start`; fewer at the end of what is here."""
        return self._head[start : start + size]

    def sha256(self) -> str:
        """SHA-256 of the whole file."""
        return self._digest

    def close(self) -> None:
        """Nothing to close."""


class RemoteFolderDraft(FilesDraft[RemoteDraft]):
    """A new folder at a URL: files that appear one after the other, an index after its shards."""

    path: RemotePath

    def __init__(self, path: RemotePath) -> None:
        super().__init__(path)

    def new_file(self, name: str) -> RemoteDraft:
        """One at its place in the folder."""
        return RemoteDraft(self.path / name)


class Arrival:
    """A sent file about to appear at its URL, and its way back if need be.

    What stood there is copied beside it first, where something else may still fail afterwards.

    Attributes:
        path: Its place.
        size: In bytes.
        last: Whether nothing can fail afterwards.
    """

    def __init__(self, draft: RemoteDraft) -> None:
        self.path = draft.path
        self.size = draft.size
        self.last = False
        self._draft = draft
        self._backup: RemotePath | None = None

    def carry_out(self, *, overwrite: bool) -> None:
        """Appear.

        Raises:
            OutputRefused: The place is taken and `overwrite` is false, or the store says no.
        """
        try:
            if lies_there(self.path):
                if not overwrite:
                    raise RemoteFailure("it appeared while the output was being written")
                if not self.last:
                    self._backup = self.path.with_name(beside(Path()).name)
                    copy_inside(self.path, self._backup)
            self._draft.commit()
        except OSError as error:
            raise refused_by_system(self.path, error) from error
        except KeyboardInterrupt:
            if not (self.last and self._draft.appeared):
                raise  # or it comes too late: all outputs are there

    def undo(self) -> str | None:
        """Leave the place as it was; where the store refuses even that, in words."""
        try:
            if self._backup is None:
                self._draft.withdraw()
                return None
            copy_inside(self._backup, self.path)
            remove(self._backup)
        except OSError as error:
            return f"{self._backup} was {self.path} ({error.strerror})"
        return None

    def forget(self) -> None:
        """Drop what was replaced."""
        with suppress(Exception, KeyboardInterrupt):
            if self._backup is not None:
                remove(self._backup)


def arrivals(drafts: Iterable[RemoteDraft | RemoteFolderDraft]) -> list[Arrival]:
    """The files of these outputs in the order in which they appear.

    The largest one is the last, since what the last one replaces need not be copied. Of a folder
    the index comes after the shards that it names: whoever looks for it finds all of it.
    """
    single = [draft for draft in drafts if isinstance(draft, RemoteDraft)]
    inside = [d for f in drafts if isinstance(f, RemoteFolderDraft) for d in f.drafts.values()]
    ordered = sorted(map(Arrival, single), key=lambda one: one.size)
    ordered = [
        *(one for one in ordered if inside),
        *sorted(map(Arrival, inside), key=lambda one: one.path.suffix == ".json"),
        *(one for one in ordered if not inside),
    ]
    for one in ordered[-1:]:
        one.last = True
    return ordered


def lies_there(path: RemotePath) -> bool:
    """Whether a file is at a URL.

    Raises:
        RemoteFailure: The store doesn't say.
    """
    try:
        return not look_at(path).folder
    except FileNotFoundError:
        return False


def check_remote_output(path: RemotePath, *, overwrite: bool, folder: bool) -> None:
    """Refuse an output at a URL early.

    Raises:
        OutputRefused: It exists and `overwrite` is false, it is not of its kind, or nothing can be
            written there.
        UsageError: A library is missing.
    """
    problem = _problem(path, overwrite=overwrite, folder=folder)
    if problem is not None:
        why, fix = problem
        raise OutputRefused("the output is refused", where=str(path), why=why, fix=fix)
    _require_writable(path / ".otfuse" if folder else path)


def _problem(path: RemotePath, *, overwrite: bool, folder: bool) -> tuple[str, str] | None:
    """Why an output can't be, and what to do about it."""
    if path.scheme not in WRITABLE:
        why = f"what is written to {path.scheme}:// may be seen before it is complete, or never"
        return why, "write to s3://, gs:// or a path of this machine, and upload that"
    if not path.name:
        return "it is a bucket", "name something inside it"
    try:
        there, holds = lies_there(path), holds_files(path)
    except OSError as error:
        raise refused_by_system(path, error) from error
    if folder and there:
        return "a folder is to be written, and it is none", "name another folder"
    if holds and not folder:
        return "it is a folder", "name a file inside it"
    if (there or holds) and not overwrite:
        return "it exists already", "choose another name, or add --overwrite"
    return None


def _require_writable(path: RemotePath) -> None:
    """An hour later would be a bad time to learn that the store takes nothing there."""
    try:
        Upload(path).probe()
    except OSError as error:
        raise refused_by_system(path, error) from error


def outdated_files(drafts: Iterable[RemoteDraft | RemoteFolderDraft]) -> list[RemotePath]:
    """Files of folders that are replaced, which the new ones don't have.

    Raises:
        OutputRefused: The store doesn't say.
    """
    outdated: list[RemotePath] = []
    for folder in drafts:
        if not isinstance(folder, RemoteFolderDraft):
            continue
        try:
            names = [name for name, inner in listing(folder.path) if not inner]
        except FileNotFoundError:
            continue
        except OSError as error:
            raise refused_by_system(folder.path, error) from error
        outdated += [folder.path / name for name in names if name not in folder.drafts]
    return outdated


def remove_outdated(paths: Iterable[RemotePath]) -> None:
    """Delete what a new folder has replaced; an interrupt comes too late, all outputs are there."""
    for path in paths:
        with suppress(OSError, KeyboardInterrupt):
            remove(path)
