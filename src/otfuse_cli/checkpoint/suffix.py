"""Which format the name of an output asks for. Imports no torch: the command line reads it too."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError

PT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".checkpoint")
SUFFIXES = (".safetensors", *PT_SUFFIXES)


def suffix_of(path: str | Path) -> str:
    """The suffix of an output, which decides its format; empty for a folder.

    A folder is what exists as one, or has no suffix; `llama-3.1-8b` has none, for a suffix begins
    with a letter.

    Raises:
        UsageError: It is a suffix, but none of `SUFFIXES`.
    """
    path = Path(path)
    suffix = path.suffix
    if suffix in SUFFIXES:
        return suffix
    hidden = path.name in SUFFIXES
    if path.is_dir() or not (hidden or suffix[1:2].isalpha()):
        return ""
    raise UsageError(
        "the output's suffix is none that can be written",
        where=str(path),
        why="it has no name before it" if hidden else f"it ends in {suffix!r}",
        fix=f"end it in one of {', '.join(SUFFIXES)}, or leave it away for a folder",
    )
