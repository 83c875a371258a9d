"""What the name of an output asks for, and its size. Torch-free: the command line reads it too."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from .errors import UsageError

PT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".checkpoint")
SUFFIXES = (".safetensors", *PT_SUFFIXES)

DEFAULT_SHARD = "5GB"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def suffix_of(path: str | Path) -> str:
    """The suffix of an output, which decides its format; empty for a folder.

    A folder is what exists as one, or has no suffix; `llama-3.1-8b` has none, for a suffix begins
    with a letter.

    Raises:
        UsageError: It is a suffix, but none of `SUFFIXES`.
    """
    path = path if isinstance(path, Path) else Path(path)  # a URL stays one
    suffix = named_suffix(path)
    if suffix is not None:
        return suffix
    if path.is_dir():
        return ""
    raise UsageError(
        "the output's suffix is none that can be written",
        where=str(path),
        why=f"it ends in {path.suffix!r}" if path.suffix else "it has no name before it",
        fix=f"end it in one of {', '.join(SUFFIXES)}, or leave it away for a folder",
    )


def named_suffix(path: PurePath) -> str | None:
    """What the name alone says: a suffix, empty for a folder, None for nothing that is known."""
    if path.suffix in SUFFIXES:
        return path.suffix
    return "" if is_folder_name(path) and path.name not in SUFFIXES else None


def is_folder_name(path: PurePath) -> bool:
    """Whether an output of this name is a folder: it has no suffix (one begins with a letter)."""
    return not path.suffix[1:2].isalpha()


def parse_size(text: str) -> int:
    """`5GB`, `500MiB` or a number of bytes, as bytes.

    Raises:
        UsageError: Anything else, or nothing.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMG]i?)B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if size < 1:
        raise UsageError(
            "not a size",
            where=f"--shard-size {text}",
            fix="for example 5GB, 500MB or 2GiB",
        )
    return size
