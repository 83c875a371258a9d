"""Arrays by name, from wherever samples come: files, a loader function, or memory.

Nothing is unpickled: `.pt` files go through the checkpoint reader, `.npz` and `.npy` files with
object arrays are refused. A loader (`file.py:loader`) executes user code.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.open import open_checkpoint
from ..checkpoint.remote_disk import open_disk
from ..errors import OtfuseError, UnreadableInput, UsageError
from ..graph.trace.export_settings import own_output
from ..remote.location import RemotePath, is_remote
from .user_code import find_callable, names_a_module

SUFFIXES = (".npz", ".npy", ".safetensors", ".pt", ".pth")

Source = str | Path | Mapping[str, Any] | Tensor | np.ndarray


def read_entries(source: Source) -> tuple[dict[str, Tensor], str]:
    """Every array of `source` by name (a single one is called `x`), and what messages call it.

    Raises:
        UnreadableInput: Missing, broken, unsafe; a loader that fails.
        UsageError: A suffix that nobody reads, or a loader that returns something else.
    """
    if isinstance(source, RemotePath):
        return _from_file(source), str(source)
    if isinstance(source, str | Path):
        text = str(source)
        if names_a_module(text) and not Path(text).exists() and Path(text).suffix not in SUFFIXES:
            return _from_loader(text), text
        return _from_file(Path(text)), text
    return _entries(source, "the samples"), "the samples"


def _from_file(path: Path) -> dict[str, Tensor]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            "no samples in this format",
            where=f"--samples {path}",
            why=f"the suffix is {suffix or 'missing'}",
            fix=f"use {', '.join(SUFFIXES)}, or file.py:loader",
        )
    if not is_remote(path) and not path.is_file():
        raise UnreadableInput("no such file", where=f"--samples {path}", fix="check the path")
    if suffix in (".npz", ".npy"):
        return _from_numpy(path)
    with open_checkpoint(path) as file:
        names = dict.fromkeys(file.infos)
        entries = {name: file.read(name) for name in names}
        for name, others in file.aliases.items():
            entries |= dict.fromkeys(others, entries[name])
    return entries


def _from_numpy(path: Path) -> dict[str, Tensor]:
    try:
        if is_remote(path):
            return _from_remote_numpy(path)
        if path.suffix.lower() == ".npy":
            array = np.load(path, allow_pickle=False, mmap_mode="r")
            return {"x": _tensor("x", array, str(path))}
        with path.open("rb") as file, np.load(file, allow_pickle=False) as loaded:
            return {name: _tensor(name, loaded[name], str(path)) for name in loaded.files}
    except OtfuseError:
        raise
    except Exception as error:
        raise UnreadableInput(
            "the samples can't be read",
            where=str(path),
            why=str(error).strip().partition("\n")[0] or type(error).__name__,
            fix="write them with numpy.savez(PATH, x=inputs, y=labels), without object arrays",
        ) from error


def _from_remote_numpy(path: Path) -> dict[str, Tensor]:
    disk = open_disk(path, str(path))
    try:
        disk.hash_while_reading()
        loaded = np.load(BufferedReader(disk.file), allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"x": _tensor("x", loaded, str(path))}
        return {name: _tensor(name, loaded[name], str(path)) for name in loaded.files}
    finally:
        disk.close()


def _from_loader(text: str) -> dict[str, Tensor]:
    loader = find_callable(text, option="--samples")
    try:
        with own_output():
            made = loader()
    except Exception as error:
        raise UnreadableInput(
            "the loader failed",
            where=f"--samples {text}",
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            fix="it must work without arguments and return x, (x, y), or a dict of arrays",
        ) from error
    return _entries(made, text)


def _entries(made: Any, label: str) -> dict[str, Tensor]:
    if isinstance(made, tuple) and len(made) == 2:
        made = {"x": made[0], "y": made[1]}
    elif isinstance(made, Tensor | np.ndarray):
        made = {"x": made}
    if not isinstance(made, Mapping):
        raise UsageError(
            "no samples",
            where=label,
            why=f"got a {type(made).__name__}",
            fix="give x, (x, y), or a dict of arrays or tensors",
        )
    return {str(name): _tensor(str(name), value, label) for name, value in made.items()}


def _tensor(name: str, value: Any, label: str) -> Tensor:
    """As a tensor that shares the array's memory where it can."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise UnreadableInput(
                "samples that are no array",
                where=f"{label}, array {name}",
                why=f"a tensor of layout {value.layout}",
                fix="make it dense: x.to_dense()",
            )
        return value.detach()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnreadableInput(
            "samples that are no array",
            where=f"{label}, array {name}",
            why=str(error).strip().partition("\n")[0],
            fix="bring all samples into one shape",
        ) from error
    if array.dtype.kind not in "fiub":
        raise UnreadableInput(
            "samples that are not numbers",
            where=f"{label}, array {name}",
            why=f"dtype {array.dtype}",
            fix="store floating point or integer arrays",
        )
    if not array.dtype.isnative or array.dtype in (np.uint16, np.uint32, np.uint64):
        native = array.dtype.newbyteorder("=")
        array = array.astype(np.int64 if native.kind == "u" else native)
    if array.dtype == np.longdouble and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not array.flags.writeable:  # a memory map; tensors only ever read it
        array = array.view()
        return _readonly(array)
    return torch.from_numpy(np.ascontiguousarray(array))


def _readonly(array: np.ndarray) -> Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(array))
