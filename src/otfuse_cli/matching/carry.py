"""A model carried to other widths and back: every unit in one place of the other model.

What a client of a federation needs: the global model at its own width and in its own order, and
its update on the global model's units. Legend: N units of the source, M of the anchor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import IncompatibleModels
from ..graph.model import LayerGraph
from ..transport.maps import Map, Permutation
from ..transport.single_places import places_map, reversed_map, single_places
from .alignment import Alignment, stay
from .apply import transport
from .models import Model
from .similarity import Similarity
from .unfold import unfold


def single_alignment(source: Model, anchor: Model, alignment: Alignment) -> Alignment:
    """The alignment with every unit of the source in one place, where its maps split some.

    Places maximise what matching maximises, all other spaces as the alignment has them.

    Raises:
        IncompatibleModels: Different numbers of heads: what is inside them has no single place.
        SolveFailed: Weights too large to compare.
    """
    require_same_heads(source.graph, anchor.graph, source.checkpoint.label)
    work = Similarity(source, anchor)

    def single(space: str, map: Map, benefit_NM: torch.Tensor | None) -> Map:
        if map.hard:
            return map
        if benefit_NM is None:  # no tensor says anything about them
            benefit_NM = torch.zeros(map.sizes)
        return places_map(single_places(benefit_NM), map.sizes[1])

    def benefit(space: str) -> torch.Tensor | None:
        return work.benefit(space, alignment) if work.places.get(space) else None

    maps = {
        space: map if map.hard else single(space, map, benefit(space))
        for space, map in alignment.maps.items()
    }
    families: dict[str, tuple[Map, ...]] = {}
    for space, inner in alignment.families.items():
        if all(map.hard for map in inner):
            families[space] = inner
            continue
        stack = benefit(space)
        parts = [None] * len(inner) if stack is None else list(stack)
        families[space] = tuple(single(space, m, p) for m, p in zip(inner, parts, strict=True))
    return Alignment(maps, families)


def reversed_alignment(alignment: Alignment, graph: LayerGraph) -> Alignment:
    """The way back, from the anchor's units to the source's; each has one place.

    What is inside a head goes back with the head that it came from.

    Args:
        alignment: Maps of the source onto the anchor.
        graph: Of either: which spaces are inside of others.
    """
    maps = {space: reversed_map(map) for space, map in alignment.maps.items()}
    families: dict[str, tuple[Map, ...]] = {}
    for space, inner in alignment.families.items():
        heads = maps.get(graph.spaces[space].per or "")
        order = list(range(len(inner)))
        if isinstance(heads, Permutation):  # place of each of the source's heads
            order = heads.index_M.tolist()
        families[space] = tuple(reversed_map(inner[head]) for head in order)
    return Alignment(maps, families)


def chosen_places(anchor: Model, graph: LayerGraph, label: str) -> Alignment:
    """Places for a source that shows its widths only: its units are the anchor's.

    Where it has fewer of them it gets those with the largest weights, in their order; where it has
    more, these twice or more often.

    Raises:
        IncompatibleModels: Different numbers of heads.
    """
    require_same_heads(graph, anchor.graph, label)
    maps: dict[str, Map] = {}
    families: dict[str, tuple[Map, ...]] = {}
    for space in anchor.graph.free():
        many, few = graph.spaces[space.id].size, space.size
        if space.per is not None:
            if many != few:
                raise _different_heads(label, space.id, many, few)
            families[space.id] = (stay(few),) * anchor.graph.spaces[space.per].size
        elif many == few:
            maps[space.id] = stay(few)
        else:
            order_M = _importance(anchor, space.id).argsort(descending=True, stable=True)
            if many < few:
                place_N = order_M[:many].sort().values
            else:
                again = order_M.repeat(many // few)[: many - few]
                place_N = torch.cat([torch.arange(few), again])
            maps[space.id] = places_map(place_N, few)
    return Alignment(maps, families)


def _importance(model: Model, space: str) -> torch.Tensor:
    """Squares of all weights that make or read a unit; float64, by unit."""
    graph = model.graph
    total = torch.zeros(graph.spaces[space].size, dtype=torch.float64)
    for name, dim in graph.members[space]:
        tensor = model.read(name)
        if not tensor.is_floating_point():
            continue
        exprs = graph.tensors[name].exprs
        for rows in unfold(tensor, exprs, dim, space, graph.sizes):
            total += rows.double().square().sum(-1).cpu()
    return total


def carried(
    tensors: Mapping[str, torch.Tensor],
    graph: LayerGraph,
    alignment: Alignment,
    onto: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of `graph` moved by `alignment`, in their dtypes.

    Args:
        tensors: By name.
        graph: Of the model that is moved.
        alignment: Its maps.
        onto: Values that places keep where no unit comes.

    Raises:
        IncompatibleModels: Whole numbers for every unit, and another number of units.
    """
    moved: dict[str, torch.Tensor] = {}
    for name in graph.tensors:
        tensor = tensors[name]
        like = None if onto is None else onto[name].to(tensor)
        try:
            new = transport(tensor, name, graph, alignment, anchor=like)
        except ValueError as error:
            raise IncompatibleModels(
                "a tensor can't be carried to other widths",
                where=f"{name}, {tensor.dtype}",
                why=str(error),
                fix="give all clients the same widths",
            ) from error
        moved[name] = new.to(tensor.dtype)
    return moved


def require_same_heads(graph: LayerGraph, anchor: LayerGraph, label: str) -> None:
    """Refuse other numbers of heads.

    Raises:
        IncompatibleModels: There are.
    """
    for space in anchor.free():
        if space.per is None:
            continue
        mine, theirs = graph.spaces[space.per].size, anchor.spaces[space.per].size
        if mine != theirs:
            raise _different_heads(label, space.per, mine, theirs)


def _different_heads(label: str, space: str, mine: int, theirs: int) -> IncompatibleModels:
    return IncompatibleModels(
        "heads of other number or size have no single place",
        where=f"space {space}: {mine} in {label}, {theirs} in the global model",
        why="a head's inside can be carried to one head of the same size only",
        fix="give all clients the same heads; other widths may differ",
    )
