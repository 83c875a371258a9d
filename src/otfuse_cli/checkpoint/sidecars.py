"""What belongs to a model beside its weights: config, tokenizer and licence files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from ..errors import UnreadableInput
from .config import read_config
from .disk import Disk

_FILES = (
    *("config.json", "configuration.json", "generation_config.json", "model_index.json"),
    *("tokenizer*", "vocab.*", "vocab-*", "merges.txt", "added_tokens.json", "normalizer.json"),
    *("special_tokens_map.json", "spiece.model", "sentencepiece*.model", "*.tiktoken"),
    *("preprocessor_config.json", "processor_config.json", "image_processor*.json"),
    *("video_preprocessor_config.json", "chat_template.*", "LICENSE*", "NOTICE*"),
)
_COPY_CHUNK = 1 << 22


def is_sidecar(name: str) -> bool:
    """Whether a file of this name is copied along with the weights."""
    return any(fnmatch(name, pattern) for pattern in _FILES)


def sidecars(checkpoint: Path | None) -> tuple[Path, ...]:
    """The files that belong to the checkpoint at `checkpoint`, sorted.

    Those of its folder, where that is a model's, that is, where it has a config.json. Python files
    count where the config refers to code of the model's own (`auto_map`).
    """
    if checkpoint is None:
        return ()
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    config = read_config(folder)
    if config is None:
        return ()
    code = "auto_map" in config
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and (is_sidecar(path.name) or (code and path.suffix == ".py"))
    )


def contents_of(path: Path, dtype: str | None) -> Iterator[bytes]:
    """The bytes to write for a sidecar; a config.json says `dtype` where it said another one.

    Raises:
        UnreadableInput: It can't be read.
    """
    disk = Disk(path, str(path))
    try:
        if path.name == "config.json" and dtype is not None:
            yield _with_dtype(disk.read_bytes(0, disk.size), dtype, path)
            return
        for start in range(0, disk.size, _COPY_CHUNK):
            yield disk.read_bytes(start, _COPY_CHUNK)
    finally:
        disk.close()


def _with_dtype(data: bytes, dtype: str, path: Path) -> bytes:
    try:
        config = json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise UnreadableInput("a broken config.json", where=str(path), why=str(error)) from error
    named = [key for key in ("dtype", "torch_dtype") if key in config]
    if not named:
        return data
    config.update(dict.fromkeys(named, dtype))
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
