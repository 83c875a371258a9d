"""Heads of one attention layer: which is which, and how it is turned inside.

Score of a pair of heads: what their queries, keys, values and outputs have in common once the
insides are turned as well as they can be; the assignment takes the best pairs.
Legend: N source heads, M anchor heads, g query groups of a head, i inside, k what is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.analysis.attentions import Attention, Projection
from ..transport.solve import maximise
from .canonical import Tensors, view

# Rounds between groups and insides of a pair: each is solved for the other's last answer.
_ROUNDS = 2


@dataclass(frozen=True)
class HeadMoves:
    """How the heads of a source move.

    Attributes:
        index_M: The source head of each anchor head.
        groups_Mg: For each anchor head, the source group of each of its query groups.
        query_Mii: Rotations inside queries and keys.
        value_Mii: Rotations inside values.
    """

    index_M: Tensor
    groups_Mg: Tensor
    query_Mii: Tensor
    value_Mii: Tensor


def match_heads(
    source: Mapping[str, Tensor],
    anchor: Mapping[str, Tensor],
    attention: Attention,
    pairs: Tensor | None = None,
) -> HeadMoves:
    """The best heads and insides, the stream being as it is.

    Args:
        source: Its stream turned to the anchor's.
        anchor: In canonical form, as the source.
        attention: The layer.
        pairs: For rotary positions, 2 x i/2 positions inside queries that turn together; None
            where they don't turn by halves.
    """
    query_N, query_M = _queries(source, attention), _queries(anchor, attention)
    value_N, value_M = _values(source, attention), _values(anchor, attention)
    heads, groups = value_M[1].shape[:2]
    device = value_M[1].device
    order_NMg = torch.arange(groups, device=device).expand(heads, heads, groups)
    for _ in range(_ROUNDS if groups > 1 else 1):
        turn_q, score_q = _turn(
            _gram(query_N, query_M, order_NMg), free=attention.turns, pairs=pairs
        )
        turn_v, score_v = _turn(_gram(value_N, value_M, order_NMg), free=True)
        if groups > 1:
            order_NMg = _groups((query_N, query_M, turn_q), (value_N, value_M, turn_v))
    if groups > 1:
        turn_q, score_q = _turn(
            _gram(query_N, query_M, order_NMg), free=attention.turns, pairs=pairs
        )
        turn_v, score_v = _turn(_gram(value_N, value_M, order_NMg), free=True)
    best_M = maximise(score_q + score_v).index_M
    assert best_M is not None
    index_M, all_M = best_M.to(device), torch.arange(heads, device=device)
    return HeadMoves(
        best_M, order_NMg[index_M, all_M], turn_q[index_M, all_M], turn_v[index_M, all_M]
    )


def move_heads(tensors: Tensors, attention: Attention, moves: HeadMoves) -> None:
    """Move the heads of a source, in place."""
    for part in attention.queries:
        _move(tensors, part, moves.index_M, moves.groups_Mg, moves.query_Mii)
    _move(tensors, attention.values, moves.index_M, moves.groups_Mg, moves.value_Mii)
    output = view(attention.output, tensors[attention.output.tensor])
    moved = _picked(output, moves.index_M, moves.groups_Mg, attention.output.spaces)
    output.copy_(_turned(moved, moves.value_Mii, axis=output.dim() - 2))


def _move(tensors: Tensors, part: Projection, index: Tensor, groups: Tensor, turns: Tensor) -> None:
    for block in (part.weight, part.bias):
        if block is None:
            continue
        held = view(block, tensors[block.tensor])
        moved = _picked(held, index, groups, block.spaces)
        held.copy_(_turned(moved, turns, axis=len(block.sizes) - 1))


def _picked(held: Tensor, index: Tensor, groups: Tensor, spaces: Sequence[str | None]) -> Tensor:
    held = held.index_select(0, index.to(held.device))
    if len(spaces) < 3:
        return held
    groups = groups.to(held.device)
    return torch.stack([head[order] for head, order in zip(held, groups, strict=True)])


def _turned(held: Tensor, turns_Mii: Tensor, *, axis: int) -> Tensor:
    moved = held.movedim(axis, 1)
    turned = torch.einsum("mij,mj...->mi...", turns_Mii.to(moved), moved)
    return turned.movedim(1, axis)


def _queries(tensors: Mapping[str, Tensor], attention: Attention) -> tuple[Tensor, ...]:
    return tuple(_rows(tensors, part) for part in attention.queries)


def _values(tensors: Mapping[str, Tensor], attention: Attention) -> tuple[Tensor, ...]:
    output = view(attention.output, tensors[attention.output.tensor])
    if output.dim() == 3:
        output = output[:, None]
    return _rows(tensors, attention.values), output


def _rows(tensors: Mapping[str, Tensor], part: Projection) -> Tensor:
    """Heads x groups (1 where they share) x inside x what is read, the bias last."""
    weight = view(part.weight, tensors[part.weight.tensor])
    if part.bias is not None:
        bias = view(part.bias, tensors[part.bias.tensor])
        weight = torch.cat([weight, bias[..., None]], -1)
    return weight if weight.dim() == 4 else weight[:, None]


def _gram(mine: Sequence[Tensor], theirs: Sequence[Tensor], order_NMg: Tensor) -> Tensor:
    """Inner products of insides, anchor x source, summed over groups: N, M, i, i."""
    total: Tensor | None = None
    for source, anchor in zip(mine, theirs, strict=True):
        if source.shape[1] == 1:
            part = torch.einsum("mgik,ngjk->nmij", anchor, source)
        else:
            every = torch.einsum("mgik,nejk->nmgeij", anchor, source)
            index = order_NMg[..., None, None, None].expand(*order_NMg.shape, 1, *every.shape[-2:])
            part = every.gather(3, index).sum((2, 3))
        total = part if total is None else total + part
    assert total is not None
    return total


def _groups(
    queries: tuple[Sequence[Tensor], Sequence[Tensor], Tensor],
    values: tuple[Sequence[Tensor], Sequence[Tensor], Tensor],
) -> Tensor:
    """Which group is which, for every pair of heads, the insides being turned as they are."""
    benefit: Tensor | None = None
    for mine, theirs, turn_NMii in (queries, values):
        for source, anchor in zip(mine, theirs, strict=True):
            if source.shape[1] > 1:
                every = torch.einsum("mgik,nejk->nmgeij", anchor, source)
                part = torch.einsum("nmgeij,nmij->nmeg", every, turn_NMii)
                benefit = part if benefit is None else benefit + part
    assert benefit is not None
    orders = [[maximise(pair).index_M for pair in row] for row in benefit.cpu()]
    stacked = torch.stack([torch.stack([o for o in row if o is not None]) for row in orders])
    return stacked.to(benefit.device)


def _turn(gram_NMii: Tensor, *, free: bool, pairs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rotation that brings source insides to the anchor's, and the score with it."""
    if free:
        left, values, right = torch.linalg.svd(gram_NMii)
        return left @ right, values.sum(-1)
    size = gram_NMii.shape[-1]
    turn = torch.eye(size).to(gram_NMii).expand(gram_NMii.shape).clone()
    if pairs is not None:
        one, two = pairs
        same = gram_NMii[..., one, one] + gram_NMii[..., two, two]
        cross = gram_NMii[..., two, one] - gram_NMii[..., one, two]
        length = torch.hypot(same, cross).clamp(min=1e-300)
        turn[..., one, one] = turn[..., two, two] = same / length
        turn[..., two, one], turn[..., one, two] = cross / length, -cross / length
    return turn, (gram_NMii * turn).sum((-2, -1))
