"""Folders of `torch.distributed.checkpoint`: a `.metadata` pickle and `.distcp` files.

The metadata say which boxes of which tensors lie where. They go through the machine of
`unpickle`, as every pickle here: records in, nothing imported, nothing called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import torch

from ...errors import UnreadableInput
from ..contents import Contents
from ..disk import Disk, element_count, plausible
from ..names import shown
from ..remote_disk import open_disk
from ..volume import Volume
from .folder_files import FolderFiles
from .format import FolderFormat
from .rebuild import Unsupported
from .safe_pickle import load_pickle
from .sharded_tensor import Mosaic, Piece, covers
from .symbols import Foreign, Symbol, dtype_of
from .unpickle import Table

METADATA = ".metadata"
_LIMIT = 1 << 30  # bytes of metadata; those of a thousand ranks are some tens of MB
_SIZE = Symbol("torch", "Size")


def dcp_contents(files: FolderFiles) -> Contents:
    """What a distributed checkpoint holds, nested as the state dict was that it was made from.

    Raises:
        UnreadableInput: Broken or unsafe metadata, missing files, pieces that don't make a tensor.
    """
    folder, label = files.folder, files.label
    disks: dict[str, Disk] = {}
    index = open_disk(folder / METADATA, f"{label}/{METADATA}")
    try:
        if index.size > _LIMIT:
            raise _broken(label, f"its {METADATA} has {index.size} bytes")
        reader = _Reader(folder, label, disks)
        root = reader.read(load_pickle(index))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _close([index, *disks.values()])
        raise _broken(label, f"its {METADATA} is not what torch writes") from error
    except BaseException:
        _close([index, *disks.values()])
        raise
    volume = Volume(folder, label, [index, *disks.values()])
    return Contents(root, "dcp", volume)


class _Reader:
    """From the records of the metadata to tensors in pieces."""

    def __init__(self, folder: Path, label: str, disks: dict[str, Disk]) -> None:
        self._folder = folder
        self._label = label
        self._disks = disks

    def read(self, metadata: Any) -> Table:
        state = _state(metadata)
        places = self._places(state["storage_data"])
        paths = state.get("planner_data")
        root = Table()
        for name, record in _items(state["state_dict_metadata"]):
            path = paths.get(name, (name,)) if isinstance(paths, Mapping) else (name,)
            _put(root, path, self._leaf(name, record, places), self._label)
        return root

    def _places(self, table: Any) -> dict[tuple[str, tuple[int, ...] | None], Foreign]:
        """Where the box of a tensor that begins at some offset is stored."""
        places = {}
        for key, info in _items(table):
            index = _state(key.args[0] if isinstance(key, Foreign) and key.args else key)
            offset = index.get("offset")
            places[index["fqn"], None if offset is None else _shape(offset)] = info
        return places

    def _leaf(self, name: str, record: Any, places: Mapping[Any, Any]) -> Any:
        if not isinstance(record, Foreign) or record.cls is None:
            raise ValueError("a record of no class")
        if record.cls.name != "TensorStorageMetadata":
            return None  # a pickled object: no tensor
        state = _state(record)
        shape = _shape(state["size"])
        dtype = dtype_of(_properties(state["properties"]))
        where = f"{self._label}, tensor {shown(name)}"
        if dtype is None:
            return Unsupported("its dtype is none that can be averaged")
        if not plausible(shape):
            raise _broken(where, "it has an impossible shape")
        chunks = [_state(chunk) for chunk in state["chunks"]]
        pieces = []
        for chunk in chunks:
            offsets, size = _shape(chunk["offsets"]), _shape(chunk["sizes"])
            pieces.append(self._piece(where, places.get((name, offsets)), offsets, size, dtype))
        if not covers(shape, pieces):
            raise _broken(where, "its pieces do not make it up: some overlap, or a part is missing")
        return Mosaic(f"tensor {shown(name)}", dtype, shape, tuple(pieces))

    def _piece(
        self,
        where: str,
        info: Any,
        offsets: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Piece:
        if info is None:
            raise _broken(where, f"nothing says where its piece at {list(offsets)} is stored")
        state = _state(info)
        if state.get("transform_descriptors"):
            raise _broken(where, "it is stored compressed, or otherwise transformed")
        start, size = _natural(state["offset"]), _natural(state["length"])
        disk = self._disk(where, state["relative_path"])
        # Data are stored as they are, so that a piece larger than its place is a lie.
        if start + size > disk.size or element_count(shape) * dtype.itemsize > size:
            raise _broken(where, f"its piece at {list(offsets)} does not fit into {disk.label}")
        return Piece(offsets, shape, disk, start, size)

    def _disk(self, where: str, name: Any) -> Disk:
        if not isinstance(name, str) or not is_plain_name(name):
            raise _broken(where, "it is stored in a file outside the folder")
        if name not in self._disks:
            path = self._folder / name
            if not path.is_file():
                raise UnreadableInput(
                    "a distributed checkpoint without one of its files",
                    where=f"{self._label}/{shown(name)}",
                    why=f"{METADATA} names it",
                    fix="copy the whole folder",
                )
            self._disks[name] = open_disk(path, f"{self._label}/{shown(name)}")
        return self._disks[name]


def is_plain_name(name: str) -> bool:
    """Whether a name stands for a file in the folder itself."""
    # As Windows reads it: `C:x` is a file of another drive, and backslashes part folders.
    inside = PureWindowsPath(name).name == name
    return name not in ("", ".", "..") and name.isprintable() and inside


def _put(root: Table, path: Any, leaf: Any, label: str) -> None:
    if not isinstance(path, tuple | list) or not path or len(path) > 64:
        raise ValueError("a path that is none")
    table = root
    for key in path[:-1]:
        inner = table.setdefault(_key(key), Table())
        if not isinstance(inner, Table):
            raise _broken(label, "an entry is both a tensor and a table")
        table = inner
    if _key(path[-1]) in table:
        raise _broken(label, "two tensors have one place")
    table[_key(path[-1])] = leaf


def _key(value: Any) -> str | int:
    if not isinstance(value, str | int):
        raise TypeError("a key that is neither text nor a number")
    return value


def _items(table: Any) -> list[tuple[Any, Any]]:
    if not isinstance(table, Mapping):
        raise TypeError("no table")
    return list(table.items())


def _state(record: Any) -> Mapping[str, Any]:
    """The fields of a dataclass instance."""
    if not isinstance(record, Foreign) or not isinstance(record.state, Mapping):
        raise TypeError("no record")
    return record.state


def _properties(record: Any) -> Any:
    """The dtype among a tensor's properties, which torch pickles as a tuple."""
    state = record.state if isinstance(record, Foreign) else None
    return state["dtype"] if isinstance(state, Mapping) else state[0] if state else None


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, Foreign):
        if value.symbol != _SIZE or len(value.args) != 1:
            raise TypeError("no size")
        value = value.args[0]
    if not isinstance(value, tuple | list):
        raise TypeError("no size")
    return tuple(_natural(n) for n in value)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("no whole number")
    return value


def _close(disks: list[Disk]) -> None:
    for disk in disks:
        disk.close()


def _broken(where: str, why: str) -> UnreadableInput:
    return UnreadableInput(
        "a broken distributed checkpoint",
        where=where,
        why=why,
        fix="copy the folder again, or save it again",
    )


DISTRIBUTED = FolderFormat(
    claims=lambda files: files.index is None and METADATA in files.names,
    read=lambda files, read_file: dcp_contents(files),
)
