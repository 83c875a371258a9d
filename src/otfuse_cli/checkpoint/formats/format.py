"""What a container format is: how it is recognised and read, and, where it can be, written.

A format is a module of this room with one record for each of these that it can do. The records are
listed in `registry`; nothing else names a format. What can't be read is listed in `refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..contents import Contents
from ..disk import Disk
from ..draft import Draft, FolderDraft
from ..extras import Extras
from ..names import TensorInfo
from ..publication import Publication
from ..remote_draft import RemoteDraft, RemoteFolderDraft
from ..wrappers import Container
from .folder_files import FolderFiles

# From an open file to what it holds; the caller closes it.
ReadFile = Callable[[Disk], Contents]


@dataclass(frozen=True)
class FileFormat:
    """A format of single files.

    Attributes:
        claims: Whether a file of these first bytes (512, or all there are) and of this size is one.
        read: What such a file holds. Raises `UnreadableInput` where it is broken or unsafe.
        by_ranges: Whether a few reads tell where everything lies; a file of another format that is
            far away is copied first.
    """

    claims: Callable[[bytes, int], bool]
    read: ReadFile
    by_ranges: bool = True


@dataclass(frozen=True)
class FolderFormat:
    """A format of folders.

    Attributes:
        claims: Whether a folder is one.
        read: What such a folder holds, and how a single file in it is read. Raises
            `UnreadableInput` where it is broken, `UsageError` where several things could be meant.
    """

    claims: Callable[[FolderFiles], bool]
    read: Callable[[FolderFiles, ReadFile], Contents]


class Template(Protocol):
    """The checkpoint that an output is to be like."""

    @property
    def path(self) -> Path | None:
        """The file or folder, or None for a state dict in memory."""

    @property
    def container(self) -> Container:
        """What lies around its state dict."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Its tensors by their clean names."""

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """Name -> the other names that share its tensor."""


@dataclass(frozen=True)
class Order:
    """An output to be written.

    Attributes:
        path: Its name.
        infos: The tensors that will be put.
        like: Whose container it has.
        extras: Other entries of the file, where the format has room for them.
        shard_size: Most bytes in a file of a folder.
        dtype: What the config.json of a folder is to say, where it isn't the one of `like`.
        config: What else it is to say.
    """

    path: Path
    infos: Sequence[TensorInfo]
    like: Template
    extras: Extras | None
    shard_size: int | None
    dtype: str | None
    config: Mapping[str, Any]


class Writer(Protocol):
    """Takes the tensors of an output, each once, in any order.

    Attributes:
        draft: What it writes into.
        wrapper: Keys that will lead to the state dict, outermost first.
    """

    @property
    def draft(self) -> Draft | FolderDraft | RemoteDraft | RemoteFolderDraft:
        """See above."""

    wrapper: tuple[str, ...]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor under its clean name.

        Raises:
            ValueError: Unknown name, put twice, or not the announced shape and dtype.
            OutputRefused: The disk is full.
        """

    def put_rows(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Store the rows of a tensor from `first`; a tensor's rows come in order.

        Raises:
            ValueError: As for `put`, or rows out of order.
            OutputRefused: The disk is full.
        """

    def finish(self) -> None:
        """Complete the output.

        Raises:
            ValueError: A tensor was not put.
            OutputRefused: The disk is full.
        """


@dataclass(frozen=True)
class OutputFormat:
    """A format that is written.

    Attributes:
        suffixes: Of the outputs that have it, among `output_names.SUFFIXES`; the empty one is that
            of a folder.
        start: A writer for an order, whose draft belongs to the publication.
        check: Refuses an order before anything is written; raises `UsageError`.
    """

    suffixes: tuple[str, ...]
    start: Callable[[Publication, Order], Writer]
    check: Callable[[Path, Sequence[TensorInfo]], None] = lambda path, infos: None
