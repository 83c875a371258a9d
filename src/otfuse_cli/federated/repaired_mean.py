"""The mean of clients that were matched, with what averaging unlike units takes given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..checkpoint.open import open_checkpoint
from ..fusion.average import Aligned
from ..fusion.fused import Fused
from ..fusion.repair import plan_repair
from ..fusion.selection import Selection
from ..matching.models import Model


def repaired_mean(
    clients: Sequence[Aligned], mean: Mapping[str, torch.Tensor], before: Model
) -> dict[str, torch.Tensor]:
    """The mean with rows, and variances of BatchNorm, as `--repair auto` makes them.

    Args:
        clients: All that count, by index from 0; weights sum to 1.
        mean: Of these, on the global units.
        before: The global model so far, whose index follows theirs.

    Raises:
        SolveFailed: A value is larger than its dtype can hold.
    """
    checkpoint = open_checkpoint(mean, label="the clients' mean")
    # It has no weight of its own: units that a client lacks are the others' mean.
    anchor = Model(before.index, checkpoint, before.graph, before.device)
    selection = Selection((*(client.weight for client in clients), 0.0))
    fused = Fused(anchor, anchor, clients, selection, plan_repair(before.graph))
    infos = checkpoint.infos
    return {name: fused.tensor(name, dtype=infos[name].dtype) for name in mean}
