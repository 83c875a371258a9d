"""What `torch.save` writes: zip archives, and the legacy format of torch before 1.6.

Both hold one pickle, read by `unpickle`, and raw storages, which stay in the file until a tensor is
asked for.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import UnreadableInput
from ..disk import Disk, Extent
from ..names import shown
from ..wrappers import SAVE_STATE_DICT
from .rebuild import StorageRef, TensorRef, storage_from_id
from .symbols import is_hostile, runs_when_called, runs_when_made
from .unpickle import BrokenPickleError, Unpickler

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_LOCAL_HEADER = 30
_BUFFER = 1 << 16
_LINE_LIMIT = 1 << 16

# torch marks these lazily as conjugated or negated; any other dtype so marked is nonsense.
_SIGNED = (torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass
class TorchFile:
    """The value a file holds, and where its storages lie (key -> position and size in bytes)."""

    disk: Disk
    root: Any
    legacy: bool
    extents: dict[str, tuple[int, int]] = field(default_factory=dict)

    def block(self, name: str, tensor: TensorRef) -> Extent:
        """Where a tensor lies.

        Raises:
            UnreadableInput: Outside its storage, or the storage is not in the file.
        """
        storage, itemsize = tensor.storage, tensor.dtype.itemsize
        extent = self.extents.get(storage.key)
        first = storage.first * storage.dtype.itemsize + tensor.offset * itemsize
        if extent is None:
            block = Extent(0, tensor.dtype, tensor.shape, tensor.stride)
            if block.numel == 0:
                return block
            raise _broken(self.disk, f"the data of tensor {shown(name)} is missing")
        start, size = extent
        block = Extent(
            start + first,
            tensor.dtype,
            tensor.shape,
            tensor.stride,
            conjugate=tensor.conjugate and tensor.dtype.is_complex,
            negative=tensor.negative and tensor.dtype in _SIGNED,
        )
        if block.numel and first + block.span * itemsize > size:
            raise _broken(self.disk, f"tensor {shown(name)} lies outside its storage")
        return block


class PickleStream:
    """Bytes of a file from `start` to `end`, buffered, as `pickletools` wants them."""

    def __init__(self, disk: Disk, start: int, end: int) -> None:
        self._disk = disk
        self._end = min(end, disk.size)
        self._buffer = b""
        self._at = 0
        self._next = start

    @property
    def position(self) -> int:
        """Where the next byte is read from."""
        return self._next - len(self._buffer) + self._at

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, fewer at the end, however large a broken pickle asks for."""
        self._fill(size)
        data = self._buffer[self._at : self._at + size]
        self._at += len(data)
        return data

    def readline(self) -> bytes:
        """Bytes up to and including the next newline, cut where no pickle's line reaches."""
        self._fill(_LINE_LIMIT)
        found = self._buffer.find(b"\n", self._at, self._at + _LINE_LIMIT)
        return self.read(_LINE_LIMIT if found < 0 else found + 1 - self._at)

    def _fill(self, size: int) -> None:
        have = len(self._buffer) - self._at
        if have >= size:
            return
        data = self._disk.read_bytes(
            self._next, min(max(size - have, _BUFFER), self._end - self._next)
        )
        self._next += len(data)
        self._buffer = self._buffer[self._at :] + data
        self._at = 0


def read_zip(disk: Disk) -> TorchFile:
    """Read the index and the pickle of a zip checkpoint.

    Raises:
        UnreadableInput: Truncated, no torch checkpoint, unsafe, or a whole module.
    """
    try:
        with zipfile.ZipFile(disk.file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
        raise UnreadableInput(
            "a zip checkpoint that is cut short or broken",
            where=disk.label,
            why=shown(str(error)),
            fix="copy or download the file again",
        ) from error
    records = {entry.filename: entry for entry in entries}
    if len(records) != len(entries):
        raise _broken(disk, "two records of the archive have the same name")
    stems = [name.removesuffix("/data.pkl") for name in records if name.endswith("/data.pkl")]
    stems = [stem for stem in stems if "/" not in stem]
    if len(stems) != 1:
        raise UnreadableInput(
            "a zip file, but no torch checkpoint",
            where=disk.label,
            why="it has no data.pkl record",
            fix=f"save a state dict: {SAVE_STATE_DICT}",
        )
    stem = stems[0]
    if f"{stem}/constants.pkl" in records:
        raise UnreadableInput(
            "a TorchScript archive, not a state dict",
            where=disk.label,
            why="it holds a compiled program",
            fix="torch.save(torch.jit.load('model.pt').state_dict(), 'weights.pt')",
        )
    extents = {}
    for name, record in records.items():
        if name.startswith(f"{stem}/"):
            extents[name.removeprefix(f"{stem}/")] = _extent(disk, record)
    if "byteorder" in extents and disk.read_bytes(*extents["byteorder"]).strip() != b"little":
        raise _big_endian(disk)
    start, size = extents["data.pkl"]
    unpickler = Unpickler(storage_from_id)
    root = _load(disk, unpickler, PickleStream(disk, start, start + size))
    _refuse_unsafe(disk, unpickler)
    storages = {
        name.removeprefix("data/"): extent
        for name, extent in extents.items()
        if name.startswith("data/")
    }
    return TorchFile(disk, root, legacy=False, extents=storages)


def read_legacy(disk: Disk) -> TorchFile:
    """Read the pickles of a legacy checkpoint and find its storages.

    Raises:
        UnreadableInput: Truncated, no torch checkpoint, unsafe, or a whole module.
    """
    stream = PickleStream(disk, 0, disk.size)
    storages: dict[str, StorageRef] = {}

    def persistent(pid: Any) -> Any:
        value = storage_from_id(pid)
        if isinstance(value, StorageRef):
            storages.setdefault(value.key, value)
        return value

    unpickler = Unpickler(persistent)
    magic = _load(disk, unpickler, stream)
    _refuse_unsafe(disk, unpickler)
    if magic != _MAGIC:
        raise UnreadableInput(
            "a pickle, but no torch checkpoint",
            where=disk.label,
            why="it was not written by torch.save",
            fix=f"save it with torch: {SAVE_STATE_DICT}",
        )
    protocol, system, root, keys = (_load(disk, unpickler, stream) for _ in range(4))
    _refuse_unsafe(disk, unpickler)
    if protocol != _PROTOCOL or not isinstance(system, dict) or not isinstance(keys, list):
        raise _broken(disk, "not the preamble that torch writes")
    if system.get("little_endian") is False:
        raise _big_endian(disk)
    extents = _legacy_extents(disk, stream.position, keys, storages)
    return TorchFile(disk, root, legacy=True, extents=extents)


def load_pickle(disk: Disk) -> Any:
    """The value of a file that is one pickle: records of what it names and calls, nothing run.

    Raises:
        UnreadableInput: Broken, or unsafe.
    """
    unpickler = Unpickler(storage_from_id)
    value = _load(disk, unpickler, PickleStream(disk, 0, disk.size))
    _refuse_unsafe(disk, unpickler)
    return value


def names_unsafe_global(disk: Disk) -> None:
    """Refuse bytes that a pickle loader would take for a program; otherwise do nothing.

    Raises:
        UnreadableInput: A global is named.
    """
    unpickler = Unpickler(lambda pid: None)
    try:
        unpickler.load(PickleStream(disk, 0, disk.size))
    except BrokenPickleError:
        # Garbage can spell a global by chance; only a known dangerous one is worth a word.
        if not any(map(is_hostile, unpickler.symbols)):
            return
    _refuse_unsafe(disk, unpickler)


def _legacy_extents(
    disk: Disk, position: int, keys: Iterable[Any], storages: dict[str, StorageRef]
) -> dict[str, tuple[int, int]]:
    """Storages follow the pickles, each after its number of elements."""
    extents: dict[str, tuple[int, int]] = {}
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None or key in extents:
            raise _broken(disk, "its list of storages doesn't fit its tensors")
        head = disk.read_bytes(position, 8)
        size = storage.numel * storage.dtype.itemsize
        if len(head) < 8 or position + 8 + size > disk.size:
            missing = position + 8 + size - disk.size
            raise UnreadableInput(
                "a checkpoint that is cut short",
                where=disk.label,
                why=f"storage {shown(key)} misses its last {missing} bytes",
                fix="copy or download the file again",
            )
        if int.from_bytes(head, "little") != storage.numel:
            raise _broken(disk, f"storage {shown(key)} has another size than its tensors say")
        extents[key] = (position + 8, size)
        position += 8 + size
    return extents


def _extent(disk: Disk, record: zipfile.ZipInfo) -> tuple[int, int]:
    """Position and size of a record's bytes; torch stores them as they are."""
    if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
        raise UnreadableInput(
            "a compressed or encrypted checkpoint archive",
            where=disk.label,
            why=f"record {shown(record.filename)} is not stored as it is; torch.save stores it so",
            fix="load it with torch and torch.save it again",
        )
    head = disk.read_bytes(record.header_offset, _LOCAL_HEADER)
    if head[:4] != b"PK\x03\x04" or len(head) < _LOCAL_HEADER:
        raise _broken(disk, f"record {shown(record.filename)} has no header")
    skip = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    start = record.header_offset + _LOCAL_HEADER + skip
    if start + record.file_size > disk.size:
        raise _broken(disk, f"record {shown(record.filename)} reaches beyond the end of the file")
    return start, record.file_size


def _load(disk: Disk, unpickler: Unpickler, stream: PickleStream) -> Any:
    try:
        return unpickler.load(stream)
    except BrokenPickleError as error:
        if any(map(is_hostile, unpickler.symbols)):
            _refuse_unsafe(disk, unpickler)
        raise _broken(disk, shown(str(error))) from error


def _refuse_unsafe(disk: Disk, unpickler: Unpickler) -> None:
    hostile = [symbol for symbol in unpickler.symbols if is_hostile(symbol)]
    unsafe = dict.fromkeys(map(str, hostile))
    unsafe |= dict.fromkeys(str(s) for s in unpickler.called if runs_when_called(s))
    unsafe |= dict.fromkeys(str(s) for s in unpickler.made if runs_when_made(s))
    unsafe |= unpickler.tricks
    if unsafe:
        others = f" (and {len(unsafe) - 1} more)" if len(unsafe) > 1 else ""
        raise UnreadableInput(
            "a pickle that could run code",
            where=disk.label,
            why=f"loading it would import or call {next(iter(unsafe))}{others}; nothing was run",
            fix=f"if you trust the file, load it and save its weights alone: {SAVE_STATE_DICT}",
        )


def _broken(disk: Disk, why: str) -> UnreadableInput:
    return UnreadableInput(
        "a broken torch checkpoint",
        where=disk.label,
        why=why,
        fix="copy or download the file again, or save it again",
    )


def _big_endian(disk: Disk) -> UnreadableInput:
    return UnreadableInput(
        "a checkpoint of a big-endian machine",
        where=disk.label,
        why="its bytes are in the opposite order",
        fix="load it with torch there and save it as .safetensors",
    )
