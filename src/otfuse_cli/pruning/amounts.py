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
from ..graph.axes import axis_units, units_of
from ..graph.model import LayerGraph, OpKind, Role, Space

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
    by_name: dict[str, tuple[str, float]] = {}
    for name, share in (layer or {}).items():
        for id in _named(graph, name, names):
            if id in by_name and by_name[id][1] != share:
                raise UsageError(
                    "two amounts for the same units",
                    where=f"--layer {by_name[id][0]}={by_name[id][1]:g} and {name}={share:g}",
                    why=f"both are made or carried by space {id}",
                    fix="give one of them",
                )
            by_name[id] = name, share
            shares[id] = share
    return {id: shares[id] for id in prunable if id in shares}


def kept_count(size: int, amount: float) -> int:
    """Units that stay of `size`: at least one; what goes is rounded (halves to even)."""
    return max(1, size - round(amount * size))


def held_together(graph: LayerGraph) -> tuple[str, ...]:
    """Prunable spaces that `--amount` leaves whole, for the report."""
    together = _together(graph)
    return tuple(space.id for space in _prunable(graph) if space.id in together)


def names_of(graph: LayerGraph, space: str) -> tuple[str, ...]:
    """What a space answers to: its id, and modules and tensors that make or carry its units."""
    answers = {space: None}
    for name, dim in graph.members[space]:
        if graph.tensors[name].axes[dim].roles != {Role.CONSUME}:
            answers[name] = None
            answers[name.rpartition(".")[0] or name] = None
    return tuple(answers)


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
            why=f"there are {_listed([answers[-1] for answers in names.values()])}",
            fix="give a space, a module or a tensor; * stands for anything",
        )
    return matching


def _named(graph: LayerGraph, name: str, names: Mapping[str, Sequence[str]]) -> list[str]:
    named = [id for id, answers in names.items() if name in answers]
    if named:
        return named
    reason = _why_not(graph, name)
    raise UsageError(
        "no such layer" if reason is None else "these units can't be pruned",
        where=f"--layer {name}=...",
        why=reason or f"there are {_listed([answers[-1] for answers in names.values()])}",
        fix="name a space, a module or a tensor (otfuse inspect --graph lists them)",
    )


def _why_not(graph: LayerGraph, name: str) -> str | None:
    """Why a space, module or tensor that exists can't be pruned; None when there is none."""
    units: list[str] = [name] if name in graph.spaces else []
    exists = bool(units)
    for tensor, node in graph.tensors.items():
        if name in (tensor, tensor.rpartition(".")[0]):
            exists = True
            for axis in node.axes:
                if axis.roles != {Role.CONSUME}:
                    units += axis_units(axis.expr)
    if not exists:
        return None
    reasons = []
    for unit in dict.fromkeys(units):
        space = graph.spaces[unit]
        if space.pinned is not None:
            reasons.append(f"{unit} stays in place: {space.pinned}")
        elif space.per is not None:
            reasons.append(f"{unit} is inside {space.per}, which goes as a whole")
        else:
            reasons.append(f"{unit} has {space.size} units and no weight that makes them")
    return "; ".join(reasons) or "it makes no units"


def _listed(names: Sequence[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
