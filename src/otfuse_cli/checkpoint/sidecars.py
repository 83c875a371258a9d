"""What belongs to a model beside its weights: config, tokenizer and licence files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import UnreadableInput
from .config import read_config
from .remote_disk import open_disk

_FILES = (
    *("config.json", "configuration.json", "generation_config.json", "model_index.json"),
    *("tokenizer*", "vocab.*", "vocab-*", "merges.txt", "added_tokens.json", "normalizer.json"),
    *("special_tokens_map.json", "spiece.model", "sentencepiece*.model", "*.tiktoken"),
    *("preprocessor_config.json", "processor_config.json", "image_processor*.json"),
    *("video_preprocessor_config.json", "chat_template.*", "LICENSE*", "NOTICE*"),
)
_COPY_CHUNK = 1 << 22  # bytes: a tokenizer may have tens of MB


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


def contents_of(path: Path, dtype: str | None, config: Mapping[str, Any]) -> Iterator[bytes]:
    """The bytes to write for a sidecar.

    A config.json says `dtype` where it said another one, and what `config` says.

    Raises:
        UnreadableInput: It can't be read.
    """
    disk = open_disk(path, str(path))
    try:
        if path.name == "config.json" and (dtype is not None or config):
            yield _changed(disk.read_bytes(0, disk.size), dtype, config, path)
            return
        for start in range(0, disk.size, _COPY_CHUNK):
            yield disk.read_bytes(start, _COPY_CHUNK)
    finally:
        disk.close()


def _changed(data: bytes, dtype: str | None, more: Mapping[str, Any], path: Path) -> bytes:
    try:
        config = json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise UnreadableInput("a broken config.json", where=str(path), why=str(error)) from error
    named = [key for key in ("dtype", "torch_dtype") if dtype is not None and key in config]
    if not named and not more:
        return data
    config |= {**dict.fromkeys(named, dtype), **more}
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
