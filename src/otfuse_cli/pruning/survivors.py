"""Which units of a dense network a pruned one still has, told by the weights themselves.

A unit of the pruned network is a survivor when its incoming weights equal those of a dense unit,
on the inputs that survive. The two lists of a space run in parallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..graph.axes import axis_units
from ..graph.model import LayerGraph, Space
from ..matching.features import producers
from ..matching.matchers.sweep import processing_order
from ..matching.models import Model
from ..matching.unfold import unfold
from ..running.relabel import relabel


@dataclass(frozen=True)
class Survivors:
    """Survivors of one space.

    Attributes:
        dense_S: Their places in the dense network, int64.
        pruned_S: Their places in the pruned one, ascending, int64.
        sizes: Units of the space in the dense and in the pruned network.
    """

    dense_S: torch.Tensor
    pruned_S: torch.Tensor
    sizes: tuple[int, int]

    @property
    def complete(self) -> bool:
        """Whether every unit of the pruned network is one of the dense one's."""
        return len(self.pruned_S) == self.sizes[1]


def find_survivors(dense: Model, pruned: Model) -> dict[str, Survivors]:
    """Survivors of every free space, by exact comparison in the pruned network's dtype.

    Spaces are visited in execution order; a tensor takes part once survivors of all its other
    spaces are known, on those alone. Units inside heads and groups are taken to be in their order.
    """
    survivors: dict[str, Survivors] = {}
    for space in processing_order(pruned.graph):
        if space.per is not None:
            continue
        rows = _rows(dense, pruned, space, survivors)
        sizes = (dense.graph.spaces[space.id].size, space.size)
        survivors[space.id] = _equal_rows(*rows, sizes) if rows else _nobody(sizes)
    return survivors


def _rows(
    dense: Model, pruned: Model, space: Space, survivors: Mapping[str, Survivors]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Incoming weights on surviving inputs, dense N x K and pruned M x K; None: nothing known."""
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for producer in producers(pruned.graph, space.id):
        node = pruned.graph.tensors[producer.weight]
        others: list[str] = []
        for dim, axis in enumerate(node.axes):
            for unit in axis_units(axis.expr):
                if dim != producer.dim or unit != space.id:
                    others.append(unit)
        if not all(_settled(unit, dense.graph, pruned.graph, survivors) for unit in others):
            continue
        settled = {unit: survivors[unit] for unit in others if unit in survivors}
        # The dense weights as pruning has stored them: in half precision rows differ otherwise.
        dtype = pruned.checkpoint.infos[producer.weight].dtype
        for model, side, places in (
            (dense, sides[0], {u: s.dense_S for u, s in settled.items()}),
            (pruned, sides[1], {u: s.pruned_S for u, s in settled.items()}),
        ):
            graph = model.graph
            tensor = model.stored(producer.weight).to(dtype).to(torch.float64)
            tensor = relabel(tensor, graph.tensors[producer.weight], places, graph.spaces)
            sizes = {**graph.sizes, **{unit: len(index) for unit, index in places.items()}}
            exprs = node.exprs
            side += unfold(tensor, exprs, producer.dim, space.id, sizes)
    if not sides[0] or not sum(rows.shape[1] for rows in sides[0]):
        return None
    return torch.cat(sides[0], 1), torch.cat(sides[1], 1)


def _settled(
    unit: str, dense: LayerGraph, pruned: LayerGraph, survivors: Mapping[str, Survivors]
) -> bool:
    space = pruned.spaces[unit]
    if space.pinned is not None or space.per is not None:
        return dense.spaces[unit].size == space.size
    return unit in survivors and len(survivors[unit].pruned_S) > 0


def _equal_rows(
    dense_NK: torch.Tensor, pruned_MK: torch.Tensor, sizes: tuple[int, int]
) -> Survivors:
    """Each pruned row with the first equal dense row that no other has taken."""
    waiting: dict[bytes, list[int]] = {}
    for unit, key in enumerate(_keys(dense_NK)):
        waiting.setdefault(key, []).append(unit)
    pairs = []
    for unit, key in enumerate(_keys(pruned_MK)):
        if waiting.get(key):
            pairs.append((waiting[key].pop(0), unit))
    if not pairs:
        return _nobody(sizes)
    dense_S, pruned_S = torch.tensor(pairs, dtype=torch.int64).T
    return Survivors(dense_S.clone(), pruned_S.clone(), sizes)


def _keys(rows: torch.Tensor) -> list[bytes]:
    """Rows as bytes; minus zero is zero."""
    return [row.tobytes() for row in (rows + 0.0).contiguous().numpy()]


def _nobody(sizes: tuple[int, int]) -> Survivors:
    none = torch.zeros(0, dtype=torch.int64)
    return Survivors(none, none, sizes)
