"""Inputs that BatchNorms remember, for `--synthetic-kind statistics`.

A trained BatchNorm keeps the mean and the variance of every channel of its training data. Made-up
inputs are moved until the channels of all parents have these on them: then units work where they
work on real inputs, in late layers too. Weights are not touched and no data are read. Derived and
measured in docs/methods/inputs.md. Source: DeepInversion, Yin et al., CVPR 2020, its statistics
term alone, for several networks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..graph.analysis.batch_norms import RunningStatistics, running_statistics
from ..runtime import full_precision
from .execute import Walk, flat_inputs
from .moved_inputs import Run, move_inputs, variation
from .samples import Samples

STEPS = 20  # of gradient descent for every input; 60 are no better (docs/methods/inputs.md)
_RATE = 0.1  # of Adam, in deviations of an input
_SMOOTHNESS = 0.05  # weight of the total variation of images
# Inputs whose statistics are taken together. The fewer, the more alike they have to be: each
# group is asked for the whole data's variance.
_GROUP = 200

# Mean and deviation of an input's channels; None where no norm reads the input itself.
Scale = tuple[Tensor, Tensor] | None
# By norm: the sums over inputs of its channels' means and of their mean squares, 2 x C.
Sums = list[Tensor]


def recall_statistics(
    samples: Samples,
    runs: Sequence[Run],
    *,
    seed: int,
    device: str,
    steps: int = STEPS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Samples:
    """Inputs moved to where the BatchNorms of all networks see what they saw in training.

    Adam descends on the floating inputs; integers stay as they are. The networks take turns, one
    a step. Images are mirrored half of the time, and kept smooth. Where a BatchNorm reads an input
    itself, that input starts at the mean and deviation of every channel, and steps are taken in
    these deviations.

    Args:
        samples: Where to start, at about unit variance.
        runs: The parents: programs and their tensors, float32 on `device`.
        seed: Of the mirroring.
        device: To compute on. It holds one pass with its gradients, and the inputs of a group.
        steps: Of gradient descent for every input.
        progress: Steps done, of how many.

    Raises:
        UsageError: A network without running statistics, or without inputs that can be moved.
    """
    norms = [running_statistics(program) for program, _ in runs]
    if not all(norms):
        raise _misfit("the network has no BatchNorm with running statistics")
    tensors = (*samples.args, *samples.kwargs.values())
    if not any(tensor.is_floating_point() for tensor in tensors):
        raise _misfit("its inputs are integers, which can't be moved by small steps")
    rng = np.random.default_rng([seed, 8])
    size, scales = runs[0][0].batch, _scales(runs, norms)

    def move(group: Samples, step_done: Callable[[], None]) -> list[Tensor]:
        batches = [_Batch(batch, runs, norms, scales, device) for batch in group.batches(size)]
        totals = [_Totals(len(memory)) for memory in norms]
        for step in range(steps):
            network = step % len(runs)
            mirrored = bool(rng.random() < 0.5)
            for batch in batches:
                batch.step(network, totals[network], mirrored=mirrored)
            step_done()
        flat = zip(*(batch.inputs() for batch in batches), strict=True)
        return [torch.cat(parts).detach().cpu() for parts in flat]

    groups = _groups(samples, size * max(1, _GROUP // size))
    return move_inputs(groups, move, steps=steps, progress=progress)


def _groups(samples: Samples, size: int) -> list[Samples]:
    """The samples in groups of `size`; the last one takes what is left beside its own."""
    number = max(1, samples.count // size)
    ends = [size * at for at in range(1, number)]
    cuts = zip([0, *ends], [*ends, samples.count], strict=True)
    return [samples.take(slice(start, end)) for start, end in cuts]


def _scales(runs: Sequence[Run], norms: Sequence[Sequence[RunningStatistics]]) -> tuple[Scale, ...]:
    """Of every tensor that the networks take: the mean over networks, in the order of inputs."""
    scales: list[Scale] = []
    for name in runs[0][0].inputs:
        first: list[tuple[Tensor, Tensor]] = []
        for (_, tensors), memory in zip(runs, norms, strict=True):
            for norm in memory:
                if norm.input == name:
                    first.append((tensors[norm.mean], tensors[norm.variance].sqrt()))
        if first:
            mean, deviation = (torch.stack(parts).mean(0) for parts in zip(*first, strict=True))
            scales.append((mean, deviation))
        elif name is not None:
            scales.append(None)
    return tuple(scales)


class _Totals:
    """Sums over a group in one network, of which every pass renews its own share."""

    def __init__(self, norms: int) -> None:
        self.sums: list[Tensor | float] = [0.0] * norms
        self.count = 0

    def add(self, sums: Sums, count: int) -> None:
        """Take a pass of `count` inputs in; out where it is negative."""
        sign = 1 if count > 0 else -1
        self.sums = [total + sign * own for total, own in zip(self.sums, sums, strict=True)]
        self.count += count


class _Batch:
    """The inputs of one pass, and the sums that they last gave in every network."""

    def __init__(
        self,
        batch: Samples,
        runs: Sequence[Run],
        norms: Sequence[Sequence[RunningStatistics]],
        scales: Sequence[Scale],
        device: str,
    ) -> None:
        self.runs, self.norms, self.scales = runs, norms, scales
        self.count, whole = batch.count, runs[0][0].batch
        # A pass that isn't full takes its inputs in turn, so that each counts alike.
        self.places = torch.arange(whole, device=device) % self.count
        flat = flat_inputs(runs[0][0], batch, device)
        self.free = [tensor[: self.count].clone() for tensor in flat]
        self.moved = [t.requires_grad_() for t in self.free if t.is_floating_point()]
        self.images = [tensor for tensor in self.moved if tensor.dim() == 4]
        self.adam = torch.optim.Adam(self.moved, lr=_RATE)
        self.sums: list[Sums | None] = [None] * len(runs)

    def inputs(self) -> list[Tensor]:
        """What the networks take."""
        return list(map(_scaled, self.free, self.scales))

    @full_precision()
    @torch.enable_grad()
    def step(self, network: int, totals: _Totals, *, mirrored: bool) -> None:
        """One step toward what one network remembers, beside the others of the group."""
        before = self.sums[network]
        if before is not None:
            totals.add(before, -self.count)
        sums = self._sums(network, mirrored=mirrored)
        self.sums[network] = rest = [own.detach() for own in sums]
        loss = _SMOOTHNESS * sum(map(variation, self.images), torch.zeros(()))
        for memory, own, others in zip(self.norms[network], sums, totals.sums, strict=True):
            moments = (own + others) / (self.count + totals.count)
            far = _distance(moments, memory, self.runs[network][1])
            loss = loss + far / len(sums)
        totals.add(rest, self.count)
        gradients = torch.autograd.grad(loss, self.moved, allow_unused=True)
        for tensor, gradient in zip(self.moved, gradients, strict=True):
            # Times the number of inputs: so large a gradient as if each had a loss of its own.
            tensor.grad = None if gradient is None else gradient * self.count
        self.adam.step()

    def _sums(self, network: int, *, mirrored: bool) -> Sums:
        """What all BatchNorms of a network read, summed."""
        (program, tensors), norms = self.runs[network], self.norms[network]
        inputs = [self._full(tensor, mirrored=mirrored) for tensor in self.inputs()]
        walk = Walk(program, tensors, inputs, keep=[memory.input for memory in norms])
        walk.outputs_with_gradient()
        sums = []
        for memory in norms:
            value = walk[memory.input]
            axes = [axis for axis in range(value.dim()) if axis != 1]
            moments = torch.stack([value.mean(axes), value.square().mean(axes)])
            sums.append(self.count * moments)
        return sums

    def _full(self, tensor: Tensor, *, mirrored: bool) -> Tensor:
        """One input as a pass takes it."""
        if mirrored and tensor.dim() == 4 and tensor.is_floating_point():
            tensor = tensor.flip(3)
        return tensor if self.count == len(self.places) else tensor[self.places]


def _scaled(tensor: Tensor, scale: Scale) -> Tensor:
    """An input at the mean and deviation of its channels, which are on axis 1."""
    if scale is None:
        return tensor
    mean, deviation = (part.view(1, -1, *[1] * (tensor.dim() - 2)) for part in scale)
    return mean + deviation * tensor


def _distance(
    moments_2C: Tensor, memory: RunningStatistics, tensors: Mapping[str, Tensor]
) -> Tensor:
    """How far channels are from a memory: a mean over them, 0 where they agree.

    Squared shift of the mean in deviations, and squared error of the ratio of variances.
    """
    mean, square = moments_2C
    wanted = tensors[memory.variance] + memory.eps
    ratio = (square - mean.square() + memory.eps) / wanted
    shift = (mean - tensors[memory.mean]).square() / wanted
    far: Tensor = shift + (ratio - 1).square()
    return far.mean()


def _misfit(why: str) -> UsageError:
    return UsageError(
        "no inputs by statistics",
        where="--synthetic-kind statistics",
        why=why,
        fix="use another kind, or auto",
    )
