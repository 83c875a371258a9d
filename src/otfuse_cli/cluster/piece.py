"""A piece of work at a worker: unpacked, computed as its master would, and packed again."""

from __future__ import annotations

import platform
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..errors import IncompatibleModels, OtfuseError, UnreadableInput
from ..runtime import work_for_others
from .parcels import Parcel, pack, unpack

# Work that a process keeps unpacked: what is being done, and what was done before.
_KEPT = 2


@dataclass(frozen=True)
class Settings:
    """How a worker has to compute for its results to have the bits that its master's would have.

    Attributes:
        threads: Of torch.
        versions: Of this package, Python and torch.
        processor: What instructions torch uses.
    """

    threads: int
    versions: tuple[str, ...]
    processor: str


@dataclass(frozen=True)
class Outcome:
    """What became of a piece.

    Attributes:
        value: The result, or the error that was raised, packed.
        failed: Whether it is an error.
        node: Where it was, in words.
        processor: What instructions torch uses there.
    """

    value: Parcel
    failed: bool
    node: str
    processor: str


def settings_here(threads: int | None = None) -> Settings:
    """Those of this process."""
    import torch

    versions = (f"otfuse {__version__}", f"Python {platform.python_version()}")
    return Settings(
        threads or torch.get_num_threads(),
        (*versions, f"torch {torch.__version__}"),
        torch.backends.cpu.get_cpu_capability(),
    )


def do_piece(settings: Settings, name: str, work: Parcel, node: str, item: Parcel) -> Outcome:
    """Work on one item.

    Args:
        settings: The master's.
        name: Of the work, unlike any other's.
        work: What to do with an item.
        node: Where this is, in words.
        item: What to do it with.
    """
    here = settings_here(settings.threads)
    try:
        if here.versions != settings.versions:
            raise _other_versions(settings, here, node)
        work_for_others(settings.threads)
        result, failed = pack(_kept(name, work)(unpack(item))), False
    except UnreadableInput as error:
        result, failed = pack(_seen_from(error, node)), True
    except OtfuseError as error:
        result, failed = pack(error), True
    return Outcome(result, failed, node, here.processor)


_unpacked: OrderedDict[str, Callable[[Any], Any]] = OrderedDict()


def _kept(name: str, work: Parcel) -> Callable[[Any], Any]:
    """Work, unpacked once in a process: files stay open, programs are built once."""
    if name not in _unpacked:
        _unpacked[name] = unpack(work)
        while len(_unpacked) > _KEPT:
            _unpacked.popitem(last=False)
    _unpacked.move_to_end(name)
    return _unpacked[name]


def _seen_from(error: UnreadableInput, node: str) -> UnreadableInput:
    """The error with the node where it was met."""
    error.where = f"{error.where}, on worker node {node}" if error.where else f"node {node}"
    if error.what == "no such file":
        error.why = "workers read checkpoints themselves, and this one isn't there"
        error.fix = "keep them where every node sees them under one path, or at a URL"
    return error


def _other_versions(settings: Settings, here: Settings, node: str) -> IncompatibleModels:
    pairs = zip(here.versions, settings.versions, strict=True)
    unlike = [f"{theirs} there, {ours} here" for theirs, ours in pairs if theirs != ours]
    return IncompatibleModels(
        "a worker has other libraries",
        where=f"worker node {node}",
        why=", ".join(unlike),
        fix="install the same versions on every node: results have to have the same bits",
    )
