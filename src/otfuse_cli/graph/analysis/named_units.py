"""Units by name: what a space answers to, and amounts that are given by such names (`--layer`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import UsageError
from ..axes import axis_units
from ..model import LayerGraph, Role


def names_of(graph: LayerGraph, space: str) -> tuple[str, ...]:
    """What a space answers to: its id, and modules and tensors that make or carry its units."""
    answers = {space: None}
    for name, dim in graph.members[space]:
        if graph.tensors[name].axes[dim].roles != {Role.CONSUME}:
            answers[name] = None
            answers[name.rpartition(".")[0] or name] = None
    return tuple(answers)


def amounts_by_name(
    graph: LayerGraph,
    amounts: Mapping[str, float],
    names: Mapping[str, Sequence[str]],
    *,
    action: str,
) -> dict[str, float]:
    """Amounts by space, of those that are given by space, module or tensor.

    Args:
        graph: Of the network.
        amounts: What `--layer` says.
        names: What each space answers to that may have one.
        action: What can't be done with others, for messages: `pruned`.

    Raises:
        UsageError: A name that fits nothing, or two amounts for one space.
    """
    by_space: dict[str, tuple[str, float]] = {}
    for name, amount in amounts.items():
        for id in _named(graph, name, names, action):
            before, given = by_space.setdefault(id, (name, amount))
            if given != amount:
                raise UsageError(
                    "two amounts for the same units",
                    where=f"--layer {before}={given:g} and {name}={amount:g}",
                    why=f"both are made or carried by space {id}",
                    fix="give one of them",
                )
    return {id: amount for id, (_, amount) in by_space.items()}


def _named(
    graph: LayerGraph, name: str, names: Mapping[str, Sequence[str]], action: str
) -> list[str]:
    named = [id for id, answers in names.items() if name in answers]
    if named:
        return named
    reason = _why_not(graph, name)
    raise UsageError(
        "no such layer" if reason is None else f"these units can't be {action}",
        where=f"--layer {name}=...",
        why=reason or f"there are {listed([answers[-1] for answers in names.values()])}",
        fix="name a space, a module or a tensor (otfuse inspect --graph lists them)",
    )


def _why_not(graph: LayerGraph, name: str) -> str | None:
    """Why a space, module or tensor that exists can't be touched; None when there is none."""
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


def listed(names: Sequence[str], limit: int = 6) -> str:
    """The first few of many names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
