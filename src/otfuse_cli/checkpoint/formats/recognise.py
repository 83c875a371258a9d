"""Which format an input has, by its content (its suffix says nothing), and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...errors import UnreadableInput
from ...remote.location import location
from ..config import read_config
from ..contents import Contents
from ..disk import Disk
from ..quantised import refuse_quantised_config
from .folder import INDEX
from .folder_files import FolderFiles
from .format import FileFormat
from .refusing import (
    refuse_folder,
    refuse_magic,
    refuse_placeholder,
    refuse_structure,
    unknown_file,
)
from .registry import FILE_FORMATS, FOLDER_FORMATS
from .safe_pickle import names_unsafe_global

_HEAD = 512  # bytes: the mark of a tar archive, at 257, is the last one that is looked for


def recognise(disk: Disk) -> FileFormat:
    """The format of a file.

    Raises:
        UnreadableInput: It is empty, a Git LFS pointer, or none of them.
    """
    head = disk.read_bytes(0, _HEAD)
    refuse_placeholder(disk, head)
    for form in FILE_FORMATS:
        if form.claims(head, disk.size):
            return form
    refuse_magic(disk, head)
    # Old protocols have no magic bytes, and an ordinary loader would run such a file.
    names_unsafe_global(disk)
    refuse_structure(disk, head)
    raise unknown_file(disk)


def file_contents(disk: Disk) -> Contents:
    """What a single file holds.

    Raises:
        UnreadableInput: Broken, unsafe, or in no known format.
    """
    form = recognise(disk)
    if not form.by_ranges:
        disk.fetch_whole()
    return form.read(disk)


def disk_contents(disk: Disk) -> Contents:
    """`file_contents`; the disk is closed where there are none.

    Raises:
        UnreadableInput: See there.
    """
    try:
        return file_contents(disk)
    except BaseException:
        disk.close()
        raise


def is_folder(path: Path) -> bool:
    """Whether `path` stands for a folder of weights: the folder, or the index inside it."""
    return path.is_dir() or path.name.endswith(INDEX)


def folder_contents(path: Path, label: str) -> Contents:
    """What a folder holds.

    Raises:
        UnreadableInput: Nothing that can be read, an index that doesn't fit its shards, quantised
            weights.
        UsageError: Several things that could be meant.
    """
    try:
        if path.is_dir():
            refuse_quantised_config(read_config(path), label)
            files = FolderFiles(path, label)
        else:
            files = FolderFiles(path.parent, str(location(label).parent), index=path.name)
    except OSError as error:
        raise UnreadableInput("can't open the folder", where=label, why=error.strerror) from error
    return _read_folder(files)


def drafted_contents(disks: Mapping[str, Disk], path: Path, label: str) -> Contents:
    """What a folder will hold whose files are open and have no names of their own yet.

    Raises:
        UnreadableInput: See `folder_contents`.
    """
    files = FolderFiles(path, label, disks=disks)
    try:
        return _read_folder(files)
    finally:
        for name, disk in disks.items():
            if name not in files.taken:
                disk.close()


def _read_folder(files: FolderFiles) -> Contents:
    for form in FOLDER_FORMATS:
        if form.claims(files):
            return form.read(files, file_contents)
    raise refuse_folder(files)
