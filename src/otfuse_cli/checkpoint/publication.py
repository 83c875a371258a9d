"""Outputs that appear together: all of them, complete, or none, and what they replace stays.

A command writes into drafts, which have no name of their own. Only when all of them are complete do
they get their places, one rename after the other; should one fail, those before it are undone.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import OutputRefused, UsageError
from ..remote.location import RemotePath, is_remote
from .draft import Draft, FolderDraft, beside, refused_by_system, sync_folder
from .remote_draft import (
    Arrival,
    RemoteDraft,
    RemoteFolderDraft,
    arrivals,
    outdated_files,
    remove_outdated,
)


class Publication:
    """The outputs of one command, published when its block ends without an exception."""

    def __init__(self, *, overwrite: bool) -> None:
        self._overwrite = overwrite
        self._drafts: list[Draft | FolderDraft | RemoteDraft | RemoteFolderDraft] = []

    def file(self, path: Path) -> Draft | RemoteDraft:
        """A file to be written; inside a folder of this publication, it becomes part of that.

        Raises:
            OutputRefused: No file can be made there.
            UsageError: Another output has that name.
        """
        for other in self._drafts:
            if isinstance(other, FolderDraft | RemoteFolderDraft) and is_inside(path, other.path):
                return other.add(path.name)
            if is_same(path, other.path):
                raise UsageError("two outputs have the same name", where=str(path))
        draft = RemoteDraft(path) if isinstance(path, RemotePath) else Draft(path)
        self._drafts.append(draft)
        return draft

    def folder(self, path: Path) -> FolderDraft | RemoteFolderDraft:
        """A folder to be filled."""
        draft = RemoteFolderDraft(path) if isinstance(path, RemotePath) else FolderDraft(path)
        self._drafts.append(draft)
        return draft

    def write(self, path: Path, content: str | bytes) -> None:
        """Write a small file at once.

        Raises:
            OutputRefused: No file can be made there, or the disk is full.
        """
        data = content.encode("utf-8") if isinstance(content, str) else content
        self.file(path).write_at(memoryview(data), 0)

    def publish(self) -> None:
        """Give every output its name.

        Raises:
            OutputRefused: A name was taken meanwhile, or the disk is full; nothing has changed.
        """
        local = [d for d in self._drafts if isinstance(d, Draft | FolderDraft)]
        remote = [d for d in self._drafts if isinstance(d, RemoteDraft | RemoteFolderDraft)]
        moves: list[_Move | Arrival] = []
        outdated: list[RemotePath] = []
        try:
            for draft in self._drafts:
                draft.flush()
            if self._overwrite:
                outdated = outdated_files(remote)
            # Those of this machine first: they can be undone for nothing.
            moves += [_Move(draft.stage(), draft.path) for draft in local]
            moves += arrivals(remote)
            for move in moves:
                move.carry_out(overwrite=self._overwrite)
            for folder in dict.fromkeys(move.path.parent for move in moves):
                if not is_remote(folder):
                    sync_folder(folder)
        except BaseException as error:
            lost = [text for move in reversed(moves) if (text := move.undo())]
            if lost:
                raise OutputRefused(
                    "the outputs can't be written, and what they replaced can't be put back",
                    where=str(self._drafts[0].path),
                    why=f"{error}; {'; '.join(lost)}",
                    fix="rename what is named here by hand",
                ) from error
            raise
        for move in moves:
            move.forget()
        remove_outdated(outdated)

    def discard(self) -> None:
        """Drop all that has not been published."""
        for draft in self._drafts:
            with suppress(OSError):
                draft.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.publish()
        finally:
            self.discard()


def write_whole(path: Path, content: str | bytes, *, overwrite: bool) -> None:
    """Write a small file, complete under its name or not at all.

    Raises:
        OutputRefused: It exists and `overwrite` is false, or can't be written.
    """
    with Publication(overwrite=overwrite) as outputs:
        outputs.write(path, content)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `folder`, however it is spelled, is the one that `path` lies in."""
    return is_same(path.parent, folder)


def is_same(path: Path, other: Path) -> bool:
    """Whether two paths, however they are spelled, are one."""
    if path == other or is_remote(path) or is_remote(other):
        return path == other
    return os.path.realpath(path) == os.path.realpath(other)


class _Move:
    """A staged output on its way from a temporary name to `path`, and back if need be.

    What stood there is kept beside it until `forget`. Where a move stands is read off the folder,
    not remembered: an interrupt may come between a rename and the line that would note it.
    """

    def __init__(self, temporary: Path, path: Path) -> None:
        self.path = path
        self._temporary = temporary
        self._backup: Path | None = None

    def carry_out(self, *, overwrite: bool) -> None:
        """Take the place.

        Raises:
            OutputRefused: It is taken and `overwrite` is false, or the folder can't be changed.
        """
        try:
            if os.path.lexists(self.path):
                if not overwrite and not _is_empty_folder(self.path):
                    raise FileExistsError(
                        errno.EEXIST, "it appeared while the output was being written"
                    )
                self._backup = beside(self.path.parent)
                _keep(self.path, self._backup)
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise refused_by_system(self.path, error) from error

    def undo(self) -> str | None:
        """Leave the place as it was; where the system refuses even that, in words."""
        try:
            if not os.path.lexists(self._temporary):
                self._step_back()
            elif self._backup is not None and os.path.lexists(self._backup):
                if os.path.lexists(self.path):
                    self._backup.unlink()  # a second name of what is still in place
                else:
                    os.replace(self._backup, self.path)
        except OSError as error:
            return f"{self._backup} was {self.path} ({error.strerror or error})"
        return None

    def forget(self) -> None:
        """Drop what was replaced. An interrupt comes too late here: all outputs are in place."""
        for _ in range(2):  # a scanner may hold a file for a moment
            with suppress(Exception, KeyboardInterrupt):
                if self._backup is not None and os.path.lexists(self._backup):
                    _remove(self._backup)

    def _step_back(self) -> None:
        if self._backup is None:
            _remove(self.path)
            return
        if self._backup.is_dir():
            os.replace(self.path, self._temporary)  # which its draft drops
        os.replace(self._backup, self.path)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _keep(path: Path, backup: Path) -> None:
    """Give what is at `path` a second name, so that its place is never empty; else move it."""
    if not path.is_dir() and hasattr(os, "link"):
        with suppress(OSError, NotImplementedError):
            os.link(path, backup, follow_symlinks=False)
            return
    os.replace(path, backup)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
