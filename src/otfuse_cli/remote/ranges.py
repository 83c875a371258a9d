"""Bytes of a remote file by position: as few requests as order allows, and none for nothing.

Large reads come in pieces, several at a time, straight into the caller's memory. Small ones come
through a window, which is larger than what was asked for, and, once the file is read in order, the
next one is fetched while the last one is looked at. That order is one of layers, nearly that of the
bytes: a bias may lie before its weight, so that a few windows are held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise

PIECE = 1 << 22  # bytes of one request: longer than a store takes to answer it, little to hold
_WINDOW = 1 << 16  # around a small read: a header, a few biases
_ORDERLY = 1 << 20  # between two reads that are still in order: padding, a tensor that is skipped
_HELD = 2 * PIECE  # bytes in windows: what is read a little behind the front is still there
_AT_ONCE = 4  # requests; more are no faster on the links that were measured

Fetch = Callable[[int, int], bytes]


class RangeReader:
    """Reads of one file; several threads may ask.

    Args:
        fetch: The bytes from a position to before another one.
        size: Of the file.
    """

    def __init__(self, fetch: Fetch, size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._lock = threading.Lock()
        self._windows: list[tuple[int, bytes]] = []  # the one that was fetched last comes last
        self._next: tuple[int, int, Future[bytes]] | None = None
        self._front = 0
        self._run = 0
        self._ahead = False

    def read_ahead(self) -> None:
        """From now on the file is read in order, more or less."""
        self._ahead = True

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill `buffer` with the bytes from `start`; how many there were before the end.

        Raises:
            OSError: The store doesn't answer.
        """
        wanted = min(len(buffer), self._size - start)
        if wanted <= 0:
            return 0
        with self._lock:
            done = self._held(buffer, start, wanted)
            if done < wanted:
                self._bring(buffer, start, done, wanted)
            self._look_ahead(start, start + wanted)
        return wanted

    def read_each(self, starts: list[int], size: int) -> list[bytes]:
        """`size` bytes from every position, several at a time; what lies together comes together.

        Raises:
            OSError: The store doesn't answer.
        """
        groups: list[tuple[int, int]] = []
        for start in sorted(starts):
            end = min(start + size, self._size)
            if groups and end - groups[-1][0] <= _WINDOW:
                groups[-1] = (groups[-1][0], end)
            else:
                groups.append((start, end))
        brought = dict(zip(groups, _pool().map(lambda g: self._fetch(*g), groups), strict=True))
        found = {}
        for (first, last), data in brought.items():
            for start in starts:
                if first <= start < last or start == first:
                    found[start] = data[start - first : min(start - first + size, last - first)]
        return [found[start] for start in starts]

    def _held(self, buffer: memoryview, start: int, wanted: int) -> int:
        """Copy what the windows hold of the beginning; how much that is."""
        done = 0
        while done < wanted:
            at = start + done
            window = self._window_at(at)
            if window is None:
                if self._next is None or not self._next[0] <= at < self._next[1]:
                    break
                first, _, coming = self._next
                self._next = None
                self._hold(first, coming.result())
                continue
            first, data = window
            part = memoryview(data)[at - first : start + wanted - first]
            buffer[done : done + len(part)] = part
            done += len(part)
        return done

    def _window_at(self, position: int) -> tuple[int, bytes] | None:
        for first, data in reversed(self._windows):
            if first <= position < first + len(data):
                return first, data
        return None

    def _hold(self, first: int, data: bytes) -> None:
        """Another window; the oldest ones go."""
        self._windows.append((first, data))
        while len(self._windows) > 1 and sum(len(held) for _, held in self._windows) > _HELD:
            del self._windows[0]

    def _bring(self, buffer: memoryview, start: int, done: int, wanted: int) -> None:
        """Fetch the rest of a read."""
        first, end = start + done, start + wanted
        if end - first >= PIECE:
            # Ends at multiples, so that no block of a cache is asked for twice.
            cuts = [first, *range(first - first % PIECE + PIECE, end, PIECE), end]
            parts = list(pairwise(cuts))
            self._fill(buffer, start, parts)
            return
        reach = min(max(end, first + _WINDOW), self._size)
        begin = min(first, max(0, reach - _WINDOW)) if reach == self._size else first
        data = self._fetch(begin, reach)[: reach - begin]
        self._hold(begin, data)
        buffer[done:wanted] = memoryview(data)[first - begin : end - begin]

    def _fill(self, buffer: memoryview, start: int, parts: list[tuple[int, int]]) -> None:
        """Fetch parts of a read side by side; each is let go as soon as it is copied."""

        def bring(begin: int, last: int) -> None:
            data = memoryview(self._fetch(begin, last))
            buffer[begin - start : last - start] = data[: last - begin]

        pending = [_pool().submit(bring, *part) for part in parts]
        try:
            for one in pending:
                one.result()
        finally:
            for one in pending:
                one.cancel()

    def _look_ahead(self, start: int, end: int) -> None:
        """Ask for the next window, where the file is read in order, or nearly."""
        orderly = -_HELD <= start - self._front <= _ORDERLY
        self._run = self._run + max(0, end - self._front) if orderly else 0
        self._front = max(self._front, end) if orderly else end
        begin = self._front
        while begin - self._front < PIECE and (window := self._window_at(begin)) is not None:
            begin = window[0] + len(window[1])
        enough = begin >= self._size or begin - self._front >= PIECE
        if not self._ahead or self._run < _ORDERLY or enough:
            return
        if self._next is not None and self._next[0] <= begin < self._next[1]:
            return
        # As much as was read in order: layers sorted by name end soon where layer 10 follows 1.
        reach = begin + self._run if self._run < PIECE else begin - begin % PIECE + PIECE
        last = min(reach, self._size)
        self._next = (begin, last, _pool().submit(self._fetch, begin, last))


@cache
def _pool() -> ThreadPoolExecutor:
    """One for all files: what is on its way is bounded, however many there are."""
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="otfuse-ranges")
