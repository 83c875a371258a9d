"""Pieces of a fusion that don't depend on one another, for whoever works on them.

Each is a function of what it holds and of its item alone, and can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from ..checkpoint.names import TensorInfo
from ..fusion.fused import Fused
from ..matching.matchers.sweep import DifferentHeads, Match
from ..matching.memory import matching_memory
from ..matching.models import Model
from ..matching.portfolio import Judge
from ..requests.recipe import Recipe
from ..runtime import Runtime, cores
from .merge_plan import MatchSource

Names = Sequence[str]
# A source, and what scores its candidates.
Judged = tuple[Model, Judge | None]
Named = tuple[str, torch.dtype]

# Bytes of fused tensors that are made together: small ones would be more messages than work.
_BUNDLE = 8 << 20
# Copies in float32 of a tensor and of what it is made of, while it is averaged.
_COPIES = 4


def survey(models: Sequence[Model], names: Sequence[Names], runtime: Runtime) -> None:
    """Read every tensor that counts once: a NaN is named before any solve, files are hashed.

    Files are read side by side, each from front to back; by workers of their own where there are
    any, who see those that lie in files.

    Raises:
        UnreadableInput: NaN or infinity in a tensor, a file that can't be read.
    """
    pairs = list(zip(models, names, strict=True))
    total = sum(map(len, names))
    done = count(1)
    runtime.progress("read", 0, total)

    def told() -> None:
        runtime.progress("read", next(done), total)

    if runtime.workers.away:
        sent = [(m, n) for m, n in pairs if m.checkpoint.path is not None]
        for (model, wanted), seen in zip(sent, runtime.workers.each(_survey, sent), strict=True):
            model.checkpoint.take_survey(*seen)
            for _ in wanted:
                told()
        pairs = [(m, n) for m, n in pairs if m.checkpoint.path is None]
    if not pairs:
        return
    with ThreadPoolExecutor(min(len(pairs), cores())) as pool:
        for result in [pool.submit(_read, m, n, told) for m, n in pairs]:
            result.result()


def _survey(item: tuple[Model, Names]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Read one file: what is finite, and its digests."""
    model, wanted = item
    _read(model, wanted, lambda: None)
    return model.checkpoint.survey()


def _read(model: Model, wanted: Names, told: Callable[[], None]) -> None:
    """Read tensors of one file from front to back, and tell of each."""
    model.checkpoint.hash_while_reading()
    for name in wanted:
        model.require_finite(name)
        told()


@dataclass(frozen=True)
class Matching:
    """Matches sources to an anchor; heads that differ are told, not raised.

    Attributes:
        how: What aligns one source.
        anchor: To what.
        recipe: By which options.
        runtime: Where.
    """

    how: MatchSource
    anchor: Model
    recipe: Recipe
    runtime: Runtime
    _known: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, item: Judged) -> Match | DifferentHeads:
        """The match of one source."""
        source, judge = item
        try:
            return self.how(source, self.anchor, self.recipe, self.runtime, judge=judge)
        except DifferentHeads as error:
            return error

    def memory(self, item: Judged) -> int:
        """Bytes that it takes beside the program."""
        source, judge = item
        if self.recipe.align == "none":
            return 0
        held = 0 if judge is None else 2 * _stored_bytes(self.anchor)
        sizes = tuple(source.graph.sizes.values())
        if sizes not in self._known:  # many have the same widths
            self._known[sizes] = matching_memory(source, self.anchor, self.recipe).total
        return self._known[sizes] + held

    def each(
        self, items: Iterator[Judged], runtime: Runtime, total: int
    ) -> Iterator[Match | DifferentHeads]:
        """Every source's match, in order."""
        workers = runtime.workers
        work = replace(self, runtime=runtime.inner())
        for done, made in enumerate(workers.each(work, items, memory=self.memory), 1):
            if workers.away:
                runtime.progress("match", done, total)
            yield made


def _stored_bytes(model: Model) -> int:
    return sum(4 * info.numel for info in model.checkpoint.infos.values())


@dataclass(frozen=True)
class Averaging:
    """Makes tensors of a fused model.

    Attributes:
        fused: What they are made of.
    """

    fused: Fused

    def __call__(self, item: Sequence[Named]) -> list[torch.Tensor]:
        """Some tensors, as they are stored."""
        return [self.fused.tensor(name, dtype=dtype) for name, dtype in item]

    def memory(self, item: Sequence[Named]) -> int:
        """Bytes that they take beside the program."""
        infos = self.fused.whole.checkpoint.infos
        sizes = [4 * infos[name].numel for name, _ in item]
        return sum(sizes) + _COPIES * max(sizes)


def averaged_elsewhere(
    fused: Fused, infos: Sequence[TensorInfo], runtime: Runtime
) -> Iterator[torch.Tensor]:
    """Tensors of a fused model made by workers, in order; what is in memory stays here.

    Args:
        fused: What they are made of.
        infos: How they are stored, in order.
        runtime: Whose workers.
    """
    alone = replace(fused, better={})
    runs: list[tuple[bool, list[Named]]] = []
    size = 0
    for info in infos:
        here = not fused.can_be_sent(info.name)
        if not runs or runs[-1][0] != here or size + info.nbytes > _BUNDLE:
            runs.append((here, []))
            size = 0
        runs[-1][1].append((info.name, info.dtype))
        size += info.nbytes
    work = Averaging(alone)
    sent = (names for here, names in runs if not here)
    made = runtime.workers.each(work, sent, memory=work.memory)
    for here, names in runs:
        yield from Averaging(fused)(names) if here else next(made)
