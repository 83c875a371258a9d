"""Folders of weights, as Hugging Face lays them out: one file, or shards and their index.

The index is the truth, and it is checked in both directions: every file and tensor that it names
is there, and no shard holds a tensor that it doesn't name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import UnreadableInput, UsageError
from ...output_names import SUFFIXES
from ..contents import Contents, is_leaf
from ..disk import Disk, Extent
from ..names import shown
from ..volume import Volume
from .dcp import is_plain_name
from .folder_files import FolderFiles
from .format import FolderFormat, ReadFile

INDEX = ".index.json"
_INDEX_LIMIT = 1 << 28  # bytes; one of a hundred thousand tensors has some 10 MB
_SHARD = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<total>\d{5})(?P<suffix>\.[a-z]+)")
# In order of preference, as transformers and diffusers look for them.
_USUAL = (
    *("model.safetensors", "diffusion_pytorch_model.safetensors"),
    *("pytorch_model.bin", "diffusion_pytorch_model.bin"),
)
# What libraries call the weights of a model, each its own: transformers, diffusers, peft.
_STEM = re.compile(r"(?:pytorch_(?=model))?(?P<stem>(?:diffusion_pytorch_|adapter_)?model)\b.*")
# What a trainer puts beside the weights.
_NO_WEIGHTS = re.compile(r"optim|sched|scaler|rng_state|random_states|training_args|trainer", re.I)


def weight_files(files: FolderFiles) -> list[str]:
    """The files that may be the model's weights, by their names."""
    weights = []
    for name in files.names:
        path = Path(name)
        # OpenVINO keeps raw numbers in a .bin beside the graph.
        is_openvino = path.suffix == ".bin" and f"{path.stem}.xml" in files.names
        if path.suffix in SUFFIXES and not _NO_WEIGHTS.search(name) and not is_openvino:
            weights.append(name)
    return weights


def weights_stem(path: Path | None) -> str:
    """What names of the weights in an output begin with, like those of a file or folder.

    A variant (`model.fp16`) is left out: only who asks for it would find it.
    """
    names = [] if path is None else [path.name]
    if path is not None and path.is_dir():
        files = FolderFiles(path, str(path))
        usual = [name for name in _USUAL if name in files.names]
        names = index_files(files) or usual or weight_files(files)
    match = _STEM.fullmatch(names[0]) if names else None
    return "model" if match is None else match["stem"]


def index_files(files: FolderFiles) -> list[str]:
    """The indexes of shards; those that may be meant, where there are several kinds."""
    if files.index is not None:
        return [files.index]
    indexes = [name for name in files.names if name.endswith(INDEX)]
    # transformers prefers safetensors where it finds both.
    return [name for name in indexes if name.endswith(f".safetensors{INDEX}")] or indexes


def model_folder_contents(files: FolderFiles, read_file: ReadFile) -> Contents:
    """What a folder holds: shards with an index, or a single file.

    Raises:
        UnreadableInput: Nothing that can be read, an index that doesn't fit its shards.
        UsageError: Several things that could be meant.
    """
    indexes = index_files(files)
    if len(indexes) > 1:
        raise _several(files.label, indexes)
    return _sharded(files, indexes[0], read_file) if indexes else _single(files, read_file)


def _single(files: FolderFiles, read_file: ReadFile) -> Contents:
    label, weights = files.label, weight_files(files)
    shards = [name for name in weights if _SHARD.fullmatch(name)]
    chosen = [name for name in _USUAL if name in weights][:1]
    chosen = chosen or [name for name in weights if name.endswith(".safetensors")] or weights
    if shards and chosen[0] not in _USUAL:
        whole = _SHARD.sub(r"\g<stem>\g<suffix>", shards[0])
        raise UnreadableInput(
            "shards without their index",
            where=label,
            why=f"it holds {shards[0]} but no {whole}{INDEX}",
            fix="copy the whole folder, or name one file",
        )
    if len(chosen) > 1:
        raise _several(label, chosen)
    disk = files.open(chosen[0])
    try:
        contents = read_file(disk)
    except BaseException:
        disk.close()
        raise
    volume = Volume(files.folder, label, [disk])
    return replace(contents, form=_form({contents.form}), disk=volume)


def _form(forms: Set[str]) -> str:
    """What a folder with files of these forms is called: after their family, mixed ones `pt`."""
    families = {form.partition("-")[0] for form in forms}
    return f"{families.pop() if len(families) == 1 else 'pt'}-folder"


def _sharded(files: FolderFiles, index: str, read_file: ReadFile) -> Contents:
    disks = [files.open(index)]
    try:
        return _of_shards(files, index, read_file, disks)
    except BaseException:
        for disk in disks:
            disk.close()
        raise


def _of_shards(files: FolderFiles, index: str, read_file: ReadFile, disks: list[Disk]) -> Contents:
    """`_sharded`; what is opened on the way is added to `disks`, which begin with the index."""
    label, where = files.label, f"{files.label}/{index}"
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
        contents = read_file(disks[-1])
        forms.add(contents.form)
        root |= _blocks(contents, name, weights, where, base)
        base += disks[-1].size
    for tensor, name in weights.items():
        if tensor not in root:
            raise _mismatch(where, f"{name} does not hold tensor {shown(tensor)}")
    ordered = {name: root[name] for name in weights}
    return Contents(ordered, _form(forms), Volume(files.folder, label, disks))


def _blocks(
    contents: Contents, file: str, weights: Mapping[str, str], where: str, base: int
) -> dict[str, Any]:
    """The tensors of a shard, placed in the volume; each must be one that the index puts there."""
    if not isinstance(contents.root, Mapping):
        raise _mismatch(where, f"{file} holds no state dict")
    blocks: dict[str, Any] = {}
    for name, leaf in contents.root.items():
        if not is_leaf(leaf) or not isinstance(name, str):
            continue
        if weights.get(name) != file:
            raise _mismatch(where, f"{file} holds tensor {shown(name)}, which it does not say")
        block = contents.locate(name, leaf)
        blocks[name] = block.shifted(base) if isinstance(block, Extent) else block
    return blocks


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


def _require_no_strays(files: FolderFiles, shards: list[str], where: str) -> None:
    """No other shard of the series that the index describes."""
    series = {_series(name) for name in shards} - {None}
    for name in files.names:
        if name not in shards and _series(name) in series:
            raise _mismatch(where, f"{shown(name)} is there, but it does not name that file")


def _series(name: str) -> tuple[str | Any, ...] | None:
    """What the shards of one series have in common; None for a name that is no shard's."""
    match = _SHARD.fullmatch(name)
    return match.group("stem", "total", "suffix") if match else None


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


MODEL_FOLDER = FolderFormat(
    claims=lambda files: bool(index_files(files) or weight_files(files)),
    read=model_folder_contents,
)
