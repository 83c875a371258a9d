"""Which units to keep of several parents, and how the others are made of them.

Units are what they do on the inputs, rows of a Gram matrix over all taps of a space. Choosing M of
them is the projection of the mixture of the parents' unit measures onto M points of its support
(docs/methods/joint.md, Choosing). Legend: U units of all parents, M chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..transport.choice import Choice
from .stream_choice import Quotas, turns

# Relative to the mean power of a unit: below this, what is left of one is rounding.
_NOTHING = 1e-10
# Of the mean power of the chosen units: with fewer inputs than units any set of units fits them.
_RIDGE = 0.01


def choose_pivots(gram_UU: Tensor, share_U: Tensor, most: int, quotas: Quotas = ()) -> Tensor:
    """Pivoted Cholesky: again and again the unit that those chosen explain least.

    A unit counts by its power to the half (rows are scaled by 1 / sqrt of their norm) and by the
    share of its parent. Units that are explained already come last, by lowest index.

    Args:
        gram_UU: Inner products of what units do, float64.
        share_U: Importance of each unit's parent.
        most: M.
        quotas: See `choose_units`.

    Returns:
        M indices in ascending order.
    """
    norm_U = gram_UU.diagonal().clamp(min=0).sqrt()
    scale_U = torch.where(norm_U > 0, norm_U.clamp(min=1e-300).rsqrt(), 0.0) * share_U.sqrt()
    scaled_UU = gram_UU * scale_U[:, None] * scale_U
    left_U = gram_UU.diagonal() * scale_U.square()
    floor = _NOTHING * left_U.mean()
    factor_MU = gram_UU.new_zeros(most, len(left_U))
    free_U = torch.ones_like(left_U, dtype=torch.bool)
    for at, allowed_U in enumerate(turns(free_U, most, quotas)):
        # An index of one, never a number: a device would be waited for.
        best_1 = torch.where(free_U & allowed_U, left_U, -1.0).argmax(keepdim=True)
        free_U.index_fill_(0, best_1, False)
        there_M = factor_MU[:at].index_select(1, best_1)[:, 0]
        rest_U = scaled_UU.index_select(0, best_1)[0] - there_M @ factor_MU[:at]
        present = left_U.index_select(0, best_1)
        factor_U = rest_U / present.sqrt()
        factor_MU[at] = factor_U = torch.where(present > floor, factor_U, 0.0)
        left_U = (left_U - factor_U.square()).clamp(min=0)
    return (~free_U).nonzero().flatten()


def combinations(gram_UU: Tensor, chosen_M: Tensor) -> Tensor:
    """Every unit as a combination of the chosen ones, U x M; those are themselves.

    Least squares with a ridge toward the multiple of the one chosen unit that explains most. So a
    duplicate is its twin exactly, and few inputs, which any set of units fits, are not overfitted.

    Args:
        gram_UU: Inner products of what units do, float64.
        chosen_M: Indices of the chosen units.
    """
    cross_UM, inner_MM = gram_UU[:, chosen_M], gram_UU[chosen_M][:, chosen_M]
    power = float(inner_MM.diagonal().mean())
    power_M = inner_MM.diagonal().clamp(min=_NOTHING * power + 1e-300)
    nearest_U1 = (cross_UM.square() / power_M).argmax(1, keepdim=True)
    times_UM = (cross_UM / power_M).gather(1, nearest_U1)
    read_UM = torch.zeros_like(cross_UM).scatter_(1, nearest_U1, times_UM)
    system = inner_MM.clone()
    system.diagonal().add_(_RIDGE * power + 1e-30)
    factor = torch.linalg.cholesky(system)
    read_UM += torch.cholesky_solve((cross_UM - read_UM @ inner_MM).T, factor).T
    read_UM[chosen_M] = torch.eye(len(chosen_M), dtype=read_UM.dtype, device=read_UM.device)
    return read_UM


def split_choice(chosen_M: Tensor, counts: Sequence[int], read_UM: Tensor | None) -> list[Choice]:
    """What each parent has of a choice among the units of all."""
    choices, start = [], 0
    for count in counts:
        own_M = (chosen_M >= start) & (chosen_M < start + count)
        read_NM = torch.zeros(count, len(chosen_M))
        if read_UM is not None:
            read_NM = read_UM[start : start + count]
        choices.append(Choice((chosen_M - start).clamp(0, count - 1), own_M, read_NM))
        start += count
    return choices
