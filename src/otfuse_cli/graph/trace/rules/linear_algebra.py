"""Functions of whole matrices: few commute with an order of rows or columns."""

from __future__ import annotations

from ..call import Call, Labels
from .table import rule

PIVOTED = "depends on the order of rows and columns"


@rule("linalg_matrix_exp", "matrix_exp", "linalg_matrix_power", "matrix_power")
def power_series(call: Call) -> Labels:
    """f(P A P^T) = P f(A) P^T: rows and columns move together."""
    value = call.value("self")
    side = call.unify(*value.labels[-2:])
    call.restrict(side)
    call.joint(value.labels)
    return [*value.labels[:-2], side, side]


@rule("linalg_inv", "inverse", "linalg_inv_ex")
def inverse(call: Call) -> object:
    """Of P A Q the inverse is Q^T A^-1 P^T: rows become columns."""
    value = call.value("A", "self")
    rows, columns = value.labels[-2:]
    call.restrict([rows, columns])
    call.joint(value.labels)
    lead = value.labels[:-2]
    made = [*lead, columns, rows]
    return made if len(call.shapes) == 1 else [made, lead]


@rule(
    "linalg_qr", "linalg_householder_product", "linalg_cholesky", "linalg_cholesky_ex", "linalg_lu",
    "linalg_lu_factor", "linalg_svd", "_linalg_svd", "linalg_eigh", "_linalg_eigh", "linalg_eig",
    "qr", "svd", "geqrf", "cholesky", "orgqr", "linalg_ldl_factor",
)  # fmt: skip
def factorisation(call: Call) -> object:
    """Factors are built column by column, and their signs follow the first entries."""
    for value in call.operands():
        call.pin(value.labels, f"{call.name} {PIVOTED}")
    outs = [call.pinned_axes(shape, f"{call.name} {PIVOTED}") for shape in call.shapes]
    return outs if len(outs) > 1 else outs[0]


@rule("torchvision::deform_conv2d")
def deformable(call: Call) -> Labels:
    """Groups of offsets cut the channels once more than groups of the convolution do."""
    raise ValueError("where channels are read depends on groups of offsets, which are not followed")
