"""Writing a checkpoint like another one: streamed, atomic, the same bytes every time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import OutputRefused, UsageError
from .draft import Draft, refused
from .names import TensorInfo
from .open import Checkpoint
from .safetensors_file import CODES, make_header

PT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".checkpoint")
SUFFIXES = (".safetensors", *PT_SUFFIXES)


class Writer(Protocol):
    """Takes the tensors of an output, each once, in any order."""

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor under its clean name.

        Raises:
            ValueError: Unknown name, put twice, or not the announced shape and dtype.
            OutputRefused: The disk is full.
        """


@contextmanager
def open_writer(
    path: str | Path, infos: Iterable[TensorInfo], *, like: Checkpoint, overwrite: bool = False
) -> Iterator[Writer]:
    """Write tensors to a new checkpoint that loads where `like` loaded.

    The suffix decides the format. Prefixes come back; `.pt` files get the wrapper keys and ties
    of `like` too, while `.safetensors` stores tied tensors once. Other entries of `like` (its
    optimizer, arguments, scores) are not copied: they describe another model. The file appears
    under its name when the block ends without an exception, complete, or not at all.

    Raises:
        UsageError: Unknown suffix, or a dtype that the format lacks.
        OutputRefused: The file exists, or can't be written.
        ValueError: A tensor was not put, or a name announced twice.
    """
    path, infos = Path(path), tuple(infos)
    safetensors = suffix_of(path) == ".safetensors"
    if len({info.name for info in infos}) != len(infos):
        raise ValueError("a tensor name is announced twice")
    if safetensors:
        _require_safetensors_dtypes(path, infos)
    check_output(path, overwrite=overwrite)
    draft = Draft(path)
    try:
        writer: _Safetensors | _Torch
        writer = _Safetensors(draft, infos, like) if safetensors else _Torch(draft, infos, like)
        yield writer
        writer.finish()
        draft.publish(overwrite=overwrite)
    except BaseException:
        draft.discard()
        raise


def suffix_of(path: str | Path) -> str:
    """The suffix of an output file, which decides its format.

    Raises:
        UsageError: It is none of `SUFFIXES`.
    """
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise UsageError(
            "the output's suffix is none that can be written",
            where=str(path),
            why=f"it ends in {suffix!r}" if suffix else "it has no suffix",
            fix=f"end it in one of {', '.join(SUFFIXES)}",
        )
    return suffix


def check_output(path: str | Path, *, overwrite: bool) -> None:
    """Refuse an output early, before any work is done for it.

    Raises:
        OutputRefused: It exists and `overwrite` is false, it is a folder or device, or its folder
            is missing or may not be written to.
    """
    path = Path(path)
    why, fix = None, None
    try:
        if "\0" in str(path):
            why, fix = "it is no valid path", "name a file"
        elif path.is_dir():
            why, fix = "it is a folder", "name a file inside it"
        elif path.exists() and not path.is_file():
            why, fix = "it is no regular file", "name a file"
        elif os.path.lexists(path) and not overwrite:
            why, fix = "it exists already", "name another file, or add --overwrite"
        elif not path.parent.is_dir():
            why, fix = f"there is no folder {path.parent}", "make that folder first"
        elif not os.access(path.parent, os.W_OK | os.X_OK):
            why, fix = f"the folder {path.parent} may not be written to", "use another folder"
    except OSError as error:
        raise refused(path, error) from error
    if why:
        raise OutputRefused("the output is refused", where=str(path), why=why, fix=fix)


class _Safetensors:
    """Streams: the header first, then each tensor to its place."""

    def __init__(self, draft: Draft, infos: tuple[TensorInfo, ...], like: Checkpoint) -> None:
        prefix = like.container.prefix
        self._draft = draft
        self._prefix = prefix
        self._missing = {info.name: info for info in infos}
        full = (TensorInfo(prefix + info.name, info.shape, info.dtype) for info in infos)
        header, self._positions = make_header(full)
        draft.write_at(memoryview(header), 0)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        _check(self._missing, name, tensor)
        flat = _plain(tensor).contiguous().reshape(-1)
        if flat.numel():
            data = flat.view(torch.uint8).numpy().data
            self._draft.write_at(data, self._positions[self._prefix + name])
        del self._missing[name]

    def finish(self) -> None:
        _require_complete(self._missing)


class _Torch:
    """Collects: `torch.save` wants everything at once."""

    def __init__(self, draft: Draft, infos: tuple[TensorInfo, ...], like: Checkpoint) -> None:
        self._draft = draft
        self._like = like
        self._missing = {info.name: info for info in infos}
        self._names = tuple(self._missing)
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        _check(self._missing, name, tensor)
        # A copy: the caller may reuse its buffer, and a view would drag its whole storage along.
        self._tensors[name] = _plain(tensor).clone(memory_format=torch.contiguous_format)
        del self._missing[name]

    def finish(self) -> None:
        _require_complete(self._missing)
        value: Any = self._state_dict()
        for key in reversed(self._like.container.wrapper):
            value = {key: value}
        try:
            # A file object: torch would put the name of a path into the archive.
            with os.fdopen(os.dup(self._draft.fd), "wb") as file:
                torch.save(value, file)
        except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError
            raise refused(self._draft.path, error) from error

    def _state_dict(self) -> dict[str, torch.Tensor]:
        """Names in the order of `like`, then those that it doesn't have; tied names together."""
        container = self._like.container
        owner = {name: name for name in self._names}
        for name, others in self._like.aliases.items():
            if name in owner:
                # A name that was put itself is tied no longer.
                owner.update({other: name for other in others if other not in owner})
        order = [name for name in container.keys if name in owner]
        known = set(order)
        order += [name for name in self._names if name not in known]
        state = OrderedDict((container.prefix + name, self._tensors[owner[name]]) for name in order)
        if container.versions is None:
            return dict(state)
        versions = OrderedDict((name, dict(v)) for name, v in container.versions.items())
        state._metadata = versions  # type: ignore[attr-defined]
        return state


def _check(missing: dict[str, TensorInfo], name: str, tensor: torch.Tensor) -> None:
    info = missing.get(name)
    if info is None:
        raise ValueError(f"tensor {name} was not announced, or put before")
    if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
        raise ValueError(
            f"tensor {name} was announced as {info.dtype} {list(info.shape)}, "
            f"not {tensor.dtype} {list(tensor.shape)}"
        )


def _require_complete(missing: dict[str, TensorInfo]) -> None:
    if missing:
        raise ValueError(f"{len(missing)} tensors were not put, first {next(iter(missing))}")


def _require_safetensors_dtypes(path: Path, infos: tuple[TensorInfo, ...]) -> None:
    for info in infos:
        if info.dtype not in CODES:
            raise UsageError(
                "a dtype that safetensors lacks",
                where=f"{path}, tensor {info.name}",
                why=f"its dtype is {info.dtype}",
                fix="write a .pt file, or set --dtype",
            )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().to("cpu")
