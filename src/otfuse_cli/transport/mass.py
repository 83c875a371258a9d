"""Masses: how much each unit weighs in the transport problem.

N units; a mass sums to 1, in float64. No names, no files.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import SolveFailed


def uniform(n: int) -> Tensor:
    """Equal masses: mass_N, float64 on the CPU, summing to 1."""
    if n < 1:
        raise ValueError(f"a mass needs at least one unit, got {n}")
    return torch.full((n,), 1.0 / n, dtype=torch.float64)


def from_norms(norms_N: Tensor, *, floor: float = 1e-3) -> Tensor:
    """Masses in proportion to norms (or any importance >= 0), floored.

    The floor keeps dead units in the problem: a mass of zero would drop the unit, and a column
    of zero mass has no map.

    Args:
        norms_N: Finite, >= 0, any floating dtype.
        floor: Smallest mass, as a share of the mean. All zeros give the uniform mass.

    Returns:
        mass_N, float64 on the CPU, summing to 1.

    Raises:
        ValueError: Not a non-empty vector, or a negative norm.
        SolveFailed: A norm is NaN or infinite.
    """
    if norms_N.ndim != 1 or not norms_N.numel():
        raise ValueError(f"expected a non-empty vector, got shape {tuple(norms_N.shape)}")
    mass_N = norms_N.detach().to("cpu", torch.float64)
    low, high = (value.item() for value in torch.aminmax(mass_N))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise SolveFailed(
            "the masses are not finite",
            why="NaN or infinity among the norms they come from",
            fix="look for non-finite weights or samples, or use --mass uniform",
        )
    if low < 0:
        raise ValueError("norms must not be negative")
    if high == 0:
        return uniform(mass_N.numel())
    mass_N = mass_N / high
    mass_N.clamp_(min=floor * mass_N.mean().item())
    return mass_N / mass_N.sum()
