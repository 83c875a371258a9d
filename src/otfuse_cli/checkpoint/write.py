"""Writing a checkpoint like another one: streamed, atomic, the same bytes every time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..errors import OutputRefused
from ..output_names import suffix_of
from ..remote.location import RemotePath, location
from .draft import FolderDraft, refused_by_system
from .extras import Extras
from .formats.format import Order, Writer
from .formats.recognise import disk_contents, drafted_contents
from .formats.registry import output_format
from .formats.shards import refuse_foreign_files
from .names import TensorInfo
from .open import Checkpoint, opened
from .publication import Publication
from .remote_draft import RemoteFolderDraft, check_remote_output


@contextmanager
def open_writer(
    path: str | Path,
    infos: Iterable[TensorInfo],
    *,
    like: Checkpoint,
    overwrite: bool = False,
    extras: Extras | None = None,
    shard_size: int | None = None,
    dtype: str | None = None,
    config: Mapping[str, Any] | None = None,
    outputs: Publication | None = None,
) -> Iterator[Writer]:
    """Write tensors to a new checkpoint that loads where `like` loaded.

    The suffix decides the format; a folder gets safetensors shards, their index, and the config
    and tokenizer files of `like`. Prefixes come back; `.pt` files get the wrapper keys of `like`
    too. Ties are kept: `.pt` files share the storage, safetensors store one tensor and name the
    other in their metadata. The output appears under its name complete or not at all: when the
    block ends without an exception, or with the others of `outputs`.

    Args:
        path: The output.
        infos: The tensors that will be put.
        like: Whose container the output has.
        overwrite: Replace what exists.
        extras: Other entries of a `.pt` file; by default it has none.
        shard_size: Most bytes in a file of a folder.
        dtype: What the config.json of a folder is to say, where it isn't the one of `like`.
        config: What else it is to say.
        outputs: What it is published with.

    Raises:
        UsageError: Unknown suffix, or a dtype that the format lacks.
        OutputRefused: The output exists, or can't be written.
        ValueError: A tensor was not put, or a name announced twice.
    """
    path, infos = location(path), tuple(infos)
    suffix = suffix_of(path)
    output = output_format(suffix)
    output.check(path, infos)
    check_output(path, overwrite=overwrite, folder=not suffix)
    order = Order(path, infos, like, extras, shard_size, dtype, config or {})
    with ExitStack() as stack:
        if outputs is None:
            outputs = stack.enter_context(Publication(overwrite=overwrite))
        writer = output.start(outputs, order)
        yield writer
        writer.finish()
        writer.draft.flush()


def read_back(writer: Writer, label: str) -> Checkpoint:
    """What was written, opened as its readers will open it, before it has its name.

    Raises:
        UnreadableInput: It can't be read.
        OutputRefused: The system has no file handles left.
    """
    if isinstance(writer.draft, FolderDraft | RemoteFolderDraft):
        contents = drafted_contents(writer.draft.disks(label), writer.draft.path, label)
    else:
        contents = disk_contents(writer.draft.disk(label))
    return opened(contents, label, writer.wrapper)


def check_output(path: str | Path, *, overwrite: bool, folder: bool = False) -> None:
    """Refuse an output early, before any work is done for it.

    Raises:
        OutputRefused: It exists and `overwrite` is false, it is not of its kind (file or folder),
            or the folder above it is missing or may not be written to.
    """
    path = location(path)
    if isinstance(path, RemotePath):
        check_remote_output(path, overwrite=overwrite, folder=folder)
        if folder and path.is_dir():
            refuse_foreign_files(path)
        return
    try:
        problem = _problem(path, overwrite=overwrite, folder=folder)
        if folder and problem is None and path.is_dir():
            refuse_foreign_files(path)
    except OSError as error:
        raise refused_by_system(path, error) from error
    if problem:
        raise OutputRefused(
            "the output is refused", where=str(path), why=problem[0], fix=problem[1]
        )


def _problem(path: Path, *, overwrite: bool, folder: bool) -> tuple[str, str] | None:
    """Why an output can't be, and what to do about it."""
    if "\0" in str(path):
        return "it is no valid path", "name a file"
    if path.is_dir() and not folder:
        return "it is a folder", "name a file inside it"
    if folder and os.path.lexists(path) and not path.is_dir():
        return "a folder is to be written, and it is none", "name another folder"
    if path.exists() and not path.is_file() and not folder:
        return "it is no regular file", "name a file"
    if os.path.lexists(path) and not overwrite and not (folder and not any(path.iterdir())):
        return "it exists already", "choose another name, or add --overwrite"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}", "make that folder first"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"the folder {path.parent} may not be written to", "use another folder"
    return None
