"""Which row of `refused` an input is, asked in the order in which inputs are looked at."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from ...errors import UnreadableInput
from ...output_names import SUFFIXES
from ..disk import Disk
from ..names import shown
from .folder_files import FolderFiles
from .refused import (
    EMPTY_FILE,
    LFS_POINTER,
    NUMPY_ARCHIVE,
    PADDLE_STATE,
    REFUSALS,
    SKLEARN_DUMP,
    Names,
    Refusal,
)
from .symbols import Symbol

_SPACE = b" \t\r\n\xef\xbb\xbf"  # the last three mark UTF-8
# paddle.save puts a table under this key beside the arrays of a state dict.
_PADDLE_KEY = "StructuredToParameterName@@"
_JOBLIB_ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"


def refuse_placeholder(disk: Disk, head: bytes) -> None:
    """Refuse what stands where a file should be: nothing, or a pointer to it.

    Raises:
        UnreadableInput: It is one.
    """
    if not head:
        raise EMPTY_FILE.at(disk.label)
    if _has_magic(LFS_POINTER, head):
        raise LFS_POINTER.at(disk.label)


def refuse_magic(disk: Disk, head: bytes) -> None:
    """Refuse a file that its first bytes tell.

    Raises:
        UnreadableInput: They do.
    """
    text = head.lstrip(_SPACE)
    for row in REFUSALS:
        if _has_magic(row, head) or _has_text(row, text):
            raise row.at(disk.label)


def refuse_structure(disk: Disk, head: bytes) -> None:
    """Refuse a file without magic bytes that its structure tells.

    Raises:
        UnreadableInput: It does.
    """
    for row in REFUSALS:
        if row.looks is not None and row.looks(disk, head):
            raise row.at(disk.label)


def unknown_file(disk: Disk) -> UnreadableInput:
    """The refusal of bytes that nothing tells."""
    why = "its bytes are in no known format"
    if disk.path.suffix == ".safetensors":
        why = "it is no safetensors file, whatever its name says"
    fix = "give a .safetensors file or one written by torch.save"
    return UnreadableInput("not a checkpoint", where=disk.label, why=why, fix=fix)


def refuse_archive(disk: Disk, records: Collection[str]) -> None:
    """Refuse a zip archive whose records are those of another format.

    Raises:
        UnreadableInput: They are.
    """
    tops = {name.partition("/")[0] for name in records}
    names = set(records)
    if len(tops) == 1:
        names |= {name.partition("/")[2] for name in records}
    for row in REFUSALS:
        if _has_any(row.members, names):
            raise row.at(disk.label)
    if records and all(name.endswith(".npy") for name in records):
        raise NUMPY_ARCHIVE.at(disk.label)


def refuse_pickle(disk: Disk, symbols: Iterable[Symbol], root: Any) -> None:
    """Refuse a pickle that another library wrote.

    Raises:
        UnreadableInput: One that is told by its classes, or by a key of its own.
    """
    if isinstance(root, dict) and _PADDLE_KEY in root:
        raise PADDLE_STATE.at(disk.label)
    if (row := _pickled_by(symbols)) is not None:
        raise row.at(disk.label)


def foreign_dump(disk: Disk, unsafe: Collection[str]) -> UnreadableInput | None:
    """What to say of a pickle with these dangerous names, where they tell who wrote it.

    That is joblib's wrapper of arrays alone: where there is more, the danger is the news.
    """
    return SKLEARN_DUMP.at(disk.label) if set(unsafe) == {_JOBLIB_ARRAY} else None


def refuse_folder(files: FolderFiles) -> UnreadableInput:
    """The refusal of a folder in which there is nothing that is read."""
    names = {*files.names, *(f"{folder}/" for folder in files.folders)}
    for row in REFUSALS:
        if _has_any(row.files, names):
            return row.at(files.label, verb="holds")
    inside = [name for name in files.folders if not name.startswith(".")]
    fix = "name the folder or file that holds the weights"
    if inside:
        fix += f"; folders inside are {', '.join(shown(name, 80) for name in inside[:8])}"
    return UnreadableInput(
        "a folder without weights",
        where=files.label,
        why=f"it has no file that ends in {', '.join(SUFFIXES)}",
        fix=fix,
    )


def _has_magic(row: Refusal, head: bytes) -> bool:
    return any(head.startswith(magic, start) for start, magic in row.magic)


def _has_text(row: Refusal, text: bytes) -> bool:
    return row.text is not None and re.match(row.text, text, re.IGNORECASE) is not None


def _has_any(alternatives: tuple[Names, ...], names: Collection[str]) -> bool:
    """Whether the names match all patterns of one alternative."""
    return any(all(_matches(pattern, names) for pattern in every) for every in alternatives)


def _matches(pattern: str, names: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _pickled_by(symbols: Iterable[Symbol]) -> Refusal | None:
    names = [f"{symbol.module}.{symbol.name}." for symbol in symbols]
    for row in REFUSALS:
        starts = tuple(f"{name}." for name in row.pickled)
        if any(name.startswith(starts) for name in names):
            return row
    return None
