"""Products of rows with themselves, half of them computed.

Legend: g independent problems, R rows, n numbers in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

# Taken in panels of so many columns, below the diagonal only: wide enough for full speed, narrow
# enough that little is computed twice.
_PANEL = 512


def add_products(sums_gRR: Tensor, rows_gRn: Tensor) -> None:
    """Add `rows @ rows^T` to the lower triangle, in panels: about half the work of the whole."""
    add_panels(sums_gRR, panels(rows_gRn))


def panels(rows_gRn: Tensor) -> Iterator[Tensor]:
    """The panels of `rows @ rows^T`, in order: of each the rows from its first column on."""
    for start in range(0, rows_gRn.shape[1], _PANEL):
        panel = rows_gRn[:, start : start + _PANEL].transpose(1, 2)
        yield rows_gRn[:, start:] @ panel


def add_panels(sums_gRR: Tensor, products: Iterable[Tensor]) -> None:
    """Add panels of a product to the lower triangle."""
    for at, product in enumerate(products):
        start = at * _PANEL
        sums_gRR[:, start:, start : start + _PANEL] += product


def mirrored(sums_gRR: Tensor) -> Tensor:
    """The symmetric matrix of which `add_products` filled one half, in place."""
    for start in range(_PANEL, sums_gRR.shape[1], _PANEL):
        panel = sums_gRR[:, start:, start - _PANEL : start]
        sums_gRR[:, start - _PANEL : start, start:] = panel.transpose(1, 2)
    return sums_gRR
