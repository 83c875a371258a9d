"""Lockstep whose batches run in other processes: what waits between two layers stays with them.

A look at a batch, and all that came before it, is a function of the batch and of the fused tensors
at that time. So it can be taken anywhere, and again where somebody failed; what is seen comes in
the order of the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..graph.trace.program import Program
from ..running.execute import Walk
from ..running.samples import Samples
from ..runtime import Runtime, Workers
from .lockstep import Lockstep, Look, Parent, Seen, Stop, Tensors, begin

# Where a pass stands: of every parent, of the fused network, and how many samples count.
_Standing = tuple[list[Any], Any, int]
# Copies of what waits that a worker has: as it came, as it is used, as it is sent.
_COPIES = 4


def open_lockstep(
    parents: Sequence[Parent],
    program: Program,
    fused: Tensors,
    samples: Samples,
    *,
    runtime: Runtime,
    keep: frozenset[str] = frozenset(),
    most_bytes: int,
) -> Lockstep:
    """All batches of all networks, here or with the workers that there are; see `Lockstep`."""
    here = Lockstep(
        parents,
        program,
        fused,
        samples,
        device=runtime.device,
        keep=keep,
        most_bytes=most_bytes,
    )
    try:
        return FarLockstep(here, runtime.workers) if runtime.workers.away else here
    except TypeError:  # a program that can't be sent
        return here


@dataclass(frozen=True)
class _Release:
    """Values of the parents that nobody asks for any more."""

    targets: tuple[str, ...]

    def __call__(self, stop: Stop) -> None:
        for walk in stop.parents:
            for name in self.targets:
                walk.release(name)


@dataclass(frozen=True)
class _Adjust:
    """A value of the fused network, scaled and shifted by channel."""

    name: str
    gain: Tensor
    shift: Tensor
    channel: int

    def __call__(self, stop: Stop) -> None:
        stop.adjust(self.name, self.gain, self.shift, channel=self.channel)


@dataclass(frozen=True)
class _Request:
    """What is to be done with every batch.

    Attributes:
        look: What is looked at.
        targets: Values of the parents that are run up to.
        layer: Of the fused network, before which it stops.
        again: The same targets are asked for once more.
        hold: Batches wait there; otherwise they run anew each time.
        keep: Values of parents that are asked for later than they are computed.
        meanwhile: What was done to waiting batches, since the beginning.
    """

    look: Look[Any]
    targets: tuple[str, ...]
    layer: str
    again: bool
    hold: bool
    keep: frozenset[str]
    meanwhile: tuple[_Release | _Adjust, ...]


@dataclass(frozen=True)
class _Passes:
    """The networks, as a worker has them.

    Attributes:
        parents: See `Lockstep`.
        program: See `Lockstep`.
        fused: Its tensors, as they were in the beginning.
        device: Where.
    """

    parents: tuple[Parent, ...]
    program: Program
    fused: Mapping[str, Tensor]
    device: str

    def __call__(self, item: tuple[Any, ...]) -> tuple[tuple[Any, int], _Standing | None]:
        """What is seen of a batch, the bytes that it holds there, and where it stands then."""
        request, batch, standing, known, *changes = item
        fused = dict(self.fused)
        for change in changes:
            fused.update(change)
        if standing is None:
            keep = request.keep
            stop = begin(self.parents, self.program, fused, batch, keep, device=self.device)
        else:
            stop = self._standing(standing, fused)
            for done in request.meanwhile[known:]:
                done(stop)
        stop.advance(self.parents, request.targets, request.layer)
        held = stop.bytes()
        seen = request.look(stop, self.parents)
        if not request.hold:
            return (seen, held), None
        if not request.again:
            stop.release(self.parents, request.targets)
        return (seen, held), ([w.state() for w in stop.parents], stop.fused.state(), stop.count)

    def _standing(self, standing: _Standing, fused: Mapping[str, Tensor]) -> Stop:
        states, state, count = standing
        walks = [
            Walk(parent.program, parent.tensors).resume(own)
            for parent, own in zip(self.parents, states, strict=True)
        ]
        return Stop(tuple(walks), Walk(self.program, fused).resume(state), count)


@dataclass
class _Waiting:
    """A batch that waits: what stands for it, and how much of `meanwhile` it knows."""

    standing: Any
    known: int


class FarLockstep(Lockstep):
    """All batches of all networks, with workers."""

    away = True

    def __init__(self, here: Lockstep, workers: Workers) -> None:
        """Stand where `here` does, at the inputs.

        Raises:
            TypeError: Something of it can't be sent.
        """
        self.__dict__.update(here.__dict__)
        self._workers = workers
        passes = _Passes(self.parents, self.program, dict(self.fused), self.device)
        self._passes = workers.share(passes)
        tensors = [*self.fused.values()]
        for parent in self.parents:
            tensors += parent.tensors.values()
        self._network_bytes = sum(t.numel() * t.element_size() for t in tensors)
        self._known: dict[str, Tensor] = dict(self.fused)
        self._changes: list[Any] = []
        self._waiting: dict[int, _Waiting] = {}
        self._meanwhile: list[_Release | _Adjust] = []
        self._held = 0

    def stops(self, *args: Any, **kwargs: Any) -> Iterator[Stop]:
        """Nobody here: looks are taken where the batches are."""
        raise NotImplementedError("batches run in other processes")

    def each(
        self,
        look: Look[Seen],
        targets: Sequence[str],
        layer: str,
        *,
        again: bool = False,
        most: int | None = None,
        memory: int = 0,
    ) -> Iterator[Seen]:
        """See `Lockstep`."""
        self._send_changes()
        left, seen = list[int](), 0
        for at in range(self.batches):
            if most is None or seen < most:
                left.append(at)
            seen += self._batches[at].count
        while left:
            keep = self.keep if self._hold else frozenset(targets)
            meanwhile = tuple(self._meanwhile)
            asked = (look, tuple(targets), layer, again, self._hold, keep, meanwhile)
            request = self._workers.share(_Request(*asked))
            items = [self._item(request, at) for at in left]
            need = self._need(memory)
            made = self._workers.stages(self._passes, items, memory=need)
            holding = self._hold
            for (value, held), standing in made:
                at = left.pop(0)
                self._held = max(held, self._held)
                if self._hold and self.batches * held > self.most_bytes:
                    # As here: all is given up, and what comes later begins anew.
                    self._hold = False
                    self._waiting.clear()
                if self._hold:
                    self._waiting[at] = _Waiting(standing, len(meanwhile))
                yield value
                if self._hold != holding:
                    break

    def release(self, targets: Sequence[str]) -> None:
        """See `Lockstep`: as soon as they go on."""
        self._meanwhile.append(_Release(tuple(targets)))

    def adjust(self, name: str, gain: Tensor, shift: Tensor, *, channel: int) -> None:
        """See `Lockstep`: as soon as they go on."""
        self._meanwhile.append(_Adjust(name, gain, shift, channel))

    def _send_changes(self) -> None:
        """Send fused tensors that were fitted in the meantime."""
        changed: dict[str, Tensor] = {}
        for name, tensor in self.fused.items():
            if self._known.get(name) is not tensor:
                changed[name] = tensor
        if changed:
            self._known.update(changed)
            self._changes.append(self._workers.share(changed, lasting=True))

    def _need(self, memory: int) -> Callable[[Any], int]:
        """Bytes that a batch takes, beside `memory` for its look."""
        total = self._network_bytes + _COPIES * self._held + memory
        return lambda item: total

    def _item(self, request: Any, at: int) -> tuple[Any, ...]:
        waiting = self._waiting.get(at)
        if waiting is None:
            return (request, self._batches[at], None, 0, *self._changes)
        return (request, None, waiting.standing, waiting.known, *self._changes)
