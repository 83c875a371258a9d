"""How precisely a network computes, whatever it is given: its outputs are compared by that.

A module may cast inside (norms in float32, attention in bfloat16); what it returns is then no more
exact than the lowest of these.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")

EXACT = 1e-10  # relative error allowed in float64
FLOAT32 = 1e-4
FLOAT16 = 1e-2
BFLOAT16 = 5e-2

# Rounding grows with depth and with sums in another order, by some hundred times a unit of float32;
# of the half formats there is no room for that before a wrong unit would pass: some ten times
# (docs/methods/proof.md, How much may differ).
ALLOWED = {
    torch.float64: EXACT,
    torch.complex128: EXACT,
    torch.float32: FLOAT32,
    torch.complex64: FLOAT32,
    torch.float16: FLOAT16,
    torch.complex32: FLOAT16,
    torch.bfloat16: BFLOAT16,
}
# A change of the outputs that counts as one, by the error allowed: what a wrong unit makes is far
# above rounding in float64 and float32; in the half formats nothing lies between the two.
MOVED = {EXACT: 1e-8, FLOAT32: 1e-5, FLOAT16: 1e-2, BFLOAT16: 5e-2}
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def in_double(
    compute: Callable[[torch.dtype], Result],
    *,
    dtype: torch.dtype = torch.float64,
    failures: tuple[type[Exception], ...] = (RuntimeError,),
) -> Result:
    """What `compute` makes in float64 or, where the network has no kernels for that, in float32.

    Args:
        compute: Runs the network in the dtype that it is given.
        dtype: To try first.
        failures: What a missing kernel raises. In float32 they are the caller's to deal with.
    """
    if dtype is not torch.float32:
        with suppress(*failures):
            return compute(dtype)
    return compute(torch.float32)


def as_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """Every floating tensor of `tree` in `dtype`, complex ones in the complex type of that."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(_COMPLEX[dtype])
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, cast, tree)


class Precision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices what is computed less precisely than `dtype`, while it is entered.

    Attributes:
        allowed: The relative error allowed so far.
    """

    # `torch.cond` and its like are run as any operation; what they return is looked at.
    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        """Expect computations in `dtype`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.allowed: float = ALLOWED[dtype]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = max((_error(t) for t in pytree.tree_leaves(out)), default=0.0)
        if made > self.allowed:
            # A constant made in float32 (a mask of zeros) loses nothing: only what was more
            # precise before counts.
            errors = [_error(t) for t in pytree.tree_leaves((args, kwargs))]
            if any(0.0 < error <= self.allowed for error in errors):
                self.allowed = made
        return out


def _error(leaf: Any) -> float:
    return ALLOWED.get(leaf.dtype, 0.0) if isinstance(leaf, Tensor) else 0.0
