"""Joint fusion: the union of the parents, reduced to the anchor's widths (`--blend joint`).

The parents side by side are one network of summed widths whose logits are the weighted mean. Of
each space as many units are kept as the anchor has, those that explain most of what is read from
all; what the others did is rebuilt from them; then every layer is fitted on the network's own
inputs to what the chosen units of the parents compute there. Nothing is averaged but the outputs,
and nothing needs to be aligned (docs/methods/joint.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import IncompatibleModels, few
from ..graph.analysis.fit_targets import fits, norm_fits
from ..graph.axes import Unit, axis_units, units_of
from ..graph.model import LayerGraph, Role
from ..graph.trace.program import Program
from ..matching.activations import Activations, Observed
from ..matching.alignment import Alignment
from ..matching.apply import transport, transport_value
from ..matching.counterpart import Counterpart
from ..matching.models import Model
from ..matching.stream_counterpart import StreamCounterpart
from ..running.execute import Walk
from ..transport.basis import Basis
from ..transport.choice import Choice
from .choose_by_readers import choose_written, written
from .lockstep import Parent
from .merged_units import Merged, given_to_relus, merge_units
from .pivoted_cholesky import combinations, split_choice


def choices(
    anchor: LayerGraph,
    observed: Sequence[Observed],
    parents: Sequence[Parent],
    *,
    without: Collection[str] = (),
    other_share: float | None = None,
) -> tuple[list[Alignment], list[dict[str, Basis]]]:
    """Choose the units of every free space.

    Args:
        anchor: Its graph, whose widths the result has.
        observed: What the units of each parent do after their activation, on the same inputs.
        parents: As they are run; their weights, which are positive, are their importance.
        without: Spaces that are left out.
        other_share: Share of each space for units of parents after the first; None: whichever are
            best.

    Returns:
        For each parent an alignment (of `Choice`s), and what chosen units become where they are
        merged with others: maps for what fits aim at, by space.

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
    maps_of: list[dict[str, Choice]] = [{} for _ in observed]
    merged_of: list[dict[str, Basis]] = [{} for _ in observed]
    for space in wanted:
        taps = [seen[space.id] for seen in observed]
        counts = [len(tap[0].features_NF) for tap in taps]
        # The units of all parents below one another, and the mean of products over the inputs:
        # every place where a space is seen counts alike, however many positions it has.
        gram_UU = torch.zeros(())
        for at in range(len(taps[0])):
            stacked_UF = torch.cat([tap[at].features_NF for tap in taps]).double()
            gram_UU = gram_UU + stacked_UF @ stacked_UF.T / stacked_UF.shape[1]
        chosen_M = choose_written(parents, space.id, gram_UU, space.size, other_share=other_share)
        read_UM = combinations(gram_UU, chosen_M)
        merged = None
        if other_share is None and _aimed_at_once(parents[0].program, space.id):
            merged = _merged(parents, space.id, taps, gram_UU, chosen_M)
        if merged is not None:
            read_UM = merged.read_UM
            for bases, basis in zip(merged_of, merged.bases(counts), strict=True):
                bases[space.id] = basis
        for maps, choice in zip(
            maps_of, split_choice(chosen_M.cpu(), counts, read_UM), strict=True
        ):
            maps[space.id] = choice
    return [Alignment(maps) for maps in maps_of], merged_of


def _aimed_at_once(program: Program, space: str) -> bool:
    """Whether one fit alone aims at the units of a space."""
    targets = [fit.target for fit in fits(program)[0]] + [n.target for n in norm_fits(program)]
    times = 0
    for target in targets:
        times += space in units_of(axis for axis in program.axes[target] if axis is not None)
    return times == 1


def _merged(
    parents: Sequence[Parent],
    space: str,
    taps: Sequence[Sequence[Activations]],
    gram_UU: Tensor,
    chosen_M: Tensor,
) -> Merged | None:
    """What the chosen units of a space become; None where they stay what they are."""
    given_nU, write_dU = given_to_relus(taps), written(parents, space, gram_UU)
    if given_nU is None or write_dU is None:
        return None
    return merge_units(given_nU, write_dU, chosen_M)


def with_absent(observed: Sequence[Observed]) -> list[Observed]:
    """The same with no units in spaces that a parent of another depth lacks."""
    filled = list[Observed]()
    for own in observed:
        absent: dict[str, tuple[Activations, ...]] = {}
        for other in observed:
            for space in other.keys() - own.keys() - absent.keys():
                absent[space] = tuple(tap.without_units() for tap in other[space])
        filled.append({**own, **absent} if absent else own)
    return filled


def fresh_outputs(anchor: LayerGraph, parents: Sequence[Parent]) -> dict[str, Tensor]:
    """By weight, which outputs of a layer nothing is known of before it is fitted.

    Those of units whose parent has another depth, and no layer that makes them from what this one
    reads; of an output layer all, where one parent has no such layer.
    """
    fresh: dict[str, Tensor] = {}
    for parent in parents:
        other = parent.counterpart
        if not isinstance(other, Counterpart) or parent.alignment is None:
            continue
        for name in sorted(other.fresh):
            outputs = _own_outputs(anchor, name, parent.alignment)
            fresh[name] = outputs | fresh[name] if name in fresh else outputs
    return fresh


def _own_outputs(anchor: LayerGraph, name: str, alignment: Alignment) -> Tensor:
    for axis in anchor.tensors[name].axes:
        if Role.PRODUCE in axis.roles and isinstance(axis.expr, Unit):
            chosen = alignment.maps.get(axis.expr.space)
            if isinstance(chosen, Choice):
                return chosen.own_M
    return torch.ones(1, dtype=torch.bool)  # of an output layer: all


def union(
    name: str,
    anchor: Model,
    parents: Sequence[tuple[Model, Alignment, float]],
    *,
    others: Mapping[int, Counterpart | StreamCounterpart] | None = None,
) -> Tensor:
    """One tensor of the reduced union before any fit, float32.

    What makes chosen units is theirs; what reads them is every parent's own, through what rebuilds
    its units; outputs are the weighted mean.

    Args:
        name: Of the tensor.
        anchor: Has integers and flags.
        parents: Model, its choices, its weight.
        others: Models of other depths, by index. One has a part only where a tensor of its own
            makes the same units from the same.
    """
    anchor_tensor = anchor.read(name)
    if not anchor_tensor.is_floating_point():
        return anchor_tensor
    moves = makes_chosen(anchor.graph, name)
    total: Tensor | None = None
    for model, alignment, weight in parents:
        other = None if others is None else others.get(model.index)
        for own_name in (name,) if other is None else other.own_tensors(name):
            moved = transport(model.read(own_name), own_name, model.graph, alignment)
            # Rows of chosen units belong to one parent each, and are zero in the others' parts.
            term = moved if moves else weight * moved
            total = term if total is None else total + term
    if total is None:
        total = torch.zeros_like(anchor_tensor)
    if others and _holds_variances(anchor, name):
        total = torch.where(total == 0, 1.0, total)  # of units that no parent makes there
    return total.to(torch.float32)


def _holds_variances(model: Model, name: str) -> bool:
    return any(Role.VARIANCE in axis.roles for axis in model.graph.tensors[name].axes)


def joined_value(name: str, parents: Sequence[Parent], walks: Sequence[Walk]) -> Tensor:
    """What the chosen units of the parents have there; where none are, the weighted mean."""
    total: Tensor | None = None
    for parent, walk in zip(parents, walks, strict=True):
        assert parent.alignment is not None
        # One of another depth has none where its units are none of those that were chosen.
        for value, axes in parent.parts(name, walk):
            units = units_of(axis for axis in axes if axis is not None)
            moves = not parent.alignment.maps.keys().isdisjoint(units)
            moved = transport_value(value, axes, parent.graph, parent.alignment)
            term = moved if moves else parent.weight * moved
            total = term if total is None else total + term
    assert total is not None
    return total


def makes_chosen(graph: LayerGraph, name: str) -> bool:
    """Whether a tensor has rows of chosen units: then the parents' parts add up to one."""
    for axis in graph.tensors[name].axes:
        if axis.roles & {Role.CONSUME, Role.PRODUCE} == {Role.CONSUME}:
            continue  # it only reads them
        if any(graph.spaces[unit].pinned is None for unit in axis_units(axis.expr)):
            return True
    return False
