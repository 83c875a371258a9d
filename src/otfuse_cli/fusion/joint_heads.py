"""Joint fusion by selection where units are heads: those are chosen as wholes.

For transformers whose residual stream has axes of its own (a norm stands on it): its units are
chosen one by one like those of any layer, and of each attention layer the heads that explain most
of what all parents' heads write to the chosen units.

Legend: U positions inside the heads of all parents, M chosen, d units of the fused stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UsageError
from ..graph.analysis.attentions import Attention, attentions
from ..graph.analysis.fit_targets import linear_layers
from ..graph.model import LayerGraph
from ..matching.alignment import Alignment
from ..matching.apply import transport
from ..running.samples import Samples
from ..transport.choice import Choice
from .lockstep import Parent
from .pivoted_cholesky import split_choice
from .stream_basis import Place, covariances
from .stream_choice import choose_heads, read_from


def add_heads(
    anchor: LayerGraph, parents: Sequence[Parent], samples: Samples, *, device: str
) -> tuple[list[Parent], dict[str, Tensor]]:
    """Choose the heads of every attention layer.

    Args:
        anchor: Its graph has the numbers of heads of the result.
        parents: With choices for all other units.
        samples: What they are run on.
        device: Where.

    Returns:
        The parents, with choices of heads as well, and the layers that read the chosen heads.

    Raises:
        UsageError: An attention layer of an unknown kind, or heads of different widths.
    """
    each = [attentions(p.graph) for p in parents]
    require_alike(each)
    by_weight = {layer.weight: layer for layer in linear_layers(parents[0].program)}
    outputs = [a.output.tensor for a in each[0]]
    if lost := [weight for weight in outputs if weight not in by_weight]:
        raise UsageError(
            "joint fusion can't choose among some heads",
            where=lost[0],
            why="the layer that reads them is used in an unknown way",
            fix="use --blend average",
        )
    places = [Place(by_weight[weight].input) for weight in outputs]
    sums = list(covariances(parents, places, samples, device=device))
    maps = [dict(p.alignment.maps) for p in parents if p.alignment is not None]
    tensors = {}
    for at, covariance in enumerate(sums):
        layers = [a[at] for a in each]
        size = anchor.spaces[layers[0].heads].size
        chosen, reads = _choose(layers, parents, covariance, size)
        tensors[layers[0].output.tensor] = read_through(layers, parents, reads)
        for parent_maps, choice in zip(maps, chosen, strict=True):
            parent_maps[layers[0].heads] = choice
    chosen_parents: list[Parent] = []
    for parent, parent_maps in zip(parents, maps, strict=True):
        chosen_parents.append(replace(parent, alignment=Alignment(parent_maps)))
    return chosen_parents, tensors


def _choose(
    layers: Sequence[Attention], parents: Sequence[Parent], covariance: Tensor, size: int
) -> tuple[list[Choice], list[Tensor]]:
    """Which heads, and what reads the chosen ones in place of each parent's own."""
    counts = [a.output.sizes[0] for a in layers]
    writes = []
    for attention, parent in zip(layers, parents, strict=True):
        matrix = _written(attention, parent).movedim(attention.output.dim, -1).flatten(0, -2)
        # Powers add up: a parent counts by its weight, what it writes by the root of that.
        writes.append(matrix * parent.weight**0.5)
    chosen = choose_heads(covariance, torch.cat(writes, 1), sum(counts), size)
    places = torch.arange(len(covariance)).view(sum(counts), -1)
    inside = places[list(chosen)].flatten().to(covariance.device)
    widths = [count * places.shape[1] for count in counts]
    reads = torch.split_with_sizes(read_from(covariance, inside), widths)
    return split_choice(torch.tensor(chosen), counts, None), list(reads)


def _written(attention: Attention, parent: Parent) -> Tensor:
    """A parent's output layer, made by the chosen units of the stream that are its own."""
    assert parent.alignment is not None
    name = attention.output.tensor
    return transport(parent.tensors[name].double(), name, parent.graph, parent.alignment)


def read_through(
    layers: Sequence[Attention], parents: Sequence[Parent], reads: Sequence[Tensor]
) -> Tensor:
    """The output layer of all parents, on the chosen heads; the stream as `alignment` says.

    Args:
        layers: The attention layer of each parent.
        parents: With maps for the stream, and none for the heads.
        reads: Positions inside each parent's heads as combinations of the chosen ones, U x M.
    """
    total: Tensor | None = None
    for attention, parent, read in zip(layers, parents, reads, strict=True):
        moved, dim = _written(attention, parent), attention.output.dim
        term = torch.tensordot(moved, read.to(moved), dims=([dim], [0])).movedim(-1, dim)
        total = term if total is None else total + term
    assert total is not None
    return total.float()


def require_alike(each: Sequence[Sequence[Attention]]) -> None:
    """Refuse heads of different widths.

    Raises:
        UsageError: Some differ.
    """
    for first, *others in zip(*each, strict=True):
        for other in others:
            ours, others_parts = (*first.queries, first.values), (*other.queries, other.values)
            for one, two in zip(ours, others_parts, strict=True):
                if one.weight.sizes[1:] != two.weight.sizes[1:]:
                    raise UsageError(
                        "heads of different widths can't be chosen among",
                        where=f"{one.weight.tensor}: {one.weight.sizes[1:]} and "
                        f"{two.weight.sizes[1:]}",
                        fix="use --blend average",
                    )
