"""One object on its way into a store: sent in parts, there when it is committed, or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from .location import RemotePath
from .store import RemoteFailure, remove, store_of, told, tried

_PART = 1 << 23  # bytes: above the least that stores take (5 MiB), little to hold
_MOST_PARTS = 9_000  # of 10,000 that stores take
_MIB = 1 << 20
# Whose libraries keep an upload out of sight until it is committed. Others let files appear while
# they are written, hubs take commits to a repository, and the web takes nothing.
WRITABLE = ("s3", "s3a", "gs", "gcs", "memory")


class Upload:
    """An object that is being written, front to back.

    Args:
        path: Its place.
        size: How large it will be, as far as anybody knows: parts of large ones are larger.

    Raises:
        RemoteFailure: The store says no.
        UsageError: A library is missing.
    """

    def __init__(self, path: RemotePath, size: int = 0) -> None:
        self.path = path
        self._part = max(_PART, -(-size // _MOST_PARTS // _MIB) * _MIB)
        # A file system of its own: its transaction is what keeps the object out of sight.
        self._store, inner = store_of(path, skip_instance_cache=True)
        self._store.start_transaction()
        self._file: Any = tried(
            path, lambda: self._store.open(inner, "wb", block_size=self._part, autocommit=False)
        )
        self._held = 0
        self.committed = False

    def probe(self) -> None:
        """Begin and drop it, to learn now whether the store would take it.

        Raises:
            RemoteFailure: The store says no.
        """
        begin = getattr(self._file, "_initiate_upload", None)  # a hook of fsspec's files
        try:
            if begin is not None:
                told(self.path, begin)
        finally:
            self.abort()

    def write(self, data: memoryview) -> None:
        """Add bytes; whenever a part is full it is sent.

        Raises:
            RemoteFailure: The store says no, or doesn't answer after the library's own retries.
        """
        done = 0
        while done < len(data):
            # In pieces, or the library would hold all of a large tensor once more.
            piece = data[done : done + self._part]
            self._write(piece)
            done += len(piece)

    def close(self) -> None:
        """Send what is left.

        Raises:
            RemoteFailure: The store says no, or doesn't answer.
        """
        if not self._file.closed:
            told(self.path, self._file.close)

    def commit(self) -> None:
        """Let the object appear.

        An interrupt waits until the store has answered, so that `committed` says what is so.

        Raises:
            RemoteFailure: The store says no, or doesn't answer.
        """
        self.close()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(told, self.path, self._file.commit)
            try:
                answer.result()
            finally:
                wait([answer])
                self.committed = answer.exception() is None

    def abort(self) -> None:
        """Drop what was sent; of a committed object, the object."""
        if self.committed:
            with suppress(RemoteFailure, FileNotFoundError):
                remove(self.path)
            return
        with suppress(Exception):
            self._file.discard()
            # Or it would be sent after all when it is collected.
            self._file.closed = True

    def _write(self, piece: memoryview) -> None:
        # Once: the library tries again itself, and a part that went twice would be there twice.
        told(self.path, lambda: self._file.write(piece))
