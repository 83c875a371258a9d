"""Pickles of a file, read without running them: those that would run code are refused."""

from __future__ import annotations

from typing import Any

from ...errors import UnreadableInput
from ..disk import Disk
from ..names import shown
from ..wrappers import SAVE_STATE_DICT
from .rebuild import storage_from_id
from .symbols import is_hostile, runs_when_called, runs_when_made
from .unpickle import BrokenPickleError, Unpickler

_BUFFER = 1 << 16  # bytes read at once: most pickles of a checkpoint are smaller
_LINE_LIMIT = 1 << 16  # bytes; a line of a pickle is a name or a number


def is_pickle(head: bytes) -> bool:
    """Whether the first bytes of a file are those of a pickle of protocol 2 to 5.

    Older protocols have no such mark.
    """
    return head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5


class PickleStream:
    """Bytes of a file from `start` to `end`, buffered, as `pickletools` wants them."""

    def __init__(self, disk: Disk, start: int, end: int) -> None:
        self._disk = disk
        self._end = min(end, disk.size)
        self._buffer = b""
        self._at = 0
        self._next = start

    @property
    def position(self) -> int:
        """Where the next byte is read from."""
        return self._next - len(self._buffer) + self._at

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, fewer at the end, however large a broken pickle asks for."""
        self._fill(size)
        data = self._buffer[self._at : self._at + size]
        self._at += len(data)
        return data

    def readline(self) -> bytes:
        """Bytes up to and including the next newline, cut where no pickle's line reaches."""
        self._fill(_LINE_LIMIT)
        newline = self._buffer.find(b"\n", self._at, self._at + _LINE_LIMIT)
        return self.read(_LINE_LIMIT if newline < 0 else newline + 1 - self._at)

    def _fill(self, size: int) -> None:
        have = len(self._buffer) - self._at
        if have >= size:
            return
        data = self._disk.read_bytes(
            self._next, min(max(size - have, _BUFFER), self._end - self._next)
        )
        self._next += len(data)
        self._buffer = self._buffer[self._at :] + data
        self._at = 0


def load_pickle(disk: Disk) -> Any:
    """The value of a file that is one pickle: records of what it names and calls, nothing run.

    Raises:
        UnreadableInput: Broken, or unsafe.
    """
    unpickler = Unpickler(storage_from_id)
    value = load_next(disk, unpickler, PickleStream(disk, 0, disk.size))
    refuse_unsafe(disk, unpickler)
    return value


def names_unsafe_global(disk: Disk) -> None:
    """Refuse bytes that a pickle loader would take for a program; otherwise do nothing.

    Raises:
        UnreadableInput: A global is named.
    """
    unpickler = Unpickler(lambda pid: None)
    try:
        unpickler.load(PickleStream(disk, 0, disk.size))
    except BrokenPickleError:
        # Garbage can spell a global by chance; only a known dangerous one is worth a word.
        if not any(map(is_hostile, unpickler.symbols)):
            return
    refuse_unsafe(disk, unpickler)


def load_next(disk: Disk, unpickler: Unpickler, stream: PickleStream) -> Any:
    """The value of the next pickle of a stream; whether it is safe is for `refuse_unsafe` to say.

    Raises:
        UnreadableInput: It is broken.
    """
    try:
        return unpickler.load(stream)
    except BrokenPickleError as error:
        if any(map(is_hostile, unpickler.symbols)):
            refuse_unsafe(disk, unpickler)
        raise broken_torch_file(disk, shown(str(error))) from error


def unsafe_names(unpickler: Unpickler) -> dict[str, None]:
    """What a loader would import or call that may be more than data, in order."""
    unsafe = dict.fromkeys(str(s) for s in unpickler.symbols if is_hostile(s))
    unsafe |= dict.fromkeys(str(s) for s in unpickler.called if runs_when_called(s))
    unsafe |= dict.fromkeys(str(s) for s in unpickler.made if runs_when_made(s))
    return unsafe | unpickler.tricks


def refuse_unsafe(disk: Disk, unpickler: Unpickler) -> None:
    """Refuse a file whose pickles would run code.

    Raises:
        UnreadableInput: They would; names the first thing.
    """
    unsafe = unsafe_names(unpickler)
    if unsafe:
        others = f" (and {len(unsafe) - 1} more)" if len(unsafe) > 1 else ""
        raise UnreadableInput(
            "a pickle that could run code",
            where=disk.label,
            why=f"loading it would import or call {next(iter(unsafe))}{others}; nothing was run",
            fix=f"if you trust the file, load it and save its weights alone: {SAVE_STATE_DICT}",
        )


def broken_torch_file(disk: Disk, why: str) -> UnreadableInput:
    """The refusal of a file that torch did not write, or that was damaged since."""
    return UnreadableInput(
        "a broken torch checkpoint",
        where=disk.label,
        why=why,
        fix="copy or download the file again, or save it again",
    )
