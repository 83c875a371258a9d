"""Promise 2, checked on the real maps: an aligned source computes what it computed before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..align.apply import transport
from ..errors import SolveFailed
from ..fuse.average import Aligned
from ..network.acid import FLOAT32, function_change
from ..network.architecture import module_state, real_network
from ..network.factory import Network
from ..report import Checks
from .parents import Parents

# Two copies of the source are held for the check; larger models are not worth that much memory.
_LARGEST_BYTES = 2 << 30


def check_function(parents: Parents, aligned: Sequence[Aligned]) -> tuple[Checks, tuple[str, ...]]:
    """Run every hard-mapped source before and after alignment, and compare outputs.

    Returns:
        The verdict (null where nothing could be run), and remarks on what was not checked.

    Raises:
        SolveFailed: The outputs differ by more than rounding.
    """
    if parents.known.network is None or not any(a.alignment.hard for a in aligned):
        return Checks(), ()
    if not parents.complete:
        return Checks(), ("the function was not checked: not every model has all that is run",)
    size = sum(info.nbytes for info in parents.anchor.checkpoint.infos.values())
    if size > _LARGEST_BYTES:
        held = f"{size >> 30} GiB"
        return Checks(), (f"the function was not checked: each model holds {held}",)
    anchor = parents.architecture(parents.anchor_index)
    network = real_network(anchor)
    assert network is not None
    worst = 0.0
    for source in aligned:
        if not source.alignment.hard:
            continue
        model, known = source.model, parents.architecture(source.model.index)
        own = network if known is anchor else real_network(known)
        assert own is not None
        before = module_state(own, known.names, model.stored)
        after = module_state(network, anchor.names, partial(_aligned, source))
        change = _change(own, source, before, after, network)
        worst = max(worst, change)
        if change > FLOAT32:
            why = f"{model.graph.source} calls units interchangeable that are not"
            if own is not network:
                why += f", or {known.graph.source} is another network"
            raise SolveFailed(
                "an aligned source computes something else",
                where=f"{model.checkpoint.label}: outputs differ by {change:.2g} (relative)",
                why=why,
                fix="find the claim with otfuse check, or correct the spec",
            )
    return Checks(True, worst), ()


def _aligned(source: Aligned, name: str) -> torch.Tensor:
    model = source.model
    return transport(model.stored(name), name, model.graph, source.alignment)


def _indices(source: Aligned) -> dict[str, torch.Tensor]:
    """The hard maps as index vectors; of a family, one row for each anchor unit of its index."""
    maps, families = source.alignment.maps, source.alignment.families
    found = {s: m.plan.index_M for s, m in maps.items() if m.plan.index_M is not None}
    for space, inner in families.items():
        rows = [m.plan.index_M for m in inner if m.plan.index_M is not None]
        found[space] = torch.stack(rows)
    return found


def _change(
    network: Network,
    source: Aligned,
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
    other: Network,
) -> float:
    """In float64, where the network can; in float32 where its kernels can't."""
    for dtype in (torch.float64, torch.float32):
        try:
            return function_change(
                network.module,
                network.args,
                network.kwargs,
                before,
                after,
                dtype=dtype,
                graph=source.model.graph,
                maps=_indices(source),
                other=other.module,
            )
        except RuntimeError:
            if dtype is torch.float32:
                raise
    raise AssertionError
