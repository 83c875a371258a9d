"""The mean of clients' models on the global units: of those that have a unit, and of all alike.

A client that is narrower than the global model says nothing about the units that it lacks, and
doesn't count there. Where every client has every unit this is the weighted mean of federated
averaging (McMahan et al., AISTATS 2017), in the same order of operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..graph.model import LayerGraph
from ..matching.alignment import Alignment
from ..matching.carry import carried

_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Participant:
    """One client's model.

    Attributes:
        tensors: As it was sent.
        weight: Its share; shares sum to 1.
        graph: Its layer graph; None where nothing moves.
        alignment: Its maps onto the global units; None where nothing moves.
    """

    tensors: Mapping[str, torch.Tensor]
    weight: float
    graph: LayerGraph | None = None
    alignment: Alignment | None = None

    def moved(self, onto: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its tensors on the global units; those of `onto` where it has none."""
        if self.alignment is None or self.graph is None:
            return dict(self.tensors)
        return carried(self.tensors, self.graph, self.alignment, onto)

    @property
    def partial(self) -> bool:
        """Whether the global model has units that it lacks."""
        if self.alignment is None:
            return False
        inner = (map for maps in self.alignment.families.values() for map in maps)
        return any(map.kept is not None for map in (*self.alignment.maps.values(), *inner))

    def presence(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """By tensor, where it has a say; None: everywhere."""
        if not self.partial or self.graph is None or self.alignment is None:
            return None
        ones = {n: torch.ones(t.shape) for n, t in self.tensors.items()}
        zeros = {n: torch.zeros(t.shape) for n, t in like.items()}
        moved = carried(ones, self.graph, self.alignment, zeros)
        return {name: (there != 0).float() for name, there in moved.items()}


def present_mean(
    participants: Sequence[Participant], before: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The mean of the participants, one tensor each of `before`.

    Floating tensors are averaged in float32 (float64 where a participant's are) and stored in the
    dtype of `before`. Counters of batches take the maximum, other whole numbers stay.

    Args:
        participants: One or more.
        before: The global model so far, which stays where no participant has a unit.

    Raises:
        IncompatibleModels: A tensor that can't be carried.
    """
    total: dict[str, torch.Tensor] = {}
    share: dict[str, torch.Tensor | float] = {}
    some = any(participant.partial for participant in participants)
    for participant in participants:
        there = participant.presence(before)
        for name, tensor in participant.moved(before).items():
            if not tensor.is_floating_point():
                if name.rpartition(".")[2] == _COUNTER:
                    total[name] = torch.maximum(total.get(name, tensor), tensor)
                continue
            term = _wide(tensor) * participant.weight
            if some:
                weight = participant.weight if there is None else there[name] * participant.weight
                term = term if there is None else term * there[name]
                share[name] = share.get(name, 0.0) + weight
            total[name] = term if name not in total else total[name] + term
    mean: dict[str, torch.Tensor] = {}
    for name, tensor in before.items():
        value = total.get(name, tensor)
        counted = share.get(name, 1.0)
        if isinstance(counted, torch.Tensor):
            # Rounding of the shares is no reason to move what all participants have alike.
            known = counted > 0
            value = torch.where(known, value / torch.where(known, counted, 1.0), _wide(tensor))
        mean[name] = value.to(tensor.dtype)
    return mean


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
