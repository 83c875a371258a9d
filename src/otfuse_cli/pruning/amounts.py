"""Which spaces are pruned and by how much: `--amount`, `--only`, `--layer`. No numbers but shares.

A unit goes with every axis that carries it. Heads and channel groups go whole: the space that
indexes them is pruned, the spaces inside them are not. Units that a layer norm normalises together
stay unless they are named: without some of them the others change too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain

from ..errors import IncompatibleModels, UsageError
from ..graph.analysis.named_units import amounts_by_name, listed, names_of
from ..graph.axes import units_of
from ..graph.model import LayerGraph, OpKind, Space

# Norms whose statistics are over all units: without some, those that stay come out otherwise.
_TOGETHER = frozenset({"layer", "rms"})


def require_share(amount: float, where: str, *, zero: bool = False) -> None:
    """Refuse what is no share of units to remove.

    Raises:
        UsageError: Not between 0 and 1; 0 itself only where `zero` allows it.
    """
    if not (0 <= amount < 1 and (zero or amount > 0)):
        raise UsageError(
            "the amount is a share of units to remove: more than 0, less than 1"
            if not zero
            else "the amount is a share of units to remove: 0 or more, less than 1",
            where=where,
            fix="0.5 removes every second unit",
        )


def choose_amounts(
    graph: LayerGraph,
    amount: float | None,
    only: Sequence[str] = (),
    layer: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Share of units to remove, by space, in processing order.

    Args:
        graph: Of the network.
        amount: For every prunable space; None: only those of `layer`.
        only: Patterns that restrict `amount` to spaces, modules or tensors.
        layer: Shares by space, module or tensor; they go before `amount`.

    Raises:
        UsageError: A name or pattern that fits nothing, or two shares for one space.
        IncompatibleModels: Nothing in the network can be pruned.
    """
    prunable = {space.id: space for space in _prunable(graph)}
    if not prunable:
        raise IncompatibleModels(
            "nothing in this network can be pruned",
            where=graph.source,
            why="no unit of it is free to go: the report of otfuse inspect --graph has the reasons",
        )
    names = {id: names_of(graph, id) for id in prunable}
    shares: dict[str, float] = {}
    if amount is not None:
        together = _together(graph)
        chosen = [id for id in prunable if id not in together]
        if only:
            chosen = list(dict.fromkeys(chain.from_iterable(_matching(p, names) for p in only)))
        shares = dict.fromkeys(chosen, amount)
    shares |= amounts_by_name(graph, layer or {}, names, action="pruned")
    return {id: shares[id] for id in prunable if id in shares}


def kept_count(size: int, amount: float) -> int:
    """Units that stay of `size`: at least one; what goes is rounded (halves to even)."""
    return max(1, size - round(amount * size))


def held_together(graph: LayerGraph) -> tuple[str, ...]:
    """Prunable spaces that `--amount` leaves whole, for the report."""
    together = _together(graph)
    return tuple(space.id for space in _prunable(graph) if space.id in together)


def _prunable(graph: LayerGraph) -> Iterator[Space]:
    """Free spaces with producers, one of which can go; not those inside heads or groups."""
    spaces = sorted(graph.free(), key=lambda s: s.order)
    return (s for s in spaces if s.per is None and s.size > 1 and graph.producers(s.id))


def _together(graph: LayerGraph) -> frozenset[str]:
    """Spaces that a norm takes its statistics over."""
    together: set[str] = set()
    for op in graph.ops:
        if op.kind is OpKind.NORM and op.detail in _TOGETHER:
            together.update(units_of(op.reads))
    return frozenset(together)


def _matching(pattern: str, names: Mapping[str, Sequence[str]]) -> list[str]:
    matching: list[str] = []
    for id, answers in names.items():
        if any(fnmatchcase(name, pattern) for name in answers):
            matching.append(id)
    if not matching:
        raise UsageError(
            "the pattern fits nothing that can be pruned",
            where=f"--only {pattern}",
            why=f"there are {listed([answers[-1] for answers in names.values()])}",
            fix="give a space, a module or a tensor; * stands for anything",
        )
    return matching
