"""Tensors that are a function of weights, computed anew from those of the fused model.

Legend: R rows of a weight, C all its other positions, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..graph.derived_tensors import POWER
from ..graph.model import Derived, LayerGraph
from .relations import computed

# Up to here the smaller Gram matrix is decomposed whole; beyond, its leading space is iterated.
_WHOLE = 1024
# Vectors that are iterated: convergence is as fast as the ninth value is small beside the first.
_SPACE = 8
_ITERATIONS = 1000
_SETTLED = 1e-14  # relative change of the norm, whose error is the square of the vector's


def renewed(derived: Derived, weight: Tensor, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The power-iteration vectors of a weight, converged: its norm is u W v.

    Args:
        derived: What is computed, and along which axis.
        weight: The fused weight.
        before: The parts as one parent has them, by part: for shapes, and for the sign.

    Returns:
        The parts by tensor name, float64 on the CPU. Of a weight of zeros they stay as they were.
    """
    matrix_RC = weight.detach().cpu().double().movedim(derived.dim, 0).flatten(1)
    u_R, v_C = leading(matrix_RC)
    sigma = u_R @ matrix_RC @ v_C
    old = {part: t.detach().cpu().double() for part, t in before.items()}
    if not bool(sigma > 0):
        return {derived.parts[part]: t for part, t in old.items()}
    if bool((u_R * old["u"].flatten()).sum() < 0):
        u_R, v_C = -u_R, -v_C
    parts = {"u": u_R, "v": v_C, "sigma": sigma}
    return {derived.parts[part]: parts[part].reshape(t.shape) for part, t in old.items()}


def renew_all(graph: LayerGraph, tensors: dict[str, Tensor]) -> None:
    """Compute everything that is derived anew, in place, in each tensor's dtype and device."""
    for derived in graph.derived:
        if derived.kind != POWER:
            (name,) = derived.tensors
            values = {n: tensors[n].double() for n in derived.sources}
            tensors[name] = computed(derived, values).to(tensors[name])
            continue
        before = {part: tensors[name] for part, name in derived.parts.items()}
        for name, tensor in renewed(derived, tensors[derived.source], before).items():
            tensors[name] = tensor.to(tensors[name])


def leading(matrix_RC: Tensor) -> tuple[Tensor, Tensor]:
    """The leading singular vectors u_R and v_C; the largest entry of u is positive.

    Raises:
        ValueError: NaN or infinity.
    """
    if not bool(torch.isfinite(matrix_RC).all()):
        raise ValueError("a weight that is not finite has no norm")
    rows, columns = matrix_RC.shape
    wide = rows <= columns
    side = matrix_RC if wide else matrix_RC.T
    # The smaller side: its Gram matrix has the same values, other than zeros.
    if min(rows, columns) <= _WHOLE:
        first = torch.linalg.eigh(side @ side.T)[1][:, -1]
    else:
        first = _iterated(lambda block: side @ (side.T @ block), len(side))
    other = _unit(side.T @ first)
    first = _unit(side @ other)
    u_R, v_C = (first, other) if wide else (other, first)
    if u_R[u_R.abs().argmax()] < 0:
        u_R, v_C = -u_R, -v_C
    return u_R, v_C


def _iterated(apply: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """The leading eigenvector of a positive matrix by subspace iteration, from a fixed start."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(size, _SPACE, generator=generator, dtype=torch.float64)
    block, before = torch.linalg.qr(block)[0], 0.0
    for _ in range(_ITERATIONS):
        image = apply(block)
        values, vectors = torch.linalg.eigh(block.T @ image)
        norm = float(values[-1])
        if abs(norm - before) <= _SETTLED * abs(norm):
            break
        before, block = norm, torch.linalg.qr(image)[0]
    vector: Tensor = block @ vectors[:, -1]
    return vector


def _unit(vector: Tensor) -> Tensor:
    length = vector.norm()
    return vector / length if bool(length > 0) else vector
