"""Parents and the fused network, run together: each waits at the same layer.

As long as it fits, every batch of every network stands where it is between two layers, so that the
whole refit costs one pass. Otherwise each layer is reached anew, batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ..graph.model import LayerGraph
from ..graph.trace.program import Axes, Program
from ..matching.alignment import Alignment
from ..matching.counterpart import Counterpart
from ..matching.stream_counterpart import StreamCounterpart
from ..running.execute import Walk, flat_inputs
from ..running.samples import Samples

Tensors = Mapping[str, Tensor]
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Parent:
    """A parent that is run.

    Attributes:
        program: At its widths.
        tensors: By name, in the dtype to compute in.
        weight: Its share; they sum to 1.
        graph: Its layer graph.
        alignment: Its maps; None for the anchor.
        counterpart: What of it stands for what of the anchor, where its depth is another.
    """

    program: Program
    tensors: Tensors
    weight: float
    graph: LayerGraph
    alignment: Alignment | None = None
    counterpart: Counterpart | StreamCounterpart | None = None

    def own_values(self, names: Iterable[str]) -> Iterable[str]:
        """Its values that stand for some of the anchor's."""
        return names if self.counterpart is None else self.counterpart.own_values(names)

    def parts(self, name: str, walk: Walk) -> list[tuple[Tensor, Axes]]:
        """What stands for a value of the anchor in one of its passes, each part with its axes."""
        if self.counterpart is not None:
            return self.counterpart.parts(name, walk)
        return [(walk[name], self.program.axes[name])]

    def done_with(self, names: Iterable[str]) -> Iterable[str]:
        """Its values that nobody asks for after these values of the anchor."""
        if self.counterpart is None:
            return names
        return [own for name in names for own in self.counterpart.released.get(name, ())]


@dataclass(frozen=True)
class Stop:
    """One batch, waiting: the parents behind their target, the fused network before its layer."""

    parents: tuple[Walk, ...]
    fused: Walk
    count: int

    def cut(self, value: Tensor) -> Tensor:
        """Without the samples that only fill up the last batch."""
        return self.fused.cut(value, self.count)

    def advance(self, parents: Sequence[Parent], targets: Sequence[str], layer: str) -> None:
        """Run the parents up to `targets`, the fused network to where it stands before `layer`."""
        for parent, walk in zip(parents, self.parents, strict=True):
            for name in parent.own_values(targets):
                walk.to(name)
        self.fused.before(layer)

    def bytes(self) -> int:
        """Memory of the values that wait."""
        return sum(walk.live_bytes() for walk in (*self.parents, self.fused))

    def release(self, parents: Sequence[Parent], targets: Iterable[str]) -> None:
        """Let go of values of the parents that nobody asks for after these of the anchor."""
        for parent, walk in zip(parents, self.parents, strict=True):
            for name in parent.done_with(targets):
                walk.release(name)

    def adjust(self, name: str, gain: Tensor, shift: Tensor, *, channel: int) -> None:
        """Scale and shift a value of the fused network, by channel."""
        value = self.fused[name]
        shape = [1] * value.dim()
        shape[channel] = -1
        factor, term = (t.to(value).view(shape) for t in (gain, shift))
        self.fused.replace(name, value * factor + term)


# What is seen of a batch, where all networks wait; a function of it and of the parents alone.
Look = Callable[[Stop, Sequence[Parent]], Seen]


class Lockstep:
    """All batches of all networks.

    Attributes:
        away: Whether looks are taken in other processes.
    """

    away = False

    def __init__(
        self,
        parents: Sequence[Parent],
        program: Program,
        fused: Tensors,
        samples: Samples,
        *,
        device: str,
        keep: frozenset[str] = frozenset(),
        most_bytes: int,
    ) -> None:
        """Stand at the inputs.

        Args:
            parents: The anchor among them.
            program: The fused network's.
            fused: Its tensors; may change between two layers.
            samples: What all are run on.
            device: Where.
            keep: Values of parents that are asked for later than they are computed.
            most_bytes: Memory for values of stopped passes.
        """
        self.parents, self.program, self.fused = tuple(parents), program, fused
        self.samples, self.device, self.keep = samples, device, keep
        self.most_bytes = most_bytes
        self._batches = list(samples.batches(program.batch))
        self._standing: dict[int, Stop] = {}
        self._hold = True

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self._batches)

    def stops(
        self,
        targets: Sequence[str],
        layer: str,
        *,
        again: bool = False,
        most: int | None = None,
    ) -> Iterator[Stop]:
        """Every batch: the parents run up to `targets`, the fused network before `layer`.

        Args:
            targets: Values of the parents.
            layer: Of the fused network.
            again: The same targets are asked for once more.
            most: End with the batch that makes it so many samples.
        """
        seen = 0
        for at in range(self.batches):
            if most is not None and seen >= most:
                return
            seen += self._batches[at].count
            stop = self._standing.pop(at, None) or self._start(at, frozenset(targets))
            stop.advance(self.parents, targets, layer)
            # Every batch holds about as much; what is too much for all is given up at once.
            if self._hold and self.batches * stop.bytes() > self.most_bytes:
                self._hold = False
                self._standing.clear()
            yield stop
            if self._hold:
                if not again:
                    stop.release(self.parents, targets)
                self._standing[at] = stop

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
        """What a look at every batch gives, in order; otherwise as `stops`.

        `memory`: bytes that a look takes beside what waits.
        """
        for stop in self.stops(targets, layer, again=again, most=most):
            yield look(stop, self.parents)

    def release(self, targets: Sequence[str]) -> None:
        """Let go of values that were to be asked for `again`, and are not."""
        for stop in self._standing.values():
            for walk in stop.parents:
                for name in targets:
                    walk.release(name)

    def adjust(self, name: str, gain: Tensor, shift: Tensor, *, channel: int) -> None:
        """Scale and shift a value that waiting passes of the fused network hold, by channel."""
        for stop in self._standing.values():
            stop.adjust(name, gain, shift, channel=channel)

    def _start(self, at: int, targets: frozenset[str]) -> Stop:
        keep = self.keep if self._hold else targets
        return begin(
            self.parents, self.program, self.fused, self._batches[at], keep, device=self.device
        )


def begin(
    parents: Sequence[Parent],
    program: Program,
    fused: Tensors,
    batch: Samples,
    keep: frozenset[str],
    *,
    device: str,
) -> Stop:
    """A batch before its first operation, in all networks."""
    inputs = flat_inputs(program, batch, device)
    return Stop(
        tuple(Walk(p.program, p.tensors, inputs, p.own_values(keep)) for p in parents),
        Walk(program, fused, inputs),
        batch.count,
    )
