"""`inspect`: a pre-flight. What a checkpoint holds, whether several fit together, at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import __version__
from ..checkpoint.open import Checkpoint
from ..errors import IncompatibleModels, UsageError
from ..fusion.selection import Selection
from ..matching.estimate import estimate_merge
from ..matching.match import match
from ..matching.matchers.sweep import Match
from ..matching.pairs import all_pairs
from ..plot.charts import HeatMap
from ..report.records import Pair, Report
from ..requests.recipe import Recipe
from ..requests.requests import InspectRequest, normalised
from ..runtime import Progress, Runtime, Stopwatch, peak_rss_bytes, resolve_device, silent
from ..session.architectures import arch_of_each, arch_record
from ..session.bench import watch_units
from ..session.compare import compare, one_start, refusal
from ..session.cost_outputs import check_outputs, finish
from ..session.find_architecture import find_architectures
from ..session.function_check import declared
from ..session.graph_records import graph_record, tensor_records
from ..session.naming import named_alike
from ..session.open_inputs import open_bench
from ..session.parents import MEDOID, Parents, anchor_index, find_medoid, fit, open_checkpoints
from ..session.tied_tensors import tie


def run_inspect(request: InspectRequest, *, progress: Progress = silent) -> Report:
    """Describe one checkpoint, or compare several with the anchor.

    Raises:
        GateFailed: A cost above `max_cost`, or more moved than `max_moved`; carries the report.
        IncompatibleModels: Models that can't be fused; carries a report with every difference.
        OtfuseError: See docs/exit-codes.md.
    """
    recipe = request.recipe()
    if not request.checkpoints:
        raise UsageError("nothing to inspect", where="CKPT...", fix="name a checkpoint")
    check_outputs(request)
    watch = Stopwatch()
    runtime = Runtime(resolve_device(request.device), recipe.seed, progress)
    maps: tuple[HeatMap, ...] = ()
    with open_checkpoints(request.checkpoints, request.key) as checkpoints:
        with watch("read"):
            report = Report(
                command="inspect",
                version=__version__,
                inputs=tuple(c.record() for c in checkpoints),
                recipe={**recipe.to_dict(), "arch": arch_record(request.arch, len(checkpoints))},
            )
        try:
            with watch("graph"):
                parents, report = _parents(request, checkpoints, runtime, recipe, report)
        except IncompatibleModels as error:
            # One file of an unknown architecture can still be described; a comparison can't.
            if len(checkpoints) > 1 or request.graph or request.arch != "auto":
                raise
            warning = f"no layer graph: {error.what}: {error.why}"
            report = report.replace(
                tensors=tensor_records(checkpoints[0], None), warnings=(warning,)
            )
            return finish(report, request)
        spec = None
        if request.write_spec is not None:
            from ..graph.spec.write_spec import write_spec

            spec = write_spec(parents.anchor.graph)
        if parents.sources:
            if not parents.other_depth:
                # What a merge would take: its own matcher, not the quick one of a pre-flight.
                planned = replace(recipe, matcher="auto")
                report = report.replace(
                    estimate=estimate_merge(parents.sources, parents.anchor, planned)
                )
            if request.costs:
                with watch("match"):
                    report, maps = _costs(parents, recipe, runtime, report, request)
            if request.depth:
                with watch("inputs"):
                    report = _depths(parents, recipe, runtime, report, request)
    report = report.replace(timings=dict(watch.seconds), peak_rss_bytes=peak_rss_bytes())
    return finish(report, request, maps, spec)


def _parents(
    request: InspectRequest,
    checkpoints: Sequence[Checkpoint],
    runtime: Runtime,
    recipe: Recipe,
    report: Report,
) -> tuple[Parents, Report]:
    """The models on one graph, and the report with what the anchor is and how the others differ."""
    at = anchor_index(request.anchor, len(checkpoints))
    chosen = 0 if at == MEDOID else at
    files = checkpoints
    while True:
        one = tie(
            named_alike(files, chosen),
            chosen,
            arch_of_each(request.arch, len(files))[chosen],
        )
        checkpoints = one.checkpoints
        of_anchor, separate = find_architectures(
            checkpoints,
            chosen,
            request.arch,
            free_outputs=request.free_outputs,
            any_depth=request.depth,
        )
        report = report.replace(
            recipe={**report.recipe, "anchor": chosen},
            tensors=tensor_records(checkpoints[chosen], of_anchor.graph),
            graph=graph_record(of_anchor.graph),
            checks=declared(of_anchor.graph),
            differences=() if request.depth else compare(of_anchor.graph, checkpoints, chosen),
            warnings=(*one.warnings, *of_anchor.graph.warnings),
        )
        try:
            parents = fit(
                of_anchor,
                checkpoints,
                chosen,
                runtime.device,
                strict=request.strict,
                vocab=request.vocab,
                separate=separate,
                any_depth=request.depth,
            )
        except IncompatibleModels as error:
            raise refusal(error, checkpoints, chosen, report) from error
        report = report.replace(warnings=(*parents.warnings, *report.warnings))
        medoid = find_medoid(parents, recipe, runtime) if at == MEDOID else chosen
        if medoid == chosen:
            return parents, report
        at = chosen = medoid


def _depths(
    parents: Parents, recipe: Recipe, runtime: Runtime, report: Report, request: InspectRequest
) -> Report:
    """The report with how alike layers are.

    Raises:
        UsageError: No inputs to run the networks on.
    """
    from ..session.other_depth import compare_depths

    selection = Selection(normalised(None, len(parents.models)))
    bench = open_bench(parents, request, recipe, selection, runtime)
    if bench is None:
        raise UsageError(
            "--depth needs inputs",
            where="--depth",
            why="layers are compared by what they do",
            fix="add --samples FILE, or --synthetic for inputs that are made up",
        )
    warnings = (*report.warnings, *bench.warnings)
    return report.replace(depth=compare_depths(bench), warnings=tuple(dict.fromkeys(warnings)))


def _costs(
    parents: Parents, recipe: Recipe, runtime: Runtime, report: Report, request: InspectRequest
) -> tuple[Report, tuple[HeatMap, ...]]:
    """The report with all costs, and the transport maps where somebody wants to see them."""
    if parents.other_depth:
        raise UsageError(
            "no OT costs between networks of different depth",
            where="--ot-costs, --max-cost, --max-moved, --align acts",
            why="units are matched layer by layer, and these have other layers",
            fix="leave them out; --depth shows how alike the layers are",
        )
    count = len(parents.models)
    bench = open_bench(parents, request, recipe, Selection(normalised(None, count)), runtime)
    if bench is not None:
        parents = watch_units(bench, parents, recipe)
        report = report.replace(warnings=(*report.warnings, *bench.warnings))
    anchor = parents.anchor
    matches = [match(s, anchor, recipe, runtime, random=True) for s in parents.sources]
    spaces = tuple(s for m in matches for s in m.spaces)
    pairs: tuple[Pair, ...] = ()
    if len(parents.models) > 2 and recipe.align != "none":
        solved: dict[tuple[int, int], Match] = {
            (source.index, anchor.index): solved_map
            for source, solved_map in zip(parents.sources, matches, strict=True)
        }
        pairs = all_pairs(parents.models, solved, recipe, runtime)
    maps: tuple[HeatMap, ...] = ()
    if request.plot is not None:
        from ..session.map_pictures import heat_maps

        maps = heat_maps(matches)
    remarks = (*(w for m in matches for w in m.warnings), *one_start(spaces))
    report = report.replace(
        spaces=spaces,
        layers=tuple(layer for m in matches for layer in m.layers),
        candidates=tuple(c for m in matches for c in m.candidates),
        pairs=pairs,
        warnings=(*report.warnings, *remarks),
    )
    return report, maps
