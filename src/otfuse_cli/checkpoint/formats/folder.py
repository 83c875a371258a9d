"""Folders of weights, as Hugging Face lays them out: one file, or shards and their index.

The index is the truth, and it is checked in both directions: every file and tensor that it names
is there, and no shard holds a tensor that it doesn't name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UnreadableInput, UsageError
from ...output_names import SUFFIXES
from ..config import read_config
from ..contents import Contents, disk_contents, file_contents, is_leaf
from ..disk import Disk, Extent
from ..names import shown
from ..volume import Volume
from .dcp import METADATA, dcp_contents, is_plain_name

INDEX = ".index.json"
_INDEX_LIMIT = 1 << 28
_SHARD = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<total>\d{5})(?P<suffix>\.[a-z]+)")
# In order of preference, as transformers and diffusers look for them.
_KNOWN = (
    *("model.safetensors", "diffusion_pytorch_model.safetensors"),
    *("pytorch_model.bin", "diffusion_pytorch_model.bin"),
)
# What a trainer puts beside the weights.
_NO_WEIGHTS = re.compile(r"optim|sched|scaler|rng_state|random_states|training_args|trainer", re.I)


def is_folder(path: Path) -> bool:
    """Whether `path` stands for a folder of weights: the folder, or the index inside it."""
    return path.is_dir() or path.name.endswith(INDEX)


def folder_contents(path: Path, label: str) -> Contents:
    """What a folder holds: a distributed checkpoint, shards with an index, or a single file.

    Raises:
        UnreadableInput: Nothing that can be read, an index that doesn't fit its shards, quantised
            weights.
        UsageError: Several things that could be meant.
    """
    try:
        if not path.is_dir():
            return _sharded(_Files(path.parent, str(Path(label).parent)), path.name)
        _refuse_quantised(path, label)
        files = _Files(path, label)
    except OSError as error:
        raise UnreadableInput("can't open the folder", where=label, why=error.strerror) from error
    if METADATA in files.names:
        return dcp_contents(path, label)
    indexes = [n for n in files.names if n.endswith(INDEX)]
    # transformers prefers safetensors where it finds both.
    indexes = [n for n in indexes if n.endswith(f".safetensors{INDEX}")] or indexes
    if len(indexes) == 1:
        return _sharded(files, indexes[0])
    if indexes:
        raise _several(label, indexes)
    return _single(files)


def drafted_contents(disks: Mapping[str, Disk], path: Path, label: str) -> Contents:
    """What a folder will hold whose files are open and have no names of their own yet.

    Raises:
        UnreadableInput: See `folder_contents`.
    """
    files = _Files(path, label, disks)
    index = [name for name in disks if name.endswith(INDEX)]
    try:
        return _sharded(files, index[0]) if index else _single(files)
    finally:
        for name, disk in disks.items():
            if name not in files.taken:
                disk.close()


class _Files:
    """The files of a folder by their names: those on the disk, or those that are `open` already."""

    def __init__(self, folder: Path, label: str, disks: Mapping[str, Disk] | None = None) -> None:
        self.folder = folder
        self.label = label
        self._disks = disks
        self.names = (
            sorted(entry.name for entry in folder.iterdir() if not entry.is_dir())
            if disks is None
            else sorted(disks)
        )
        self.taken: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether there is such a file; a link that leads nowhere is none."""
        return (self.folder / name).is_file() if self._disks is None else name in self._disks

    def open(self, name: str) -> Disk:
        """One of them, for the caller to close."""
        self.taken.add(name)
        if self._disks is not None:
            return self._disks[name]
        return Disk(self.folder / name, f"{self.label}/{name}")


def _single(files: _Files) -> Contents:
    names, label = files.names, files.label
    weights = [n for n in names if Path(n).suffix in SUFFIXES and not _NO_WEIGHTS.search(n)]
    shards = [n for n in weights if _SHARD.fullmatch(n)]
    chosen = [n for n in _KNOWN if n in weights][:1] or (
        [n for n in weights if n.endswith(".safetensors")] or weights
    )
    if shards and chosen[0] not in _KNOWN:
        whole = _SHARD.sub(r"\g<stem>\g<suffix>", shards[0])
        raise UnreadableInput(
            "shards without their index",
            where=label,
            why=f"it holds {shards[0]} but no {whole}{INDEX}",
            fix="copy the whole folder, or name one file",
        )
    if len(chosen) > 1:
        raise _several(label, chosen)
    if not chosen:
        raise UnreadableInput(
            "a folder without weights",
            where=label,
            why=f"it has no file that ends in {', '.join(SUFFIXES)}",
            fix="name the folder or file that holds the weights",
        )
    disk = files.open(chosen[0])
    contents = disk_contents(disk)
    form = "safetensors-folder" if contents.form == "safetensors" else "pt-folder"
    return Contents(contents.root, form, Volume(files.folder, label, [disk]), contents.file)


def _sharded(files: _Files, index: str) -> Contents:
    label, where = files.label, f"{files.label}/{index}"
    disks = [files.open(index)]
    try:
        return _of_shards(files, index, label, where, disks)
    except BaseException:
        for disk in disks:
            disk.close()
        raise


def _of_shards(files: _Files, index: str, label: str, where: str, disks: list[Disk]) -> Contents:
    """`_sharded`; what is opened on the way is added to `disks`, which begin with the index."""
    weights = _weight_map(disks[0], where)
    shards = sorted(set(weights.values()))
    missing = [name for name in shards if not files.has(name)]
    if missing:
        raise UnreadableInput(
            "a shard is missing",
            where=f"{label}/{shown(missing[0])}",
            why=f"{index} names {len(shards)} files, {len(missing)} of them are not there",
            fix="copy or download the whole folder",
        )
    _require_no_strays(files, shards, where)
    root: dict[str, Any] = {}
    forms, base = set(), disks[0].size
    for name in shards:
        disks.append(files.open(name))
        contents = file_contents(disks[-1])
        forms.add(contents.form)
        root |= _blocks(contents, name, weights, where, base)
        base += disks[-1].size
    for tensor, name in weights.items():
        if tensor not in root:
            raise _mismatch(where, f"{name} does not hold tensor {shown(tensor)}")
    form = "safetensors-folder" if forms == {"safetensors"} else "pt-folder"
    ordered = {name: root[name] for name in weights}
    return Contents(ordered, form, Volume(files.folder, label, disks))


def _blocks(
    contents: Contents, file: str, weights: Mapping[str, str], where: str, base: int
) -> dict[str, Any]:
    """The tensors of a shard, placed in the volume; each must be one that the index puts there."""
    if not isinstance(contents.root, Mapping):
        raise _mismatch(where, f"{file} holds no state dict")
    found = {}
    for name, leaf in contents.root.items():
        if not is_leaf(leaf) or not isinstance(name, str):
            continue
        if weights.get(name) != file:
            raise _mismatch(where, f"{file} holds tensor {shown(name)}, which it does not say")
        block = contents.locate(name, leaf)
        found[name] = block.shifted(base) if isinstance(block, Extent) else block
    return found


def _weight_map(disk: Disk, where: str) -> dict[str, str]:
    """Tensor to file, as the index has it.

    Raises:
        UnreadableInput: It is none.
    """
    try:
        if disk.size > _INDEX_LIMIT:
            raise _mismatch(where, f"it has {disk.size} bytes")
        data = json.loads(disk.read_bytes(0, disk.size).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _mismatch(where, f"it is no valid JSON ({shown(str(error))})") from error
    table = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(table, dict) or not table:
        raise _mismatch(where, "it has no weight_map")
    for name, file in table.items():
        if not isinstance(file, str) or not is_plain_name(file):
            raise _mismatch(where, f"tensor {shown(name)} lies in no file of this folder")
    return table


def _require_no_strays(files: _Files, shards: list[str], where: str) -> None:
    """No other shard of the series that the index describes."""
    series = {m.group("stem", "total", "suffix") for f in shards if (m := _SHARD.fullmatch(f))}
    for name in files.names:
        match = _SHARD.fullmatch(name)
        if match and match.group("stem", "total", "suffix") in series and name not in shards:
            raise _mismatch(where, f"{shown(name)} is there, but it does not name that file")


def _refuse_quantised(folder: Path, label: str) -> None:
    config = read_config(folder) or {}
    found = config.get("quantization_config")
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise UnreadableInput(
            "a quantised checkpoint",
            where=f"{label}/config.json",
            why="quantization_config says that its weights are codes"
            + (f" ({shown(method, 40)})" if isinstance(method, str) else ""),
            fix="use the checkpoint it was quantised from, or dequantise it first",
        )


def _several(label: str, names: list[str]) -> UsageError:
    return UsageError(
        "several checkpoints in one folder",
        where=label,
        why=f"any of these could be meant: {', '.join(shown(n, 80) for n in names[:8])}",
        fix=f"name one of them, for example {label}/{shown(names[0], 80)}",
    )


def _mismatch(where: str, why: str) -> UnreadableInput:
    return UnreadableInput(
        "an index that does not fit its shards",
        where=where,
        why=why,
        fix="copy or download the whole folder again",
    )
