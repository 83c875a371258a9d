"""Whether weights are finite: what a checkpoint must hold before it is averaged."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import UnreadableInput
from .open import Checkpoint

_AT_ONCE = 1 << 20  # numbers looked at together: checks make temporaries of that size


def require_finite(checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor with NaN or infinity; a tensor that passed once is not looked at again.

    Raises:
        UnreadableInput: It has some; names the file, the tensor and how many.
    """
    if name in checkpoint.finite or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    bad = sum(
        int(piece.numel() - torch.isfinite(piece).sum())
        for piece in _pieces(tensor)
        if not _bounded(piece)
    )
    if bad:
        raise UnreadableInput(
            "a tensor holds NaN or infinity",
            where=f"{checkpoint.label}, tensor {name}",
            why=f"{bad} of its {tensor.numel() * (1 + tensor.is_complex())} values are not finite",
            fix="use a checkpoint from before training diverged",
        )
    checkpoint.finite.add(name)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; integers never do."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return all(map(_bounded, _pieces(tensor)))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A floating tensor in flat pieces."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    for start in range(0, flat.numel(), _AT_ONCE):
        piece = flat[start : start + _AT_ONCE]
        # 8-bit floats have no kernels for this.
        yield piece.float() if piece.dtype.itemsize == 1 else piece


def _bounded(piece: torch.Tensor) -> bool:
    low, high = torch.aminmax(piece)
    return bool(torch.isfinite(low) and torch.isfinite(high))
