"""Which units to keep of several parents: those that explain most of what all hand on.

A unit counts by what it adds to what the layers that read it are given, not by how large it is
(greedy, as ThiNet has it for one layer of one network: Luo et al., ICCV 2017). Of parents side by
side a hidden layer reads its own parent's units, an output layer the weighted sum.

Legend: U units of all parents, N of one, d outputs of a layer, M chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..graph.analysis.fit_targets import Fit, fits
from ..graph.axes import axis_units
from ..graph.model import LayerGraph, Role
from ..matching.counterpart import Counterpart
from ..matching.unfold import unfold
from .lockstep import Parent
from .patches import along_outputs
from .pivoted_cholesky import choose_pivots
from .stream_choice import Quotas, choose_units


def choose_written(
    parents: Sequence[Parent],
    space: str,
    gram_UU: Tensor,
    most: int,
    *,
    other_share: float | None = None,
) -> Tensor:
    """The units of a space that stay; where no layer reads them, those that explain the others.

    Args:
        parents: At their widths.
        space: Of units that are made one by one.
        gram_UU: Inner products of what the units of all parents do, float64.
        most: M.
        other_share: Share of M for units of parents after the first; None: whichever are best.

    Returns:
        M indices in ascending order.
    """
    counts = [p.graph.spaces[space].size for p in parents]
    quotas = () if other_share is None else _quotas(counts, most, other_share)
    write_dU = written(parents, space, gram_UU)
    if write_dU is not None:
        return choose_units(gram_UU, write_dU, most, quotas)
    shares = [torch.full((p.graph.spaces[space].size,), p.weight) for p in parents]
    return choose_pivots(gram_UU, torch.cat(shares).to(gram_UU), most, quotas)


def _quotas(counts: Sequence[int], most: int, other_share: float) -> Quotas:
    """First the best of the first parent's units, then the best of the others' beside them."""
    first_U = torch.arange(sum(counts)) < counts[0]
    others = min(round(other_share * most), sum(counts) - counts[0])
    firsts = min(most - others, counts[0])
    return ((first_U, firsts), (~first_U, most - firsts))


def written(parents: Sequence[Parent], space: str, gram_UU: Tensor) -> Tensor | None:
    """What the units of a space write, d x U, over all layers that read it; None where none does.

    Layers count alike, whatever the size of what they put out, and parents by their weights.
    Outputs count by what a BatchNorm behind them makes of them.
    """
    counts = [p.graph.spaces[space].size for p in parents]
    parts: list[Tensor] = []
    for readers in _readers(parents, space):
        writes: list[Tensor | None] = [None] * len(parents)
        for at, (fit, dim) in readers.items():
            writes[at] = _read(parents[at], fit, dim, _read_as(parents[at], space)).to(gram_UU)
        at, (fit, _) = next(iter(readers.items()))
        if ends_at_outputs(parents[at].graph, fit.layer.weight):
            height = next(len(write) for write in writes if write is not None)
            whole = [
                gram_UU.new_zeros(height, count) if write is None else p.weight * write
                for p, write, count in zip(parents, writes, counts, strict=True)
            ]
            power = sum(parents[at].weight for at in readers) if None in writes else 1.0
            parts.append(_at_power(torch.cat(whole, 1), gram_UU, power))
            continue
        # A hidden layer of one parent reads nothing of the others: zeros in their columns.
        start = 0
        for parent, write, count in zip(parents, writes, counts, strict=True):
            if write is not None:
                apart = write.new_zeros(len(write), sum(counts))
                apart[:, start : start + count] = write
                parts.append(_at_power(apart, gram_UU, parent.weight))
            start += count
    return torch.cat(parts) if parts else None


def _readers(parents: Sequence[Parent], space: str) -> Iterable[dict[int, tuple[Fit, int]]]:
    """Layers that read a space, with the axis that does; those of one name by their parent.

    Hidden layers of a parent of another depth stand for nobody else's.
    """
    by_name: dict[tuple[str, int | None], dict[int, tuple[Fit, int]]] = {}
    for at, parent in enumerate(parents):
        layers = {fit.layer.weight: fit for fit in fits(parent.program)[0]}
        graph, other = parent.graph, parent.counterpart
        for name, dim in graph.members[_read_as(parent, space)]:
            if graph.tensors[name].axes[dim].roles != {Role.CONSUME} or name not in layers:
                continue
            meant: tuple[str, int | None] = (name, None)
            if isinstance(other, Counterpart):
                meant = (other.outputs[name], None) if name in other.outputs else (name, at)
            by_name.setdefault(meant, {})[at] = (layers[name], dim)
    return by_name.values()


def _read_as(parent: Parent, space: str) -> str:
    """The space in which a parent's units are read."""
    other = parent.counterpart
    return other.read_as.get(space, space) if isinstance(other, Counterpart) else space


def _read(parent: Parent, fit: Fit, dim: int, space: str) -> Tensor:
    """What a layer makes of the units, d x N."""
    weight, tensors = parent.tensors[fit.layer.weight], parent.tensors
    if fit.norm is not None:
        gain, variance = (tensors[fit.norm.tensors[part]] for part in ("weight", "running_var"))
        gain = gain * (variance + fit.norm.eps).rsqrt()
        weight = weight * along_outputs(gain, weight, fit.layer)
    exprs = parent.graph.tensors[fit.layer.weight].exprs
    rows = unfold(weight, exprs, dim, space, parent.graph.sizes)
    return torch.cat([r.flatten(1) for r in rows], 1).T


def ends_at_outputs(graph: LayerGraph, name: str) -> bool:
    """Whether the outputs of a layer are no units that could be chosen: the parents' add up."""
    for axis in graph.tensors[name].axes:
        free = any(graph.spaces[unit].pinned is None for unit in axis_units(axis.expr))
        if free and Role.PRODUCE in axis.roles:
            return False
    return True


def _at_power(write_dU: Tensor, gram_UU: Tensor, power: float) -> Tensor:
    """Scaled so that what is written has this power."""
    present = float(((write_dU @ gram_UU) * write_dU).sum())
    return write_dU * (power / present) ** 0.5 if present > 0 else write_dU
