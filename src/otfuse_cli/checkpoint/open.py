"""Opening a checkpoint: recognise the format, find the state dict, read tensors one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from ..errors import UnreadableInput
from ..remote.location import is_remote, location
from ..report.records import FileRecord
from .contents import KINDS, Contents, Entry, LazyTensor, plain_leaf
from .disk import Extent
from .extras import Extras, extras_of
from .formats.rebuild import Unsupported
from .formats.recognise import disk_contents, folder_contents, is_folder
from .formats.unpickle import Table
from .names import TensorInfo, clean_names, quantised_key, shown
from .quantised import quantised, refuse_codes
from .remote_disk import open_disk
from .wrappers import Container, find_state_dict, versions_of


class Checkpoint:
    """An open checkpoint. Tensors stay in the file until `read`; reads may run in parallel.

    Attributes:
        path: The file or folder, or `None` for a state dict in memory.
        label: What messages call it.
        contents: All that the file holds, the state dict among it.
        container: What lies around its state dict.
        entries: Clean name -> where the tensor is.
        infos: Clean name -> info in file order; of tied names the first one only.
        aliases: Name -> the other names that share its tensor.
        finite: Names of tensors that were found to hold no NaN or infinity.
        keyed: Whether the key that was given led to the state dict.
        remark: What the user should know of how it was opened.
    """

    def __init__(
        self,
        *,
        contents: Contents,
        label: str,
        container: Container,
        entries: Mapping[str, Entry],
        aliases: Mapping[str, tuple[str, ...]],
        keyed: bool = False,
        remark: str | None = None,
    ) -> None:
        self.contents = contents
        self.path = None if contents.disk is None else contents.disk.path
        self.label = label
        self.container = container
        self.infos: Mapping[str, TensorInfo] = MappingProxyType(
            {name: TensorInfo(name, tuple(e.shape), e.dtype) for name, e in entries.items()}
        )
        self.aliases: Mapping[str, tuple[str, ...]] = MappingProxyType(dict(aliases))
        self.entries = entries
        self._disk = contents.disk
        self.finite: set[str] = set()
        self.keyed = keyed
        of_disk = None if contents.disk is None else contents.disk.remark
        self.remark = "; ".join(said for said in (of_disk, remark) if said) or None

    def read(self, name: str) -> torch.Tensor:
        """The tensor: on the CPU, in its stored dtype, contiguous, in memory of its own.

        Raises:
            UnreadableInput: The file changed or can't be read.
            KeyError: No such name in `infos`.
        """
        return self.contents.read(self.entries[name])

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """`read(name)[first:last]`, of which no more than that is read where the file allows.

        Raises:
            UnreadableInput: The file changed or can't be read.
            KeyError: No such name in `infos`.
        """
        entry = self.entries[name]
        if isinstance(entry, Extent) and (part := entry.rows(first, last)) is not None:
            return self.contents.read(part)
        if isinstance(entry, torch.Tensor):
            return self.contents.read(entry[first:last])
        return self.read(name)[first:last]

    def first_rows(self, name: str, most: int) -> torch.Tensor:
        """At most that many rows of a tensor; a single number as it is."""
        shape = self.infos[name].shape
        return self.read_rows(name, 0, min(shape[0], most)) if shape else self.read(name)

    def hash_while_reading(self) -> None:
        """Take the digest from what is read from now on, instead of reading all once more."""
        if self._disk is not None:
            self._disk.hash_while_reading()

    def sha256(self) -> str | None:
        """SHA-256 of the file (of a folder: see `Volume`), computed once; `None` in memory."""
        return None if self._disk is None else self._disk.sha256()

    def survey(self) -> tuple[frozenset[str], tuple[str, ...]]:
        """What reading all of it has told: names of finite tensors, digests of its files."""
        return frozenset(self.finite), () if self._disk is None else self._disk.digests()

    def take_survey(self, finite: frozenset[str], digests: tuple[str, ...]) -> None:
        """Take over what `survey` gave in another process, which has read the same files."""
        self.finite |= finite
        if self._disk is not None:
            self._disk.take_digests(iter(digests))

    def record(self, *, digest: bool = True, known: str | None = None) -> FileRecord:
        """The checkpoint as it stands in a report.

        Without `digest`, or with one that is `known` already, the file is not read for it.
        """
        infos = self.infos.values()
        dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in infos)
        return FileRecord(
            path=self.label,
            sha256=known or (self.sha256() if digest else None),
            container=str(self.container),
            tensors=len(infos),
            parameters=sum(info.numel for info in infos),
            dtypes=dict(sorted(dtypes.items())),
        )

    def extras(self) -> Extras:
        """What the file holds beside these tensors, as far as it can be carried over.

        Raises:
            UnreadableInput: A tensor among it is broken.
        """
        return extras_of(self.contents, self.container.wrapper)

    def require_unchanged(self) -> None:
        """Require that a file in a store is the one that was opened, once all of it was read.

        Raises:
            UnreadableInput: It isn't.
        """
        if self._disk is not None:
            self._disk.require_unchanged()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_checkpoint(
    source: str | Path | Mapping[str, Any],
    *,
    key: str | None = None,
    label: str | None = None,
    bare: bool = False,
) -> Checkpoint:
    """Open a checkpoint file or folder, or wrap a state dict in memory.

    Args:
        source: A file or folder in one of the formats of `formats.registry`, recognised by its
            content, or a mapping of names to tensors.
        key: The (dotted) entry that holds the state dict, where there are several.
        label: What messages call it; by default the path as given.
        bare: The key is meant for several files: one without a choice doesn't need it.

    Raises:
        UnreadableInput: Missing, broken, unsafe, quantised, or without tensors.
        UsageError: Several state dicts and no `key`, or a `key` that leads nowhere.
    """
    if isinstance(source, Mapping):
        return opened(Contents(source, "memory"), label or "state dict", key, bare=bare)
    path = location(source)
    label = label or str(path if is_remote(path) else source)
    try:
        is_dir = is_folder(path)
        contents = folder_contents(path, label) if is_dir else disk_contents(open_disk(path, label))
    except ValueError as error:  # a NUL byte in the path
        raise UnreadableInput("can't open the file", where=label, why=str(error)) from error
    return opened(contents, label, key, bare=bare)


def opened(
    contents: Contents, label: str, key: str | tuple[str, ...] | None, *, bare: bool = False
) -> Checkpoint:
    """The checkpoint that `contents` hold, which are closed where they hold none.

    `key` and `bare` as for `open_checkpoint`; a tuple is the whole path, and nothing is guessed.

    Raises:
        UnreadableInput: No tensors, or some that can't be fused.
        UsageError: Several state dicts and no `key`, or a `key` that leads nowhere.
    """
    try:
        return _assemble(contents, label, key, bare)
    except BaseException:
        if contents.disk is not None:
            contents.disk.close()
        raise


def _assemble(
    contents: Contents, label: str, key: str | tuple[str, ...] | None, bare: bool
) -> Checkpoint:
    """Find the state dict, check its names and entries, find ties, strip the prefix."""
    path, table, used = find_state_dict(contents.root, key=key, label=label, kinds=KINDS, bare=bare)
    stored: dict[str, Entry] = {}
    for name, value in table.items():
        if isinstance(name, str):
            leaf = plain_leaf(value) if isinstance(value, torch.Tensor) else value
            _check_entry(label, name, leaf)
            entry = contents.locate(name, leaf)
            if isinstance(entry, Entry):
                _refuse_bytes(label, name, entry)
                stored[name] = entry
    names = clean_names(list(stored), lightning="state_dict" in path)
    beside = {} if names.counter is None else {names.counter: stored.pop(names.counter)}
    entries: dict[str, Entry] = {}
    first: dict[Any, str] = {}
    aliases: dict[str, list[str]] = {}
    for full, entry in stored.items():
        name = names.clean[full]
        owner = first.setdefault(_identity(name, entry), name)
        if owner == name:
            entries[name] = entry
        else:
            aliases.setdefault(owner, []).append(name)
    container = Container(
        format=contents.form,
        wrapper=path,
        prefix=names.prefix,
        keys=tuple(names.clean[full] for full in stored),
        spelled={c: full for full, c in names.clean.items() if full != names.prefix + c},
        beside={name: contents.read(entry) for name, entry in beside.items()},
        versions=versions_of(_metadata(table)),
    )
    ties = {name: tuple(others) for name, others in aliases.items()}
    checkpoint = Checkpoint(
        contents=contents,
        label=label,
        container=container,
        entries=entries,
        aliases=ties,
        keyed=used,
        remark=None
        if used or key is None or not path
        else f"{label} has no {key}: its only model, {'.'.join(path)}, was taken",
    )
    refuse_codes(checkpoint.infos, checkpoint.first_rows, label)
    return checkpoint


def _metadata(table: Mapping[Any, Any]) -> Any:
    """What torch sets on a state dict beside its items."""
    if isinstance(table, Table):
        return table.state.get("_metadata") if isinstance(table.state, Mapping) else None
    return getattr(table, "_metadata", None)


def _check_entry(label: str, name: str, entry: Any) -> None:
    where = f"{label}, tensor {shown(name)}"
    if not name.isprintable():
        raise UnreadableInput(
            "a tensor name that is no printable text",
            where=where,
            why="it holds control characters or half a character",
            fix="rename it and save the file again",
        )
    if quantised_key(name):
        raise quantised(where)
    if isinstance(entry, Unsupported):
        raise UnreadableInput(
            "a tensor that can't be fused",
            where=where,
            why=entry.reason,
            fix="save it as an ordinary dense tensor",
        )


def _refuse_bytes(label: str, name: str, entry: Entry) -> None:
    """A matrix of small integers where a layer has its weight is codes, scales or not."""
    last = name.rpartition(".")[2]
    if last == "weight" and len(entry.shape) > 1 and entry.dtype in (torch.int8, torch.uint8):
        raise quantised(f"{label}, tensor {shown(name)}")


def _identity(name: str, entry: Entry) -> Any:
    """Equal for tied tensors only; an empty tensor shares nothing."""
    if isinstance(entry, LazyTensor):
        return name
    if isinstance(entry, Extent):
        return entry if entry.numel else name
    if not entry.numel():
        return name
    return (
        *(entry.device, entry.data_ptr(), entry.dtype, tuple(entry.shape), entry.stride()),
        *(entry.is_conj(), entry.is_neg()),
    )
