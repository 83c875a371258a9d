"""The config.json that Hugging Face puts beside a checkpoint: numbers that shapes don't tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..remote.location import is_remote

_LARGEST = 1 << 20  # bytes; a config is a page or two


def read_config(path: Path | None) -> Mapping[str, Any] | None:
    """What the config.json beside `path` (or in it, for a folder) says.

    None when there is none that can be read: it is a help, and not part of the checkpoint.
    """
    folder = config_folder(path)
    if folder is None:
        return None
    file = folder / "config.json"
    try:
        if file.stat().st_size > _LARGEST:
            return None
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def network_folder(path: Path | None) -> Path | None:
    """Where a library finds what it builds a network from; None in memory, and for a URL.

    Libraries would take a URL for a name on their hub.
    """
    return None if is_remote(path) else config_folder(path)


def config_folder(path: Path | None) -> Path | None:
    """Where a checkpoint's config.json would lie; None for one in memory."""
    if path is None:
        return None
    return path if path.is_dir() else path.parent
