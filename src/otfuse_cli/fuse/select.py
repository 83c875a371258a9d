"""Which units to keep of several parents, and how the others are made of them.

Units are what they do on the inputs, rows of a Gram matrix over all taps of a space. Choosing M of
them is the projection of the mixture of the parents' unit measures onto M points of its support
(DESIGN section 3, Joint). Legend: U units of all parents, M chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Relative to the mean power of a unit: below this, what is left of one is rounding.
_NOTHING = 1e-10
_JITTER = 1e-7


def choose(gram_UU: Tensor, share_U: Tensor, most: int) -> Tensor:
    """Pivoted Cholesky: again and again the unit that those chosen explain least.

    A unit counts by its power to the half (rows are scaled by 1 / sqrt of their norm) and by the
    share of its parent. Units that are explained already come last, by lowest index.

    Args:
        gram_UU: Inner products of what units do, float64.
        share_U: Importance of each unit's parent.
        most: M.

    Returns:
        M indices in ascending order.
    """
    norm_U = gram_UU.diagonal().clamp(min=0).sqrt()
    scale_U = torch.where(norm_U > 0, norm_U.clamp(min=1e-300).rsqrt(), 0.0) * share_U.sqrt()
    left_U = gram_UU.diagonal() * scale_U.square()
    floor = _NOTHING * float(left_U.mean())
    factor_MU = gram_UU.new_zeros(most, len(left_U))
    free_U = torch.ones_like(left_U, dtype=torch.bool)
    for at in range(most):
        best = int(torch.where(free_U, left_U, -1.0).argmax())
        free_U[best] = False
        if left_U[best] > floor:
            row = gram_UU[best] * scale_U[best] * scale_U - factor_MU[:at, best] @ factor_MU[:at]
            factor_MU[at] = row / left_U[best].sqrt()
            left_U = (left_U - factor_MU[at].square()).clamp(min=0)
    return (~free_U).nonzero().flatten()


def reconstruct(gram_UU: Tensor, chosen_M: Tensor) -> Tensor:
    """Least squares: every unit as a combination of the chosen ones, U x M; those are themselves.

    Args:
        gram_UU: Inner products of what units do, float64.
        chosen_M: Indices of the chosen units.
    """
    inner = gram_UU[chosen_M][:, chosen_M].clone()
    inner.diagonal().add_(_JITTER * float(inner.diagonal().mean()) + 1e-30)
    factor = torch.linalg.cholesky(inner)
    read_UM = torch.cholesky_solve(gram_UU[chosen_M], factor).T.contiguous()
    read_UM[chosen_M] = torch.eye(len(chosen_M), dtype=read_UM.dtype, device=read_UM.device)
    return read_UM
