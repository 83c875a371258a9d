"""Zip archives of `torch.save`: one pickle, and a record for each storage."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping

from ...errors import UnreadableInput
from ..disk import Disk
from ..names import shown
from ..wrappers import SAVE_STATE_DICT
from .format import FileFormat
from .rebuild import storage_from_id
from .refusing import refuse_archive
from .safe_pickle import PickleStream, broken_torch_file, load_next, refuse_unsafe
from .torch_file import TorchFile, big_endian
from .unpickle import Unpickler

_ZIP = b"PK\x03\x04"  # the signature of a local file header
_LOCAL_HEADER = 30  # its bytes before the name of the record


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
        raise broken_torch_file(disk, "two records of the archive have the same name")
    refuse_archive(disk, records)
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise UnreadableInput(
            "a zip file, but no torch checkpoint",
            where=disk.label,
            why="it has no data.pkl record",
            fix=f"save a state dict: {SAVE_STATE_DICT}",
        )
    extents = _extents(disk, records, pickles[0].removesuffix("data.pkl"))
    if "byteorder" in extents and disk.read_bytes(*extents["byteorder"]).strip() != b"little":
        raise big_endian(disk)
    start, size = extents["data.pkl"]
    unpickler = Unpickler(storage_from_id)
    root = load_next(disk, unpickler, PickleStream(disk, start, start + size))
    refuse_unsafe(disk, unpickler)
    storages = {}
    for name, extent in extents.items():
        if name.startswith("data/"):
            storages[name.removeprefix("data/")] = extent
    return TorchFile(disk, root, storages)


def _extents(
    disk: Disk, records: Mapping[str, zipfile.ZipInfo], top: str
) -> dict[str, tuple[int, int]]:
    """Position and size of the records in the folder `top`, by their names inside it."""
    inside = {name: record for name, record in records.items() if name.startswith(top)}
    heads = disk.read_each([r.header_offset for r in inside.values()], _LOCAL_HEADER)
    return {
        name.removeprefix(top): _extent(disk, record, head)
        for (name, record), head in zip(inside.items(), heads, strict=True)
    }


def _extent(disk: Disk, record: zipfile.ZipInfo, head: bytes) -> tuple[int, int]:
    """Position and size of a record's bytes, which torch stores as they are, by its `head`."""
    if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
        raise UnreadableInput(
            "a compressed or encrypted checkpoint archive",
            where=disk.label,
            why=f"record {shown(record.filename)} is not stored as it is; torch.save stores it so",
            fix="load it with torch and torch.save it again",
        )
    if head[:4] != _ZIP or len(head) < _LOCAL_HEADER:
        raise broken_torch_file(disk, f"record {shown(record.filename)} has no header")
    skip = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    start = record.header_offset + _LOCAL_HEADER + skip
    if start + record.file_size > disk.size:
        raise broken_torch_file(
            disk, f"record {shown(record.filename)} reaches beyond the end of the file"
        )
    return start, record.file_size


TORCH_ZIP = FileFormat(
    claims=lambda head, size: head.startswith(_ZIP),
    read=lambda disk: read_zip(disk).contents("pt"),
)
