"""The SHA-256 of a file, taken from reads or writes that pass by, so that it costs no pass more."""

from __future__ import annotations

import hashlib
import threading


class Trail:
    """A digest that grows as far as bytes were seen in order, from the first one.

    What comes too early, or again, is left aside: `position` says where the digest stands.
    """

    def __init__(self) -> None:
        self.position = 0
        self._digest = hashlib.sha256()
        self._lock = threading.Lock()

    def saw(self, data: memoryview, start: int) -> None:
        """Take in bytes that lie at `start` of the file."""
        with self._lock:
            if start <= self.position < start + len(data):
                self._digest.update(data[self.position - start :])
                self.position = start + len(data)

    def hexdigest(self) -> str:
        """The digest of all bytes before `position`."""
        with self._lock:
            return self._digest.copy().hexdigest()
