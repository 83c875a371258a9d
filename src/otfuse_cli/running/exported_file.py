"""Saved `torch.export` programs (`graph.pt2`): a graph and a forward pass without user code.

The archive holds JSON and raw tensors, and pickles in a few known places. Each of those must pass
torch's `weights_only` reading before the archive is opened; anything else in it is refused.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnreadableInput

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# Members of an archive that are raw bytes, and files of one word.
_DATA = ("data/weights/weight_", "data/constants/tensor_", ".data/", ".format")
_PLAIN = ("archive_format", "archive_version", "byteorder", "version")


def load_program(path: Path) -> ExportedProgram:
    """Load a `.pt2` file after checking that nothing in it can run code.

    Raises:
        UnreadableInput: Missing, broken, or with a member that isn't plain data.
    """
    where = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableInput("can't read the program", where=where, why=str(error)) from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _require_plain(archive, where)
    except (zipfile.BadZipFile, KeyError, ValueError, AttributeError, NotImplementedError) as error:
        raise UnreadableInput(
            "not an exported program",
            where=where,
            why=str(error),
            fix="write one with torch.export.save(torch.export.export(model, inputs), PATH)",
        ) from error
    try:
        # From the bytes that were checked, not from a file that may have changed meanwhile.
        return torch.export.load(io.BytesIO(data))
    except Exception as error:
        raise UnreadableInput(
            "the program can't be loaded",
            where=where,
            why=str(error).strip().partition("\n")[0],
            fix="export it again with the torch that is installed here",
        ) from error


def _require_plain(archive: zipfile.ZipFile, where: str) -> None:
    names = archive.namelist()
    # Of two members of one name the loader might read the one that was not checked.
    if len(set(names)) != len(names):
        raise ValueError("two members have the same name")
    pickled = _pickled_members(archive, names)
    for name in names:
        inner = name.partition("/")[2]
        if inner.endswith(".json"):
            json.loads(archive.read(name))
        elif name in pickled:
            _require_weights_only(archive.read(name), name, where)
        elif not (inner.startswith(_DATA) or inner in _PLAIN):
            raise UnreadableInput(
                "the program holds more than data",
                where=f"{where}: {name}",
                why="compiled code and custom objects can run code when they are loaded",
                fix="export the plain model again",
            )


def _pickled_members(archive: zipfile.ZipFile, names: list[str]) -> set[str]:
    """Members that the loader unpickles: sample inputs, and tensors whose entry says so."""
    pickled = {n for n in names if n.partition("/")[2].startswith("data/sample_inputs/")}
    for name in names:
        inner = name.partition("/")[2]
        if inner.startswith("data/") and inner.endswith("_config.json"):
            folder = name.rpartition("/")[0]
            config: dict[str, Any] = json.loads(archive.read(name))["config"]
            for entry in config.values():
                if entry.get("use_pickle"):
                    pickled.add(f"{folder}/{entry['path_name']}")
    return pickled


def _require_weights_only(data: bytes, name: str, where: str) -> None:
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        raise UnreadableInput(
            "the program holds a pickle that may run code",
            where=f"{where}: {name}",
            why=str(error).strip().partition("\n")[0],
            fix="don't load it; export the model again from its own source",
        ) from error
