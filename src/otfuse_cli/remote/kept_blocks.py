"""A folder of blocks that were fetched once: the local copy of remote files, kept on request.

A file's blocks lie in a folder named after its URL, without secrets, and its version; one that
changes has another folder. A block gets its name when it is complete: processes may share them.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from ..errors import UsageError
from .location import RemotePath
from .ranges import PIECE, Fetch
from .store import Standing

VARIABLE = "OTFUSE_CACHE"
_OWNER_ONLY = 0o700  # what is private in a store stays so


def kept_folder(path: RemotePath, found: Standing) -> Path | None:
    """Where the blocks of a file are kept; None where nobody asked, or nothing tells its version.

    Raises:
        UsageError: The folder can't be made.
    """
    named = os.environ.get(VARIABLE)
    if not named or not found.version:
        return None
    key = sha256("\n".join((str(path), *found.version)).encode()).hexdigest()
    folder = Path(named) / key
    try:
        for made in (folder.parent, folder):  # parents made along the way have no mode of ours
            made.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "the folder for copies of remote files can't be made",
            where=f"{VARIABLE}={named}",
            why=error.strerror,
            fix=f"name a folder that you may write to, or unset {VARIABLE}",
        ) from error
    return folder


class KeptBlocks:
    """Fetches through a folder: blocks that it lacks are fetched whole, and kept."""

    def __init__(self, folder: Path, fetch: Fetch, size: int) -> None:
        self._folder = folder
        self._fetch = fetch
        self._size = size

    def fetch(self, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end`.

        Raises:
            OSError: The store doesn't answer.
        """
        parts = []
        for at in range(start // PIECE, -(-end // PIECE)):
            first = at * PIECE
            block = self._block(at)
            parts.append(block[max(0, start - first) : end - first])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, at: int) -> bytes:
        first, last = at * PIECE, min((at + 1) * PIECE, self._size)
        file = self._folder / f"{at:08d}"
        with suppress(OSError):
            block = file.read_bytes()
            if len(block) == last - first:
                return block
        block = self._fetch(first, last)[: last - first]
        self._keep(file, block)
        return block

    def _keep(self, file: Path, block: bytes) -> None:
        """A copy that can't be kept is none that is missed."""
        temporary = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
        try:
            with suppress(OSError):
                temporary.write_bytes(block)
                os.replace(temporary, file)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
