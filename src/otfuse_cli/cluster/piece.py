"""A piece of work at a worker: unpacked, computed as its master would, and packed again."""

from __future__ import annotations

import platform
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
class SharedName:
    """What a worker knows something by that many pieces take.

    Attributes:
        name: Unlike any other's.
        lasting: Whether it is kept for as long as the work goes on.
    """

    name: str
    lasting: bool = False


@dataclass(frozen=True)
class Assignment:
    """What is asked for.

    Attributes:
        settings: The master's.
        work: Its label.
        labels: Of the parts of the item, None for those that nobody else has; no labels for an
            item that is no tuple.
        stage: Whether the work makes something beside its result.
    """

    settings: Settings
    work: SharedName
    labels: tuple[SharedName | None, ...] | None
    stage: bool


@dataclass(frozen=True)
class PieceOutcome:
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


def do_piece(
    order: Assignment, node: str, work: Parcel, parts: Sequence[Parcel]
) -> tuple[PieceOutcome, Parcel | None]:
    """Work on one item.

    Args:
        order: What is asked for.
        node: Where this is, in words.
        work: What to do with an item.
        parts: The item.

    Returns:
        What became of it, and what it makes beside its result.
    """
    here = settings_here(order.settings.threads)
    beside: Parcel | None = None
    try:
        if here.versions != order.settings.versions:
            raise _other_versions(order.settings, here, node)
        work_for_others(order.settings.threads)
        function, known = _bench.begin(order.work, work)
        made = function(_item(order, parts, known))
        if order.stage:
            made, left = made
            beside = pack(left)
        result, failed = pack(made), False
    except UnreadableInput as error:
        result, failed = pack(_seen_from(error, node)), True
    except OtfuseError as error:
        result, failed = pack(error), True
    return PieceOutcome(result, failed, node, here.processor), beside


@dataclass
class _Bench:
    """What a process keeps unpacked: work, and what its items have in common.

    Attributes:
        works: What is being done, and what was done before, with what lasts as long.
        passing: What few items have in common.
    """

    works: OrderedDict[str, tuple[Callable[[Any], Any], dict[str, Any]]]
    passing: OrderedDict[str, Any]

    def begin(self, label: SharedName, work: Parcel) -> tuple[Callable[[Any], Any], dict[str, Any]]:
        """Work, unpacked once: files stay open, programs are built once."""
        if label.name not in self.works:
            self.works[label.name] = unpack(work), {}
            while len(self.works) > _KEPT:
                self.works.popitem(last=False)
        self.works.move_to_end(label.name)
        return self.works[label.name]

    def shared(self, label: SharedName, parcel: Parcel, known: dict[str, Any]) -> Any:
        """A part that other items have too."""
        held = known if label.lasting else self.passing
        if label.name not in held:
            held[label.name] = unpack(parcel)
        while len(self.passing) > _KEPT:
            self.passing.popitem(last=False)
        return held[label.name]


_bench = _Bench(OrderedDict(), OrderedDict())


def _item(order: Assignment, parts: Sequence[Parcel], known: dict[str, Any]) -> Any:
    if order.labels is None:
        return unpack(parts[0])
    values: list[Any] = []
    for label, part in zip(order.labels, parts, strict=True):
        values.append(unpack(part) if label is None else _bench.shared(label, part, known))
    return tuple(values)


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
