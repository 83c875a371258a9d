"""Which positions of a value reach what the network returns: a class token, or all of them.

Found by trying: position p of sample p is disturbed, and the samples whose outputs change tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..graph.analysis.fit_targets import Fit, fits
from ..graph.trace.program import Program
from ..running.execute import Walk, flat_inputs
from ..running.samples import Samples

# Positions that are read out count this much more, those that nothing reads so much less: of a
# ViT's many positions only the class token is read out (docs/methods/joint.md).
_READ, _UNREAD = 10.0, 0.02
# A change of the outputs that counts as one, relative to them: some ten times float32's rounding.
_SEEN = 1e-6


class Positions:
    """What positions of the layers of one network are good for."""

    def __init__(
        self, program: Program, tensors: Mapping[str, Tensor], samples: Samples, *, device: str
    ) -> None:
        """Take one batch of a network."""
        batch = next(iter(samples.batches(program.batch)))
        self.program, self.tensors = program, tensors
        self.inputs = flat_inputs(program, batch, device)
        self.before = Walk(program, tensors, self.inputs).outputs()[0]
        self._found: dict[str, Tensor] = {}

    def reached(self, node: str) -> Tensor:
        """For every position of a value with features last: whether an output depends on it."""
        if node not in self._found:
            self._found[node] = self._try(node)
        return self._found[node]

    def _try(self, node: str) -> Tensor:
        batch, seen, places = self.program.batch, list[Tensor](), 1
        while len(seen) * batch < places:
            walk = Walk(self.program, self.tensors, self.inputs)
            value = walk.to(node)
            places = value.numel() // (batch * value.shape[-1])
            rows = value.reshape(batch, places, -1).clone()
            first = len(seen) * batch
            at = torch.arange(first, min(first + batch, places))
            rows[at - first, at] += rows.std() * _noise(rows.shape[-1]).to(rows)
            walk.replace(node, rows.reshape(value.shape))
            change = (walk.outputs()[0] - self.before).flatten(1).abs().amax(1)
            seen.append((change[at - first] > _SEEN * self.before.abs().max()).cpu())
        return torch.cat(seen)


def _noise(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def counts(reached_P: Tensor, read_P: Tensor) -> Tensor | None:
    """How often each position counts in a fit; None for all alike."""
    if len(reached_P) != len(read_P) or bool(read_P.all()):
        return None
    many = torch.ones(len(read_P), dtype=torch.float64)
    many[read_P] = _READ
    many[~reached_P] = _UNREAD
    return many


def reconstruction_counts(
    program: Program, tensors: Mapping[str, Tensor], samples: Samples, *, device: str
) -> Mapping[str, Tensor | None]:
    """For every layer of a network, by its value, how often its positions count in a fit to it.

    Nothing where no linear layer writes to a stream.
    """
    plan, _ = fits(program)
    added = [fit for fit in plan if fit.minus is not None and fit.layer.window is None]
    if not added:
        return {}
    positions = Positions(program, tensors, samples, device=device)
    return read_out(positions, plan, added[-1].layer.weight)


def read_out(positions: Positions, plan: Sequence[Fit], last: str) -> dict[str, Tensor | None]:
    """For every layer, by its value, how often its positions count.

    Args:
        positions: Of one parent.
        plan: Its fits, in execution order.
        last: The weight that writes to the stream last: its positions that reach an output are
            those that are read out.
    """
    counts_of: dict[str, Tensor | None] = {}
    nodes = {fit.layer.weight: fit.layer.node for fit in plan}
    read_P = positions.reached(nodes[last])
    if bool(read_P.all()) or not bool(read_P.any()):  # the layer gives what changes nothing
        return dict.fromkeys(f.layer.node for f in plan)
    everything = False
    for fit in reversed(plan):
        if fit.layer.window is not None:
            counts_of[fit.layer.node] = None
            continue
        reached_P = torch.ones_like(read_P) if everything else positions.reached(fit.layer.node)
        counts_of[fit.layer.node] = counts(reached_P, read_P)
        # What is before a value on the stream that is read everywhere is read everywhere too.
        everything |= fit.minus is not None and bool(reached_P.all())
    return counts_of
