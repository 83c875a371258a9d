"""What networks say on inputs, batch by batch, and the judge of candidates that listens to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..fusion.average import Aligned
from ..fusion.fused import Fused
from ..fusion.repair import Repair
from ..fusion.selection import Selection
from ..graph.trace.program import Program
from ..matching.alignment import Alignment
from ..matching.models import Model
from ..running.execute import Walk, flat_inputs
from ..running.samples import Samples
from ..runtime import Here, Workers


@dataclass(frozen=True)
class Speaking:
    """A network that is run to its end on a batch of inputs.

    Attributes:
        program: Its forward pass.
        tensors: Its tensors.
        device: Where it runs.
    """

    program: Program
    tensors: Mapping[str, Tensor]
    device: str

    def __call__(self, batch: Samples) -> Tensor:
        """What it returns on the batch."""
        inputs = flat_inputs(self.program, batch, self.device)
        return Walk(self.program, self.tensors, inputs).said(batch.count)

    def on(self, samples: Samples, workers: Workers) -> Tensor:
        """What it returns on all samples, classes last, on the CPU."""
        return torch.cat(list(workers.each(self, samples.batches(self.program.batch))))


@dataclass(frozen=True)
class PairJudge:
    """Says where the average of a source and the anchor alone agrees with the two.

    Attributes:
        source: The model that is aligned.
        anchor: The model that it is aligned to.
        share: The source's, of the two.
        selection: The same for averages.
        repair: What averages get back.
        choice: Classes that the two choose together.
        program: The anchor's.
        samples: As many as there are choices.
    """

    source: Model
    anchor: Model
    share: float
    selection: Selection
    repair: Repair
    choice: Tensor
    program: Program
    samples: Samples

    def __call__(self, alignment: Alignment) -> Tensor:
        """Where the average under an alignment chooses the same."""
        aligned = [Aligned(self.source, alignment, self.share)]
        fused = Fused(self.anchor, self.anchor, aligned, self.selection, self.repair)
        device = self.anchor.device
        speaking = Speaking(self.program, all_tensors(fused, device), device)
        return speaking.on(self.samples, Here()).argmax(-1) == self.choice


def all_tensors(fused: Fused, device: str) -> dict[str, Tensor]:
    """All tensors of an average in memory, float32 on the device."""
    tensors: dict[str, Tensor] = {}
    for name, info in fused.whole.checkpoint.infos.items():
        dtype = torch.float32 if info.dtype.is_floating_point else info.dtype
        tensors[name] = fused.tensor(name, dtype=dtype, device=device)
    return tensors
