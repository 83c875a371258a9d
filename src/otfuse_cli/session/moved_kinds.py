"""Synthetic inputs that the networks shape: where they are taken, how many, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..graph.analysis.batch_norms import keeps_statistics
from ..requests.requests import FusionOptions
from ..runtime import Runtime
from .parents import Parents

if TYPE_CHECKING:
    from ..running.moved_inputs import Run
    from ..running.samples import Samples

# How many are made of each kind: those that gradients move cost dozens of passes each.
NUMBERS = {"class": 900, "statistics": 1_000, "balanced": 2_000}
_STEPPED = ("class", "statistics")


def made_kind(parents: Parents, options: FusionOptions) -> str:
    """What is made up: the kind that was asked for; `auto` where nothing suits the network.

    BatchNorms remember what inputs should do to them. Where attention reads images, leaves as they
    are do harm; elsewhere few of them look like some classes (docs/methods/inputs.md).

    Raises:
        UsageError: Steps for a kind that takes none.
    """
    kind = options.synthetic_kind
    if kind == "auto":
        kind = _best_kind(parents, options)
    if options.synthetic_steps is not None and kind not in _STEPPED:
        raise UsageError(
            "steps for inputs that are not moved",
            where=f"--synthetic-steps {options.synthetic_steps}",
            why=f"inputs of kind {kind} are drawn once",
            fix=f"leave it out, or add --synthetic-kind {' or '.join(_STEPPED)}",
        )
    return kind


def moved_samples(
    kind: str,
    samples: Samples,
    runs: Sequence[Run],
    options: FusionOptions,
    runtime: Runtime,
) -> Samples | None:
    """The inputs, moved or chosen as `kind` says; None where that can't be.

    Raises:
        UsageError: The same, where this kind was asked for.
    """
    from ..running import class_driven, norm_memory
    from ..running.class_balance import balanced

    by_kind = {
        "class": (class_driven.drive_to_classes, class_driven.STEPS),
        "statistics": (norm_memory.recall_statistics, norm_memory.STEPS),
    }
    try:
        if kind == "balanced":
            number = options.num_samples or NUMBERS[kind]
            return balanced(samples, runs, number, device=runtime.device)
        mover, usual = by_kind[kind]
        return mover(
            samples,
            runs,
            seed=runtime.seed,
            device=runtime.device,
            steps=options.synthetic_steps or usual,
            progress=partial(runtime.progress, "inputs"),
        )
    except UsageError:
        if options.synthetic_kind == kind:
            raise
        return None


def _best_kind(parents: Parents, options: FusionOptions) -> str:
    """The kind of shaped inputs that suits the network; `auto` where none does."""
    from ..running.inputs import slots

    network, graph = parents.shared_architecture.network, parents.shared_architecture.graph
    if network is None:
        return "auto"
    wanted = slots(network)
    if any(map(keeps_statistics, graph.ops)) and not all(slot.integer for slot in wanted):
        return "statistics"
    shapes = [options.input_shape or slot.shape for slot in wanted if not slot.integer]
    image = len(wanted) == 1 and [len(shape) for shape in shapes] == [3]
    heads = any(space.per is not None for space in graph.spaces.values())
    if not image:
        return "auto"
    return "class" if heads and len(wanted[0].shape) == 3 else "balanced"
