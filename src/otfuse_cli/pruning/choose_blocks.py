"""Which residual blocks go: one after another, each time the one that is missed least.

What a network is without a block, and without those that went before, is told after its layers
were fitted to make up for it: what is missed before says little of what is missed after
(docs/methods/depth.md, Fewer blocks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..fusion.lockstep import Parent
from ..fusion.refit import Stress, refit
from ..graph.analysis.residual_blocks import ResidualBlock
from ..graph.analysis.without_blocks import before_gaps, without_blocks
from ..graph.trace.program import Program
from ..running.execute import Walk, flat_inputs
from ..running.samples import Samples
from ..runtime import Runtime, silent

# Inputs that layers are fitted on to tell blocks apart, at most half of them: with 100 fits of a
# ViT, which reads one position of each, do harm. What is missed is told on others, as many.
_FITTED, _TOLD = 400, 400
# Share of the rows that a fit has elsewhere: what is missed is the same within a hundredth.
_ROWS = 0.1


@dataclass(frozen=True)
class Removal:
    """A block that goes, and how far the outputs then are from those of the whole network.

    `miss` is told without this block and those that went before it, after fits on some of the
    inputs, on others: the relative entropy of the classes that are said, in nats. Of outputs with
    one entry it is the mean square of the difference, relative to their variance.
    """

    block: ResidualBlock
    miss: float


@dataclass(frozen=True)
class Trials:
    """What networks without some of their blocks are worth.

    Attributes:
        whole: The whole network.
        samples: Inputs.
        weigh: What counts more in the fit of a layer, and its ridge.
        ridge: Of the fits of BatchNorms.
        runtime: Device, seed, progress.
        most_bytes: Memory for values of waiting passes.
    """

    whole: Parent
    samples: Samples
    weigh: Stress
    ridge: float
    runtime: Runtime
    most_bytes: int

    def choose(self, blocks: Sequence[ResidualBlock], count: int) -> tuple[Removal, ...]:
        """Choose `count` of the blocks, greedily; in the order in which they go.

        Raises:
            SolveFailed: A singular fit.
        """
        gone, left, done = list[Removal](), list(blocks), 0
        trials = sum(len(blocks) - at for at in range(count))
        for _ in range(count):
            misses = list[float]()
            for block in left:
                self.runtime.progress("blocks", done, trials)
                misses.append(self._miss([*(r.block for r in gone), block]))
                done += 1
            least = min(range(len(left)), key=lambda at: (misses[at], at))
            gone.append(Removal(left.pop(least), misses[least]))
        self.runtime.progress("blocks", trials, trials)
        return tuple(gone)

    def _miss(self, gone: Sequence[ResidualBlock]) -> float:
        """What the outputs miss without some blocks, after fits on a few inputs."""
        program, count = self.whole.program, self.samples.count
        small = without_blocks(program, gone)
        fitted = dict(self.whole.tensors)
        first = min(_FITTED, count // 2)
        refit(
            [self.whole],
            small,
            fitted,
            self.samples.take(slice(0, first)),
            ridge=self.ridge,
            left=before_gaps(program, small, gone),
            runtime=replace(self.runtime, progress=silent),
            most_bytes=self.most_bytes,
            stress=self.weigh,
            rows=_ROWS,
        )
        others = self.samples.take(slice(first, first + _TOLD))
        return self._difference(small, fitted, others)

    def _difference(self, small: Program, tensors: Mapping[str, Tensor], samples: Samples) -> float:
        """How far the outputs are from those of the whole network."""
        entropy = missed = squares = 0.0
        total, count = torch.zeros(()), 0
        for batch in samples.batches(small.batch):
            inputs = flat_inputs(small, batch, self.runtime.device)
            wanted = _output(self.whole.program, self.whole.tensors, inputs, batch.count)
            output = _output(small, tensors, inputs, batch.count)
            count += wanted[..., 0].numel()
            if wanted.shape[-1] > 1:
                entropy += _relative_entropy(wanted, output)
                continue
            missed += float((output - wanted).square().sum(dtype=torch.float64))
            squares += float(wanted.square().sum(dtype=torch.float64))
            total = total.to(wanted.device) + wanted.sum(dtype=torch.float64)
        if not missed:
            return entropy / count
        variance = squares - float(total.square()) / count
        return missed / variance if variance > 0 else missed


def _relative_entropy(wanted: Tensor, output: Tensor) -> float:
    """Of what is said from what should be, in nats, summed over samples and positions."""
    log_p, log_q = wanted.log_softmax(-1), output.log_softmax(-1)
    apart = float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
    return max(0.0, apart)  # rounding may leave less than nothing


def _output(
    program: Program, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor], count: int
) -> Tensor:
    """The first output on the samples of a batch, classes last."""
    walk = Walk(program, tensors, inputs)
    value = walk.cut(walk.outputs()[0], count)
    return value if value.dim() > 1 else value[:, None]
