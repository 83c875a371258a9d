"""What zip archives and legacy files of `torch.save` have in common: a value and its storages.

The storages are raw bytes, and stay in the file until a tensor is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import UnreadableInput
from ..contents import Contents
from ..disk import Disk, Extent
from ..names import shown
from .rebuild import TensorRef
from .safe_pickle import broken_torch_file

# torch marks these lazily as conjugated or negated; any other dtype so marked is nonsense.
_SIGNED = (torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass
class TorchFile:
    """The value a file holds, and where its storages lie (key -> position and size in bytes)."""

    disk: Disk
    root: Any
    extents: dict[str, tuple[int, int]] = field(default_factory=dict)

    def block(self, name: str, tensor: TensorRef) -> Extent:
        """Where a tensor lies.

        Raises:
            UnreadableInput: Outside its storage, or the storage is not in the file.
        """
        storage, itemsize = tensor.storage, tensor.dtype.itemsize
        extent = self.extents.get(storage.key)
        first = storage.first * storage.dtype.itemsize + tensor.offset * itemsize
        if extent is None:
            block = Extent(0, tensor.dtype, tensor.shape, tensor.stride)
            if block.numel == 0:
                return block
            raise broken_torch_file(self.disk, f"the data of tensor {shown(name)} is missing")
        start, size = extent
        block = Extent(
            start + first,
            tensor.dtype,
            tensor.shape,
            tensor.stride,
            conjugate=tensor.conjugate and tensor.dtype.is_complex,
            negative=tensor.negative and tensor.dtype in _SIGNED,
        )
        if block.numel and first + block.span * itemsize > size:
            raise broken_torch_file(self.disk, f"tensor {shown(name)} lies outside its storage")
        return block

    def contents(self, form: str) -> Contents:
        """The value as contents of a format of that name."""
        return Contents(self.root, form, self.disk, self.block)


def big_endian(disk: Disk) -> UnreadableInput:
    """The refusal of a file whose numbers have their bytes in the opposite order."""
    return UnreadableInput(
        "a checkpoint of a big-endian machine",
        where=disk.label,
        why="its bytes are in the opposite order",
        fix="load it with torch there and save it as .safetensors",
    )
