"""Execution order from names and data flow, for graphs that no trace ordered.

A state dict lists modules in the order in which they were defined, a safetensors file by name.
Either is a starting order; here it is corrected so that a layer runs after what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import groupby

from .cycles import strong_components


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts `features.10` behind `features.9`."""
    key: list[tuple[int, int, str]] = []
    for piece in re.split(r"(\d+)", name):
        if piece.isdigit():
            key.append((0, int(piece), ""))
        elif piece:
            key.append((1, 0, piece))
    return tuple(key)


def base_order(names: Sequence[str], dtypes: Mapping[str, str] | None = None) -> list[str]:
    """The order of the file, or the natural order where the file is merely sorted by name."""
    return sorted(names, key=natural_key) if is_by_name(names, dtypes or {}) else list(names)


def is_by_name(names: Sequence[str], dtypes: Mapping[str, str]) -> bool:
    """Whether a file lists its names in alphabetical order, dtype by dtype, as safetensors does."""
    runs = [(dtype, list(run)) for dtype, run in groupby(names, key=lambda n: dtypes.get(n, ""))]
    one_run_each = len({dtype for dtype, _ in runs}) == len(runs)
    return one_run_each and all(run == sorted(run) for _, run in runs)


def execution_order(
    nodes: Sequence[str], reads: Mapping[str, set[str]], writes: Mapping[str, set[str]]
) -> list[str]:
    """Order `nodes` so that each runs after everything it depends on.

    `reads` and `writes` give the spaces of each node. A residual stream makes a cycle (each block
    reads and writes it): inside one, the given order stands, but a node waits until each space
    that it reads has been written at least once. Takes time in proportion to the spaces read and
    written, however many nodes share one.
    """
    schedule = _Schedule(nodes, reads, writes)
    return [schedule.take() for _ in nodes]


class _Schedule:
    """What every node still waits for, as others are done.

    A node is free when all writers of what it reads are done, those of its own cycle apart; it is
    started when each space that it reads and anything writes has been written.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        reads: Mapping[str, set[str]],
        writes: Mapping[str, set[str]],
    ) -> None:
        self._nodes, self._reads, self._writes = nodes, reads, writes
        self._writers: dict[str, list[str]] = {}
        for node in nodes:
            for space in writes[node]:
                self._writers.setdefault(space, []).append(node)
        self._component = _components(nodes, reads, self._writers)
        # Readers of a space in the cycle that also writes it (there is one such cycle at most),
        # and the others.
        self._inner: dict[str, list[int]] = {}
        self._outer: dict[str, list[int]] = {}
        self._left_outer = {space: len(by) for space, by in self._writers.items()}
        self._left_inner: dict[str, int] = {}
        self._cycle: dict[str, int] = {}
        self._list_readers()
        self._waits = [0] * len(nodes)  # spaces that keep a node from being free
        self._unwritten = [0] * len(nodes)  # spaces that keep it from being started
        for space in self._writers:
            for at in (*self._inner.get(space, ()), *self._outer.get(space, ())):
                self._unwritten[at] += 1
            for at in self._outer.get(space, ()):
                self._waits[at] += 1
            if self._left_inner.get(space):
                for at in self._inner[space]:
                    self._waits[at] += 1
        self._done = [False] * len(nodes)
        self._free: list[int] = []
        self._started: list[int] = []
        for at in range(len(nodes)):
            self._offer(at)

    def _list_readers(self) -> None:
        components: dict[str, set[int]] = {}
        for space, writers in self._writers.items():
            components[space] = {self._component[writer] for writer in writers}
        for at, node in enumerate(self._nodes):
            cycle = self._component[node]
            for space in self._reads[node]:
                inner = cycle in components.get(space, ())
                (self._inner if inner else self._outer).setdefault(space, []).append(at)
                if inner:
                    self._cycle[space] = cycle
        for space, cycle in self._cycle.items():
            # Writers inside the cycle come after its first reader: only the others are waited for.
            outside = [w for w in self._writers[space] if self._component[w] != cycle]
            self._left_inner[space] = len(outside)

    def _offer(self, at: int) -> None:
        if self._waits[at] == 0:
            heappush(self._free, at)
            if self._unwritten[at] == 0:
                heappush(self._started, at)

    def take(self) -> str:
        """The next node: the first in the given order that is free and started.

        A cycle that nothing outside feeds has no natural first node: the first that is free.
        """
        while self._started and self._done[self._started[0]]:
            heappop(self._started)
        while self._free and self._done[self._free[0]]:
            heappop(self._free)
        at = (self._started or self._free)[0]
        self._done[at] = True
        node = self._nodes[at]
        for space in self._writes[node]:
            self._written(space, self._component[node])
        return node

    def _written(self, space: str, component: int) -> None:
        inner, outer = self._inner.get(space, []), self._outer.get(space, [])
        changed: list[int] = []
        if self._left_outer[space] == len(self._writers[space]):  # the first writer
            changed += [*inner, *outer]
            for at in changed:
                self._unwritten[at] -= 1
        self._left_outer[space] -= 1
        if self._left_outer[space] == 0:
            changed += outer
            for at in outer:
                self._waits[at] -= 1
        if inner and component != self._cycle[space]:
            self._left_inner[space] -= 1
            if self._left_inner[space] == 0:
                changed += inner
                for at in inner:
                    self._waits[at] -= 1
        for at in changed:
            if not self._done[at]:
                self._offer(at)


def _components(
    nodes: Sequence[str], reads: Mapping[str, set[str]], writers: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Number of the cycle that each node stands in; nodes of one cycle need one another.

    A node leads to the spaces that it reads, a space to the nodes that write it: so many steps as
    there are uses, where steps from node to node would be the square of that on a residual stream.
    """

    def successors(vertex: tuple[bool, str]) -> list[tuple[bool, str]]:
        is_space, name = vertex
        if is_space:
            return [(False, writer) for writer in writers.get(name, ())]
        return [(True, space) for space in sorted(reads[name])]

    numbers = strong_components([(False, node) for node in nodes], successors)
    return {name: number for (is_space, name), number in numbers.items() if not is_space}
