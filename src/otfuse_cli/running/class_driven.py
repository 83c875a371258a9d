"""Images driven toward the parents' classes by a few gradient steps, for `--synthetic-kind class`.

Plain leaves drive early units as photographs do, but late ones hardly: few of a class's features
are in them. Here every image is moved, smoothly, to where all parents see one class. Weights are
not touched and no data are read. Source: DeepInversion, Yin et al., CVPR 2020, without its
statistics of BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import UsageError
from ..runtime import full_precision
from .execute import Walk, flat_inputs
from .moved_inputs import Run, move_inputs, variation
from .samples import Samples

STEPS = 12  # of gradient descent for every image (docs/methods/inputs.md)
_RATE = 0.1  # of Adam, in deviations of a channel
_SMOOTHNESS = 1.5  # weight of the total variation
_LIMIT = 2.1  # no pixel farther from its channel's mean, in deviations


def drive_to_classes(
    samples: Samples,
    runs: Sequence[Run],
    *,
    seed: int,
    device: str,
    steps: int = STEPS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Samples:
    """Images moved to where all networks see a class, each to one drawn evenly.

    Args:
        samples: Where to start: one tensor of images at zero mean and unit variance (leaves).
        runs: The parents: programs and their tensors, float32 on `device`.
        seed: Of the classes, and of the shifts and flips that make a class robust.
        device: To compute on.
        steps: Of gradient descent for every image.
        progress: Steps done, of how many.

    Raises:
        UsageError: Another kind of input, or a network whose output is not one score per class.
    """
    leaves, _ = pytree.tree_flatten((samples.args, dict(samples.kwargs)))
    if len(leaves) != 1 or leaves[0].dim() != 4 or not leaves[0].is_floating_point():
        raise _misfit("the network takes something else than one batch of images")
    rng = np.random.default_rng([seed, 7])
    program = runs[0][0]

    def move(batch: Samples, step_done: Callable[[], None]) -> list[Tensor]:
        images = flat_inputs(program, batch, device)[0]
        return [_drive(images, runs, rng, steps, step_done)[: batch.count].cpu()]

    batches = list(samples.batches(program.batch))
    return move_inputs(batches, move, steps=steps, progress=progress)


@full_precision()
def _drive(
    images: Tensor,
    runs: Sequence[Run],
    rng: np.random.Generator,
    steps: int,
    step_done: Callable[[], None],
) -> Tensor:
    """One batch: Adam on the images, the loss that of every parent plus total variation."""
    images = images.clone().requires_grad_()
    wanted: Tensor | None = None
    adam = torch.optim.Adam([images], lr=_RATE)
    for _ in range(steps):
        moved = _jittered(images, rng)
        loss = _SMOOTHNESS * variation(images)
        for program, tensors in runs:
            logits = Walk(program, tensors, [moved]).outputs_with_gradient()[0]
            if logits.dim() != 2 or len(logits) != len(images):
                raise _misfit(f"its output has the shape {list(logits.shape)}")
            if wanted is None:
                classes = rng.integers(logits.shape[1], size=len(images))
                wanted = torch.from_numpy(classes).to(logits.device)
            # The mean over parents, so that their number does not weigh against smoothness: of
            # two parents each counts once.
            loss = loss + 2 / len(runs) * F.cross_entropy(logits, wanted)
        # Sum over images: each has its own problem, whatever the batch is.
        (images.grad,) = torch.autograd.grad(loss * len(images), images)
        adam.step()
        with torch.no_grad():
            images.clamp_(-_LIMIT, _LIMIT)
        step_done()
    return images.detach()


def _jittered(images: Tensor, rng: np.random.Generator) -> Tensor:
    """All images shifted by up to a sixteenth of their size, flipped half of the time."""
    most = max(1, min(images.shape[2:]) // 16)
    shift = tuple(int(s) for s in rng.integers(-most, most + 1, size=2))
    moved = torch.roll(images, shift, (2, 3))
    return moved.flip(3) if rng.random() < 0.5 else moved


def _misfit(why: str) -> UsageError:
    return UsageError(
        "class-driven inputs are for networks that sort images into classes",
        where="--synthetic-kind class",
        why=why,
        fix="use another kind",
    )
