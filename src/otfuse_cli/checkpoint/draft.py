"""An output file before it has its name: complete under that name, or not there at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

from ..errors import OutputRefused
from .digest import Trail


class Draft:
    """A new file in the folder of `path`, published by `publish` or dropped by `discard`.

    Where the system can, the file has no name until it is published, so that not even a killed
    process leaves anything behind; elsewhere it has a temporary one. Its mode follows the umask.
    With `folder` it is made there, for `publish` to move it. Once published, `digest` is its
    SHA-256 if it was written from front to back, by `write_at` alone; None otherwise.

    Raises:
        OutputRefused: No file can be made there.
    """

    def __init__(self, path: Path, *, folder: Path | None = None) -> None:
        self.path = path
        self._folder = folder or path.parent
        self._temporary: Path | None = None
        self._trail = Trail()
        self.digest: str | None = None
        try:
            fd = _open_nameless(self._folder)
            if fd is None:
                self._temporary = self._temporary_path()
                flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
                fd = os.open(self._temporary, flags, 0o666)
        except OSError as error:
            raise refused(path, error) from error
        self.fd = fd

    def write_at(self, data: memoryview, position: int) -> None:
        """Write all of `data` (bytes) at a position.

        Raises:
            OutputRefused: The disk is full, or broken.
        """
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self.fd, data[done:], position + done)
        except OSError as error:
            raise refused(self.path, error) from error
        self._trail.saw(data, position)

    def publish(self, *, overwrite: bool, path: Path | None = None) -> None:
        """Flush the file to disk and give it its name, or `path`, whatever messages call it.

        Raises:
            OutputRefused: The name was taken meanwhile, or the disk is full.
        """
        path = path or self.path
        try:
            os.fsync(self.fd)
            if os.fstat(self.fd).st_size == self._trail.position:
                self.digest = self._trail.hexdigest()
            if self._temporary is None:
                # Remembered before it exists: an interrupt in between must not lose it.
                self._temporary = self._temporary_path()
                _link(self.fd, self._temporary)
            if not overwrite and os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, "it appeared while the file was being written")
            os.replace(self._temporary, path)
            self._temporary = None
        except OSError as error:
            raise refused(self.path, error) from error
        self._close()
        _sync_folder(path.parent)

    def discard(self) -> None:
        """Drop the file, unless it has been published."""
        self._close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _temporary_path(self) -> Path:
        return self._folder / f".otfuse-{secrets.token_hex(8)}.tmp"


def refused(path: Path, error: BaseException) -> OutputRefused:
    """The refusal that a failed system call amounts to."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return OutputRefused(
        "the output can't be written",
        where=str(path),
        why=why,
        fix="write to a folder with enough room that you may write to",
    )


def _open_nameless(folder: Path) -> int | None:
    """A file without a name that can be given one later, or `None` where that isn't possible."""
    flag = getattr(os, "O_TMPFILE", 0)
    if not flag:
        return None
    probe = folder / f".otfuse-{secrets.token_hex(8)}.tmp"
    try:
        fd = os.open(folder, flag | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            # Tried now: an hour later would be a bad time to learn that it can't be linked.
            _link(fd, probe)
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)
        return os.open(folder, flag | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:
        return None


def _link(fd: int, path: Path) -> None:
    # Python follows the link to the open file only when told a folder for relative sources.
    folder = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _sync_folder(folder: Path) -> None:
    """Make the new name durable; some file systems can't, and the file is complete anyway."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


class FolderDraft:
    """A new folder, published with all its files by `publish`, or dropped by `discard`.

    Its files are drafts beside it until then; the folder is put together and renamed at the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve() if path.is_symlink() else path
        self._drafts: dict[str, Draft] = {}

    def add(self, name: str) -> Draft:
        """Another file of the folder.

        Raises:
            OutputRefused: No file can be made there.
        """
        self._drafts[name] = Draft(self.path / name, folder=self.path.parent)
        return self._drafts[name]

    def publish(self, *, overwrite: bool) -> None:
        """Give the folder its name; one that exists must be empty, or is replaced.

        Raises:
            OutputRefused: The name was taken meanwhile, or the disk is full.
        """
        temporary = self._beside()
        try:
            try:
                temporary.mkdir()
                for name in sorted(self._drafts):
                    self._drafts[name].publish(overwrite=False, path=temporary / name)
                self._rename(temporary, overwrite=overwrite)
            except OSError as error:
                raise refused(self.path, error) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(self.path.parent)

    def discard(self) -> None:
        """Drop the files, unless they have been published."""
        for draft in self._drafts.values():
            draft.discard()

    def _rename(self, temporary: Path, *, overwrite: bool) -> None:
        if not overwrite or not self.path.exists():
            os.rename(temporary, self.path)  # fails where there is more than an empty folder
            return
        old = self._beside()
        os.rename(self.path, old)
        try:
            os.rename(temporary, self.path)
        except BaseException:
            os.rename(old, self.path)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _beside(self) -> Path:
        return self.path.parent / f".otfuse-{secrets.token_hex(8)}.tmp"


def write_text(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a small text file, complete under its name or not at all.

    Raises:
        OutputRefused: It exists and `overwrite` is false, or can't be written.
    """
    write_bytes(path, text.encode("utf-8"), overwrite=overwrite)


def write_bytes(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write a small file, complete under its name or not at all.

    Raises:
        OutputRefused: It exists and `overwrite` is false, or can't be written.
    """
    draft = Draft(path)
    try:
        draft.write_at(memoryview(data), 0)
        draft.publish(overwrite=overwrite)
    except BaseException:
        draft.discard()
        raise
