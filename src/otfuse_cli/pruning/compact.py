"""Tensors with fewer units, and back: a compact tensor in the shape that it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import SolveFailed
from ..fusion.repair import fused_variance, plan_repair
from ..graph.axes import axis_units
from ..graph.model import GraphTensor, LayerGraph, Role
from ..graph.sizes import at_sizes
from ..matching.alignment import Alignment
from ..matching.apply import transport
from ..matching.models import Model
from ..running.relabel import axis_index, relabel
from .choose_units import KeptUnits

Kept = Mapping[str, torch.Tensor]


def compact(tensor: torch.Tensor, node: GraphTensor, graph: LayerGraph, kept: Kept) -> torch.Tensor:
    """`tensor` with the kept units only: bit for bit, any dtype."""
    return relabel(tensor, node, kept, graph.spaces)


def expand(tensor: torch.Tensor, node: GraphTensor, graph: LayerGraph, kept: Kept) -> torch.Tensor:
    """A compact tensor in the shape of `node`: units that went are 0 (running variances 1)."""
    for dim, axis in enumerate(node.axes):
        if not any(unit in kept for unit in axis_units(axis.expr)):
            continue
        shape = list(tensor.shape)
        shape[dim] = node.shape[dim]
        # A variance of 1 divides by nothing that is not there.
        whole = tensor.new_full(shape, 1 if Role.VARIANCE in axis.roles else 0)
        where = axis_index(axis.expr, kept, graph.spaces).to(tensor.device)
        tensor = whole.index_copy_(dim, where, tensor)
    return tensor


def smaller(graph: LayerGraph, kept: Kept) -> LayerGraph:
    """The graph of the compact network."""
    return at_sizes(graph, {space: len(index) for space, index in kept.items()})


class Pruner:
    """The tensors of a pruned network, one at a time: units dropped, merged, or made anew."""

    def __init__(
        self, model: Model, choice: KeptUnits, made: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Take a network and what stays of it; `made` has tensors that are something else."""
        self.model, self.choice, self.made = model, choice, made or {}
        self.alignment = Alignment(choice.merges)
        self.feeds = plan_repair(model.graph).feeds if choice.merges else {}
        self.dropped = {s: k for s, k in choice.kept.items() if s not in choice.merges}

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, stored as `dtype`.

        Raises:
            UnreadableInput: NaN or infinity in it.
            SolveFailed: Computed weights don't fit `dtype`.
        """
        if name in self.made:
            return _cast(name, self.made[name].cpu(), dtype)
        model, graph = self.model, self.model.graph
        node = graph.tensors[name]
        stored = model.stored(name)
        merged_units = self.choice.merges.keys() & node.units
        if not merged_units or not stored.is_floating_point():
            return _cast(name, compact(stored, node, graph, self.choice.kept), dtype)
        moved = transport(model.read(name), name, graph, self.alignment)
        if name in self.feeds:
            whole = [(model, self.alignment, 1.0)]
            moved = fused_variance(moved, name, self.feeds[name], lambda weight: whole)
        # Spaces whose units are dropped keep their size in the maps: they are cut last.
        merged = smaller(graph, {s: self.choice.kept[s] for s in self.choice.merges})
        moved = compact(moved.cpu(), merged.tensors[name], merged, self.dropped)
        return _cast(name, moved, dtype)


def parameters(shapes: Mapping[str, Sequence[int]]) -> int:
    """Numbers in tensors of such shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    stored = tensor.to(dtype)
    if not torch.isfinite(stored.to(torch.float32)).all():
        raise SolveFailed(
            "a computed tensor overflows",
            where=f"{name}, stored as {str(dtype).removeprefix('torch.')}",
            why="a value is larger than the dtype can hold",
            fix="use --dtype float32",
        )
    return stored
