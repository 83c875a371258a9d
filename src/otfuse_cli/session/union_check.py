"""Whether models side by side say what their weighted mean says, asked of the network itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import IncompatibleModels
from ..matching.models import Model
from ..running.architecture import module_state, real_network
from ..running.factory import Network
from ..running.function_change import Change, outputs_of, relative_difference
from ..running.precision import FLOAT32, in_double
from .function_check import Reader, first_line, size_remark, too_large
from .parents import Parents

Answer = tuple[Change | None, tuple[str, ...]]


def union_change(
    parents: Parents,
    models: Sequence[Model],
    shares: Sequence[float],
    tensors: Mapping[str, Tensor],
) -> Answer:
    """By how much models side by side differ from the mean of their outputs on example inputs.

    Args:
        parents: With the network that they are put into as the anchor.
        models: Those.
        shares: Their weights, which sum to 1.
        tensors: The union's floating tensors.

    Returns:
        None, and why, where that can't be run.
    """
    architecture = parents.architecture(parents.named_anchor)
    if architecture.network is None:
        return None, ()
    if too_large(parents.whole):
        return None, (size_remark(parents.whole),)
    network = real_network(architecture)
    assert network is not None
    run = _Run(parents, network)
    whole = parents.whole

    def union(name: str) -> Tensor:
        return tensors[name] if name in tensors else whole.stored(name)

    def change(dtype: torch.dtype) -> Change:
        said = run.outputs(whole.index, union, dtype)
        means = [torch.zeros_like(y, dtype=torch.float64) for y in said]
        for model, share in zip(models, shares, strict=True):
            own = run.outputs(model.index, model.stored, dtype)
            means = [mean + share * y.double() for mean, y in zip(means, own, strict=True)]
        pairs = zip(said, means, strict=True)
        return Change(max(relative_difference(y, mean) for y, mean in pairs), FLOAT32)

    try:
        return in_double(change, failures=(RuntimeError, ValueError)), ()
    except (RuntimeError, ValueError, IncompatibleModels) as error:
        return None, (f"the function was not checked: {first_line(error)}",)


@dataclass(frozen=True)
class _Run:
    """Models, all of them called as the network of the anchor is."""

    parents: Parents
    network: Network

    def outputs(self, index: int, read: Reader, dtype: torch.dtype) -> list[Tensor]:
        from ..running.runnable import network_at

        parents = self.parents
        architecture = parents.architecture(index)
        names = parents.whole.checkpoint.infos
        network = network_at(architecture, {name: read(name) for name in names})
        state = module_state(network, architecture.names, read)
        return outputs_of(
            network.module, self.network.args, self.network.kwargs, state, dtype=dtype
        )
