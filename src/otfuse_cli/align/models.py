"""A model as alignment sees it: a checkpoint and its layer graph, read tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..checkpoint.open import Checkpoint, require_finite
from ..graph.model import LayerGraph
from .activations import Observed


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
        tensor = self.stored(name)
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            tensor = tensor.to(torch.float32)
        return tensor.to(self.device)
