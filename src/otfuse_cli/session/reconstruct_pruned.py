"""`prune --criterion reconstruct`: units chosen on inputs, layers fitted to what they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..errors import IncompatibleModels
from ..fusion.joint import joined_value
from ..fusion.selection import Selection
from ..matching.models import Model
from ..pruning.compact import Kept
from ..pruning.masks import Masked, compacted
from ..pruning.reduce_widths import reduce
from ..report.records import RefitRecord, StepRecord
from ..requests.requests import PruneRequest
from ..running.architecture import Architecture
from ..running.chance import clearly_more
from ..runtime import Runtime, Stopwatch
from .bench import Bench
from .open_inputs import open_bench
from .parents import Parents


@dataclass(frozen=True)
class Reconstructed:
    """The pruned network.

    Attributes:
        tensors: All of them, float32 by name.
        steps: How often it says what the whole network says, before and after the fits.
        refits: Layers that were fitted.
        remarks: What was left alone.
        moved: The kind of the inputs, where gradients moved them.
    """

    tensors: Mapping[str, Tensor]
    steps: tuple[StepRecord, ...]
    refits: tuple[RefitRecord, ...]
    remarks: tuple[str, ...]
    moved: str | None


def reconstruct_pruned(
    request: PruneRequest,
    architecture: Architecture,
    model: Model,
    sizes: Kept,
    runtime: Runtime,
    watch: Stopwatch,
) -> Reconstructed:
    """Reduce a network to smaller widths and fit it to what it computed.

    Args:
        request: With inputs.
        architecture: Its architecture, with a network to run.
        model: The network.
        sizes: By pruned space, as many units as are to stay; which ones is decided here.
        runtime: Device, seed, progress.
        watch: Takes the time of `inputs` and `refit`.

    Raises:
        OtfuseError: Inputs that can't be read or don't fit, no network to run, units that can't be
            chosen among, a singular fit.
    """
    with watch("inputs"):
        bench, small = _open(request, architecture, model, sizes, runtime)
    with watch("refit"):
        return _reduced(bench, model, small, request)


def _open(
    request: PruneRequest, architecture: Architecture, model: Model, sizes: Kept, runtime: Runtime
) -> tuple[Bench, Model]:
    """The inputs, with the network running on them at both widths; the smaller one as a model."""
    options = request.inputs()
    # Any units will do to see how the network runs at these widths.
    cut = compacted(Masked(model.checkpoint, {}, model.checkpoint), model, sizes)
    small = Model(1, cut.checkpoint, cut.graph, runtime.device)
    parents = Parents((model, small), 1, architecture, small)
    try:
        bench = open_bench(
            parents,
            options,
            options.recipe(),
            Selection((1.0, 0.0)),
            runtime,
            instead="use another --criterion",
        )
    except IncompatibleModels as error:
        raise _not_at_these_widths(error) from error
    assert bench is not None
    return bench, small


def _reduced(bench: Bench, model: Model, small: Model, request: PruneRequest) -> Reconstructed:
    """The units that are chosen, and the fits after them, if those do no harm."""
    ridge = request.inputs().ridge
    reduced = reduce(
        model,
        small,
        bench.run_parent(model, 1.0),
        bench.samples,
        ridge=ridge,
        seed=request.seed,
        device=bench.runtime.device,
    )
    chosen = bench.verdict(reduced.tensors)
    fitted = dict(reduced.tensors)
    refits, remarks = bench.refit(
        [reduced.whole], fitted, ridge, aim=joined_value, stress=reduced.stress
    )
    refitted = bench.verdict(fitted)
    worse = clearly_more(chosen.hits, refitted.hits)
    if worse:
        fitted, refits = reduced.tensors, ()
        remarks = (*remarks, "fitting lowers agreement: the units that stay were kept as chosen")
    return Reconstructed(
        fitted,
        (chosen.step("chosen"), refitted.step("reconstruct", kept=not worse)),
        refits,
        (*bench.warnings, *reduced.remarks, *remarks),
        bench.moved,
    )


def _not_at_these_widths(error: IncompatibleModels) -> IncompatibleModels:
    return IncompatibleModels(
        f"the network can't be run at its new widths: {error.what}",
        where=error.where,
        why=error.why,
        fix="leave whole (--layer NAME=0, or --only) what its code fixes, or use another "
        "--criterion",
    )
