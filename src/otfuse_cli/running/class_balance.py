"""Of inputs that were made up, those that say most about the classes of the parents.

Leaves look like few of the classes: of 8,000 a CIFAR-10 network calls 1,500 one class and 20
another. So more are drawn than are wanted, and of every class the same number is kept: those that
all parents together find likeliest. No weight is touched, no gradient taken
(docs/methods/inputs.md).

Legend: n inputs, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .execute import Walk, flat_inputs
from .moved_inputs import Run
from .samples import Samples

# So many are drawn for one that is kept, unless they take more memory than this.
_DRAWN, _BYTES = 4, 1 << 30


def drawn_for(number: int, shape: Sequence[int]) -> int:
    """How many inputs of a shape to draw, float32, where so many are to be kept."""
    return max(number, min(_DRAWN * number, _BYTES // (4 * prod(shape))))


def balanced(samples: Samples, runs: Sequence[Run], number: int, *, device: str) -> Samples | None:
    """The inputs of which every class has as many; None where networks give no score per class.

    Args:
        samples: More than are wanted.
        runs: The parents: programs and their tensors, float32 on `device`.
        number: How many are kept.
        device: To compute on.
    """
    likely_nC: Tensor | None = None
    for program, tensors in runs:
        parts: list[Tensor] = []
        for batch in samples.batches(program.batch):
            scores = Walk(program, tensors, flat_inputs(program, batch, device)).outputs()[0]
            if scores.dim() != 2 or len(scores) != program.batch or scores.shape[1] < 2:
                return None
            parts.append(scores[: batch.count].log_softmax(-1).cpu())
        ours_nC = torch.cat(parts)
        likely_nC = ours_nC if likely_nC is None else likely_nC + ours_nC
    assert likely_nC is not None
    return samples.take(_of_each(likely_nC, number))


def _of_each(likely_nC: Tensor, number: int) -> Tensor:
    """Places of the likeliest inputs of every class in turn, each taken once; in order."""
    left_nC, classes = likely_nC.clone(), likely_nC.shape[1]
    taken: list[Tensor] = []
    for at in range(classes):
        # Equal shares but for rounding, which add up to `number`.
        share = number * (at + 1) // classes - number * at // classes
        best = left_nC[:, at].topk(share).indices
        left_nC[best] = -torch.inf
        taken.append(best)
    return torch.cat(taken).sort().values
