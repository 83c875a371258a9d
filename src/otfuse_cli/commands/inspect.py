"""`inspect`: a pre-flight. What a checkpoint holds, whether several fit together, at what cost."""

from __future__ import annotations

from dataclasses import replace

from .. import __version__
from ..align.match import match
from ..align.sweep import Match
from ..checkpoint.draft import write_text
from ..checkpoint.write import check_output
from ..errors import IncompatibleModels, UsageError
from ..report import Report
from ..runtime import Progress, Runtime, Stopwatch, peak_rss_bytes, resolve_device, silent
from ..stored import gate
from .parents import (
    MEDOID,
    anchor_index,
    assemble,
    find_medoid,
    graph_record,
    open_checkpoints,
    tensor_records,
)
from .requests import InspectRequest


def inspect(request: InspectRequest, *, progress: Progress = silent) -> Report:
    """Describe one checkpoint, or compare several with the anchor.

    Raises:
        GateFailed: An OT cost above `max_cost`; carries the report.
        OtfuseError: See docs/exit-codes.md.
    """
    recipe = request.recipe()
    if not request.checkpoints:
        raise UsageError("nothing to inspect", where="CKPT...", fix="name a checkpoint")
    if request.write_spec is not None:
        check_output(request.write_spec, overwrite=request.overwrite)
    costs = request.ot_costs or request.max_cost is not None
    watch = Stopwatch()
    runtime = Runtime(resolve_device(request.device), recipe.seed, progress)
    with open_checkpoints(request.checkpoints, request.key) as checkpoints:
        anchor_at = anchor_index(request.anchor, len(checkpoints))
        if anchor_at == MEDOID:
            anything = assemble(
                checkpoints,
                0,
                request.arch,
                runtime.device,
                strict=request.strict,
                vocab=request.vocab,
            )
            anchor_at = find_medoid(anything, recipe, runtime)
        with watch("read"):
            inputs = tuple(c.record() for c in checkpoints)
        report = Report(
            command="inspect",
            version=__version__,
            inputs=inputs,
            tensors=tensor_records(checkpoints[anchor_at], None),
            recipe={**recipe.to_dict(), "anchor": anchor_at, "arch": request.arch},
        )
        try:
            with watch("graph"):
                parents = assemble(
                    checkpoints,
                    anchor_at,
                    request.arch,
                    runtime.device,
                    free_outputs=request.free_outputs,
                    strict=request.strict,
                    vocab=request.vocab,
                )
        except IncompatibleModels as error:
            # One file of an unknown architecture can still be described; a comparison can't.
            if len(checkpoints) > 1 or request.graph or request.arch != "auto":
                raise
            return replace(report, warnings=(f"no layer graph: {error.what}: {error.why}",))
        report = replace(
            report,
            tensors=tensor_records(parents.whole.checkpoint, parents.whole.graph),
            graph=graph_record(parents.whole.graph),
            warnings=(*parents.warnings, *parents.anchor.graph.warnings),
        )
        if request.write_spec is not None:
            from ..graph.write_spec import write_spec

            text = write_spec(parents.anchor.graph)
            write_text(request.write_spec, text, overwrite=request.overwrite)
        matches: list[Match] = []
        if costs and len(checkpoints) > 1:
            with watch("match"):
                matches = [match(s, parents.anchor, recipe, runtime) for s in parents.sources]
    report = replace(
        report,
        spaces=tuple(s for m in matches for s in m.spaces),
        layers=tuple(layer for m in matches for layer in m.layers),
        timings=dict(watch.seconds),
        peak_rss_bytes=peak_rss_bytes(),
    )
    return gate(report, request.max_cost)
