"""A model as alignment sees it: a checkpoint and its layer graph, read tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..checkpoint.finite import is_finite, require_finite
from ..checkpoint.open import Checkpoint
from ..graph.model import LayerGraph

if TYPE_CHECKING:
    from .activations import Observed

# Tensors above this are checked by blocks of rows.
_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class Model:
    """One parent.

    Attributes:
        index: Its place on the command line, counted from 0.
        checkpoint: Its file.
        graph: Its layer graph.
        device: Where it is computed with.
        observed: What its units do on the inputs, by space; empty without inputs.
    """

    index: int
    checkpoint: Checkpoint
    graph: LayerGraph
    device: str = "cpu"
    observed: Observed = field(default_factory=dict, compare=False)

    def stored(self, name: str) -> torch.Tensor:
        """The tensor in the dtype of the file, on the CPU, checked to be finite.

        Raises:
            UnreadableInput: NaN or infinity in it.
        """
        tensor = self.checkpoint.read(name)
        require_finite(self.checkpoint, name, tensor)
        return tensor

    def read(self, name: str) -> torch.Tensor:
        """The tensor for computing: float64 stays, other floating dtypes become float32."""
        return self.widened(self.stored(name))

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stored tensor for computing; see `read`."""
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            tensor = tensor.to(torch.float32)
        return tensor.to(self.device)

    def require_finite(self, name: str) -> None:
        """Read the tensor once, by blocks, and check it.

        Raises:
            UnreadableInput: NaN or infinity in it.
        """
        checkpoint = self.checkpoint
        info = checkpoint.infos[name]
        rows = info.shape[0] if info.shape else 0
        step = max(1, _READ_BYTES * rows // max(1, info.nbytes))
        if name in checkpoint.finite or step >= rows:
            self.stored(name)
            return
        for first in range(0, rows, step):
            part = checkpoint.read_rows(name, first, min(first + step, rows))
            if not is_finite(part):
                self.stored(name)  # says how many
        checkpoint.finite.add(name)

    def stored_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """`stored(name)[first:last]`; of a tensor that was checked before, only those are read."""
        if name not in self.checkpoint.finite:
            return self.stored(name)[first:last]
        return self.checkpoint.read_rows(name, first, last)
