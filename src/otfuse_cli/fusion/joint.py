"""Joint fusion: the union of the parents, reduced to the anchor's widths (`--blend joint`).

The parents side by side are one network of summed widths whose logits are the weighted mean. Of
each space as many units are kept as the anchor has, those that explain most of what is read from
all; what the others did is rebuilt from them; then every layer is fitted on the network's own
inputs to what the chosen units of the parents compute there. Nothing is averaged but the outputs,
and nothing needs to be aligned (docs/methods/joint.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..errors import IncompatibleModels, few
from ..graph.axes import axis_units
from ..graph.model import LayerGraph, Role
from ..matching.activations import Observed
from ..matching.alignment import Alignment
from ..matching.apply import transport, transport_value
from ..matching.models import Model
from ..running.execute import Walk
from ..transport.choice import Choice
from .choose_by_readers import choose_written
from .lockstep import Parent
from .pivoted_cholesky import combinations, split_choice


def choices(
    anchor: LayerGraph,
    observed: Sequence[Observed],
    parents: Sequence[Parent],
    *,
    without: Collection[str] = (),
    given: float | None = None,
) -> list[Alignment]:
    """Choose the units of every free space; one alignment (of `Choice`s) for each parent.

    Args:
        anchor: Its graph, whose widths the result has.
        observed: What the units of each parent do after their activation, on the same inputs.
        parents: As they are run; their weights, which are positive, are their importance.
        without: Spaces that are left out.
        given: Share of each space for units of parents after the first; None: whichever are best.

    Raises:
        IncompatibleModels: Units of a space can't be seen one by one (heads, groups).
    """
    wanted = [s for s in anchor.free() if s.id not in without]
    unseen = [s.id for s in wanted if any(s.id not in seen for seen in observed)]
    if unseen:
        raise IncompatibleModels(
            "joint fusion can't choose among some units",
            where=f"space {few(unseen)}",
            why="heads and groups move as a whole, and nothing shows them one by one",
            fix="use --blend average",
        )
    found: list[dict[str, Choice]] = [{} for _ in observed]
    for space in wanted:
        taps = [seen[space.id] for seen in observed]
        counts = [len(tap[0].features_NF) for tap in taps]
        stacked = [
            torch.cat([tap[at].features_NF for tap in taps]).double() for at in range(len(taps[0]))
        ]
        gram_UU = sum((part @ part.T / part.shape[1] for part in stacked), start=torch.zeros(()))
        chosen_M = choose_written(parents, space.id, gram_UU, space.size, given=given)
        read_UM = combinations(gram_UU, chosen_M)
        for own, choice in zip(found, split_choice(chosen_M.cpu(), counts, read_UM), strict=True):
            own[space.id] = choice
    return [Alignment(maps) for maps in found]


def union(
    name: str,
    anchor: Model,
    parents: Sequence[tuple[Model, Alignment, float]],
) -> Tensor:
    """One tensor of the reduced union before any fit, float32.

    What makes chosen units is theirs; what reads them is every parent's own, through what rebuilds
    its units; outputs are the weighted mean.

    Args:
        name: Of the tensor.
        anchor: Has integers and flags.
        parents: Model, its choices, its weight.
    """
    own = anchor.read(name)
    if not own.is_floating_point():
        return own
    moves = makes_chosen(anchor.graph, name)
    total: Tensor | None = None
    for model, alignment, weight in parents:
        moved = transport(model.read(name), name, model.graph, alignment)
        term = moved if moves else weight * moved
        total = term if total is None else total + term
    assert total is not None
    return total.to(torch.float32)


def joined_value(name: str, parents: Sequence[Parent], walks: Sequence[Walk]) -> Tensor:
    """What the chosen units of the parents have there; where none are, the weighted mean."""
    total: Tensor | None = None
    for parent, walk in zip(parents, walks, strict=True):
        axes, value = parent.program.axes[name], walk[name]
        assert parent.alignment is not None
        moves = any(
            unit in parent.alignment.maps for a in axes if a is not None for unit in axis_units(a)
        )
        moved = transport_value(value, axes, parent.graph, parent.alignment)
        term = moved if moves else parent.weight * moved
        total = term if total is None else total + term
    assert total is not None
    return total


def makes_chosen(graph: LayerGraph, name: str) -> bool:
    """Whether a tensor has rows of chosen units: then the parents' parts add up to one."""
    return any(
        graph.spaces[unit].pinned is None
        for axis in graph.tensors[name].axes
        if Role.CONSUME not in axis.roles or Role.PRODUCE in axis.roles
        for unit in axis_units(axis.expr)
    )
