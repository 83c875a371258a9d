"""What `torch.save` wrote before torch 1.6: five pickles, and raw storages behind them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import UnreadableInput
from ..disk import Disk
from ..names import shown
from ..wrappers import SAVE_STATE_DICT
from .format import FileFormat
from .rebuild import StorageRef, storage_from_id
from .refusing import foreign_dump, refuse_pickle
from .safe_pickle import (
    PickleStream,
    broken_torch_file,
    is_pickle,
    load_next,
    refuse_unsafe,
    unsafe_names,
)
from .torch_file import TorchFile, big_endian
from .unpickle import Unpickler

# The values of the first two pickles, in every such file.
_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001


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
    try:
        magic = load_next(disk, unpickler, stream)
        refuse_unsafe(disk, unpickler)
    except UnreadableInput as error:
        raise foreign_dump(disk, unsafe_names(unpickler)) or error from error
    if magic != _MAGIC:
        refuse_pickle(disk, unpickler.symbols, magic)
        raise UnreadableInput(
            "a pickle, but no torch checkpoint",
            where=disk.label,
            why="it was not written by torch.save",
            fix=f"save it with torch: {SAVE_STATE_DICT}",
        )
    protocol, system, root, keys = (load_next(disk, unpickler, stream) for _ in range(4))
    refuse_unsafe(disk, unpickler)
    if protocol != _PROTOCOL or not isinstance(system, dict) or not isinstance(keys, list):
        raise broken_torch_file(disk, "not the preamble that torch writes")
    if system.get("little_endian") is False:
        raise big_endian(disk)
    extents = _legacy_extents(disk, stream.position, keys, storages)
    return TorchFile(disk, root, extents)


def _legacy_extents(
    disk: Disk, position: int, keys: Iterable[Any], storages: dict[str, StorageRef]
) -> dict[str, tuple[int, int]]:
    """Storages follow the pickles, each after its number of elements."""
    extents: dict[str, tuple[int, int]] = {}
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None or key in extents:
            raise broken_torch_file(disk, "its list of storages doesn't fit its tensors")
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
            raise broken_torch_file(
                disk, f"storage {shown(key)} has another size than its tensors say"
            )
        extents[key] = (position + 8, size)
        position += 8 + size
    return extents


TORCH_LEGACY = FileFormat(
    claims=lambda head, size: is_pickle(head),
    read=lambda disk: read_legacy(disk).contents("pt-legacy"),
    by_ranges=False,  # every storage follows the one before
)
