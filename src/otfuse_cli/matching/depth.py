"""Which places of one network stand for which of another of a different depth.

Places are compared by linear CKA of what is seen there on the same inputs, and matched in order, so
that the sum of CKA is largest (docs/methods/depth.md). Features and numbers only, no networks.

Legend: n rows (inputs, times positions), D and E units, A places of the anchor, S of the source.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Pairs = tuple[tuple[int, int], ...]

# Of a similarity: beyond them is what float32 leaves of features, which must not decide which of
# two copies of a layer stands for another.
_DECIMALS = 6


def linear_cka(one_nD: Tensor, other_nE: Tensor) -> float:
    """How alike two layers are on the same rows, 0 to 1, whatever their units are called.

    `|Y^T X|^2 / (|X^T X| |Y^T Y|)` of centred features: rotations of units and one scale for all of
    them change nothing (Kornblith et al., ICML 2019). Computed in float64; a layer that says
    nothing is like no other.
    """
    one_nD, other_nE = (f.double() - f.double().mean(0) for f in (one_nD, other_nE))
    together = float((other_nE.T @ one_nD).square().sum())
    apart = float((one_nD.T @ one_nD).norm() * (other_nE.T @ other_nE).norm())
    return round(min(1.0, together / apart), _DECIMALS) if apart > 0 else 0.0


def pooled(features: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Features (n, units, *positions) as (n, units, *grid): positions averaged onto a grid.

    Without a grid, over all of them.
    """
    if not grid:
        return features.flatten(2).mean(2) if features.dim() > 2 else features
    if tuple(features.shape[2:]) == grid:
        return features
    if len(grid) == 1:
        return F.adaptive_avg_pool1d(features, grid[0])
    if len(grid) == 2:
        return F.adaptive_avg_pool2d(features, (grid[0], grid[1]))
    return F.adaptive_avg_pool3d(features, (grid[0], grid[1], grid[2]))


def as_rows(features: Tensor) -> Tensor:
    """Features (n, units, *grid) as rows (n * grid, units)."""
    if features.dim() == 2:
        return features
    return features.flatten(2).transpose(1, 2).flatten(0, 1)


def ordered_pairs(similarity_AS: Tensor) -> Pairs:
    """Pairs of places, as many as the shorter network has, in the order of both.

    Their similarities sum to the most that such pairs can; of equals the earliest of the anchor,
    then of the source, is taken.
    """
    anchors, sources = similarity_AS.shape
    if anchors > sources:
        return tuple(sorted((a, s) for s, a in ordered_pairs(similarity_AS.T)))
    # best[a][s]: the most that places before a give, matched with sources before s.
    best = similarity_AS.new_full((anchors + 1, sources + 1), -torch.inf, dtype=torch.float64)
    best[0] = 0.0
    for a in range(anchors):
        for s in range(sources):
            taken = best[a, s] + similarity_AS[a, s]
            best[a + 1, s + 1] = torch.maximum(taken, best[a + 1, s])
    pairs, s = list[tuple[int, int]](), sources
    for a in reversed(range(anchors)):
        while s > a + 1 and best[a + 1, s - 1] >= best[a + 1, s]:
            s -= 1  # as good without the last one
        pairs.append((a, s - 1))
        s -= 1
    return tuple(reversed(pairs))


def covering(
    similarity_AS: Tensor, *, begin: bool, between_SS: Tensor | None = None
) -> tuple[int, ...]:
    """For each place of the anchor one of the source, in the order of both.

    No two have the same one, or where the source has fewer, every one of its places is somebody's.
    The last has the last, with `begin` the first has the first; their similarities, and what
    `between_SS` says of a place of the source and of the next that is taken, sum to the most that
    is possible so. Of equals the earliest is taken.
    """
    anchors, sources = similarity_AS.shape
    once = sources >= anchors
    if between_SS is None:
        between_SS = similarity_AS.new_zeros(sources, sources)
    between_SS = between_SS.double()
    allowed_AS = similarity_AS.double().clone()
    allowed_AS[-1, :-1] = -torch.inf
    if begin or not once:
        allowed_AS[0, 1:] = -torch.inf
    best_AS = torch.empty_like(allowed_AS)
    best_AS[0] = allowed_AS[0]
    for a in range(1, anchors):
        for s in range(sources):
            before = slice(*_before(s, once))
            best_AS[a, s] = allowed_AS[a, s] + _most(best_AS[a - 1, before] + between_SS[before, s])
    chosen = [sources - 1]
    for a in reversed(range(anchors - 1)):
        first, end = _before(chosen[-1], once)
        values_S = best_AS[a, first:end] + between_SS[first:end, chosen[-1]]
        chosen.append(first + _first_best(values_S))
    return tuple(reversed(chosen))


def _before(s: int, once: bool) -> tuple[int, int]:
    """Places of the source, as a slice, that may come before one."""
    return (0, s) if once else (max(0, s - 1), s + 1)


def _most(values_S: Tensor) -> float:
    return float(values_S.max()) if len(values_S) else -torch.inf


def _first_best(values_S: Tensor) -> int:
    """Index of the largest value; of equals the first."""
    return int((values_S == values_S.max()).nonzero()[0])
