"""An output before it has its name: a file or a folder that `publication` will put in its place."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ..errors import OutputRefused, UsageError
from ..remote.location import is_remote
from .digest import Trail
from .disk import Disk

# Not inherited by child processes; on Windows, bytes as they are.
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_BINARY", 0)


_AWAY = (
    "check the URL, and that the credentials which the store's own library finds may write there"
)


class Draft:
    """A new file in the folder of `path`: written, then given a temporary name by `stage`.

    Where the system can, the file has no name at all until it is staged, so that not even a killed
    process leaves anything behind; elsewhere it has the temporary one from the start. Its mode
    follows the umask. With `folder` it is made there.

    Raises:
        OutputRefused: No file can be made there.
    """

    def __init__(self, path: Path, *, folder: Path | None = None) -> None:
        self.path = path
        self._folder = folder or path.parent
        self._temporary: Path | None = None
        self._trail = Trail()
        try:
            fd = _open_nameless(self._folder)
            if fd is None:
                self._temporary = beside(self._folder)
                fd = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | _FLAGS, 0o666)
        except OSError as error:
            raise refused_by_system(path, error) from error
        self.fd = fd

    def stream(self, size: int) -> None:
        """Nothing to prepare for `size` bytes that are written once; see `RemoteDraft`."""

    def write_at(self, data: memoryview, position: int) -> None:
        """Write all of `data` (bytes) at a position.

        Raises:
            OutputRefused: The disk is full, or broken.
        """
        done = 0
        try:
            while done < len(data):
                done += _write_at(self.fd, data[done:], position + done)
        except OSError as error:
            raise refused_by_system(self.path, error) from error
        self._trail.saw(data, position)

    def flush(self) -> None:
        """Bring what was written to the disk.

        Raises:
            OutputRefused: The disk is full, or broken.
        """
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise refused_by_system(self.path, error) from error

    def disk(self, label: str) -> Disk:
        """What was written, to be read; its digest costs nothing if `write_at` wrote in order.

        Raises:
            OutputRefused: The system has no file handles left.
        """
        try:
            fd = os.dup(self.fd)
            whole = os.fstat(fd).st_size == self._trail.position
        except OSError as error:
            raise refused_by_system(self.path, error) from error
        return Disk(self.path, label, fd=fd, sha256=self._trail.hexdigest() if whole else None)

    def stage(self, path: Path | None = None) -> Path:
        """Give the file a temporary name (or `path`) and close it; returns the name.

        Raises:
            OutputRefused: The folder is gone, or the disk is full.
        """
        try:
            if self._temporary is None:
                # Remembered before it exists: an interrupt in between must not lose it.
                self._temporary = path or beside(self._folder)
                _link(self.fd, self._temporary)
            # Closed before it is moved: Windows moves no open file.
            self._close()
            if path not in (None, self._temporary):
                os.rename(self._temporary, path)
                self._temporary = path
        except OSError as error:
            raise refused_by_system(self.path, error) from error
        return self._temporary

    def discard(self) -> None:
        """Drop the file, unless it has been moved to where it belongs."""
        self._close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class OneFile(Protocol):
    """A file of a new folder: `Draft`, or `RemoteDraft`."""

    def flush(self) -> None:
        """Bring what was written to where it stays."""

    def disk(self, label: str) -> Disk:
        """What was written, to be read."""

    def discard(self) -> None:
        """Drop it, unless it has its name."""


AnyDraft = TypeVar("AnyDraft", bound=OneFile)


class FilesDraft(Generic[AnyDraft]):
    """The files of a new folder.

    Attributes:
        path: The folder.
        drafts: Its files, by their names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drafts: dict[str, AnyDraft] = {}

    def new_file(self, name: str) -> AnyDraft:
        """A draft of one."""
        raise NotImplementedError

    def add(self, name: str) -> AnyDraft:
        """Another file of the folder.

        Raises:
            OutputRefused: No file can be made for it.
            UsageError: The folder has one of that name.
        """
        if name in self.drafts:
            raise UsageError("two outputs have the same name", where=str(self.path / name))
        self.drafts[name] = self.new_file(name)
        return self.drafts[name]

    def flush(self) -> None:
        """Bring what was written to where it stays, but for the last steps.

        Raises:
            OutputRefused: The disk is full, or broken; the store says no.
        """
        for draft in self.drafts.values():
            draft.flush()

    def disks(self, label: str) -> dict[str, Disk]:
        """Every file by its name, to be read.

        Raises:
            OutputRefused: The system has no file handles left.
        """
        disks: dict[str, Disk] = {}
        try:
            for name, draft in self.drafts.items():
                disks[name] = draft.disk(f"{label}/{name}")
        except BaseException:
            for disk in disks.values():
                disk.close()
            raise
        return disks

    def discard(self) -> None:
        """Drop the files, unless they have their names."""
        for draft in self.drafts.values():
            draft.discard()


class FolderDraft(FilesDraft[Draft]):
    """A new folder: its files are drafts beside it, until `stage` puts them into one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.resolve() if path.is_symlink() else path)
        self._temporary: Path | None = None

    def new_file(self, name: str) -> Draft:
        """One beside the folder."""
        return Draft(self.path / name, folder=self.path.parent)

    def stage(self) -> Path:
        """Make the folder, with all its files, under a temporary name; returns the name.

        Raises:
            OutputRefused: The disk is full, or the folder around it is gone.
        """
        self._temporary = beside(self.path.parent)
        try:
            self._temporary.mkdir()
        except OSError as error:
            raise refused_by_system(self.path, error) from error
        for name in sorted(self.drafts):
            self.drafts[name].stage(self._temporary / name)
        sync_folder(self._temporary)
        return self._temporary

    def discard(self) -> None:
        """Drop the files, unless they have been moved to where they belong."""
        super().discard()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def beside(folder: Path) -> Path:
    """A temporary name in a folder."""
    return folder / f".otfuse-{secrets.token_hex(8)}.tmp"


def refused_by_system(path: Path, error: BaseException) -> OutputRefused:
    """The refusal that a failed system call amounts to."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return OutputRefused(
        "the output can't be written",
        where=str(path),
        why=why,
        fix=_AWAY
        if is_remote(path)
        else "write to a folder with enough room that you may write to",
    )


def _write_at(fd: int, data: memoryview, position: int) -> int:
    """Write once; how many bytes went."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, position)
    os.lseek(fd, position, os.SEEK_SET)  # Windows; a draft is written by one thread
    return os.write(fd, data)


def _open_nameless(folder: Path) -> int | None:
    """A file without a name that can be given one later, or `None` where that isn't possible."""
    flag = getattr(os, "O_TMPFILE", 0)
    if not flag or getattr(os, "link", None) not in os.supports_dir_fd:
        return None
    probe = beside(folder)
    try:
        fd = os.open(folder, flag | os.O_RDWR | _FLAGS, 0o666)
        try:
            # Tried now: an hour later would be a bad time to learn that it can't be linked.
            _link(fd, probe)
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)
        return os.open(folder, flag | os.O_RDWR | _FLAGS, 0o666)
    except OSError:
        return None


def _link(fd: int, path: Path) -> None:
    # Python follows the link to the open file only when told a folder for relative sources.
    folder = os.open("/", os.O_RDONLY | _FLAGS)
    try:
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def sync_folder(folder: Path) -> None:
    """Make the new name durable; some file systems can't, and the file is complete anyway."""
    try:
        fd = os.open(folder, os.O_RDONLY | _FLAGS)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
