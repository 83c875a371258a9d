"""Products of rows with themselves, half of them computed.

Legend: g independent problems, R rows, n numbers in each.
"""

from __future__ import annotations

from torch import Tensor

# Taken in panels of so many columns, below the diagonal only: wide enough for full speed, narrow
# enough that little is computed twice.
_PANEL = 512


def add_products(sums_gRR: Tensor, rows_gRn: Tensor) -> None:
    """Add `rows @ rows^T` to the lower triangle, in panels: about half the work of the whole."""
    size = rows_gRn.shape[1]
    for start in range(0, size, _PANEL):
        panel = rows_gRn[:, start : start + _PANEL].transpose(1, 2)
        sums_gRR[:, start:, start : start + _PANEL] += rows_gRn[:, start:] @ panel


def mirrored(sums_gRR: Tensor) -> Tensor:
    """The symmetric matrix of which `add_products` filled one half, in place."""
    for start in range(_PANEL, sums_gRR.shape[1], _PANEL):
        panel = sums_gRR[:, start:, start - _PANEL : start]
        sums_gRR[:, start - _PANEL : start, start:] = panel.transpose(1, 2)
    return sums_gRR
