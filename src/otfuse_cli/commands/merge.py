"""`merge`: align every source to the anchor, average, write (DESIGN sections 3 and 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..align.match import match
from ..align.models import Model
from ..align.passes import realign
from ..align.recipe import Recipe
from ..align.sweep import Match
from ..checkpoint.draft import write_text
from ..checkpoint.extras import Extras
from ..checkpoint.names import TensorInfo
from ..checkpoint.open import Checkpoint, open_checkpoint
from ..checkpoint.suffix import DEFAULT_SHARD, parse_size
from ..checkpoint.write import open_writer
from ..errors import UsageError
from ..fuse.average import Aligned
from ..fuse.fused import Fused
from ..fuse.repair import Repair, plan_repair
from ..fuse.selection import Selection
from ..report import FileRecord, Report
from ..runtime import Progress, Runtime, Stopwatch, peak_rss_bytes, resolve_device, silent
from ..stored import report_beside
from .bench import Improved, improve, open_bench, watch_units
from .function import check_function
from .outputs import refuse_outputs, require_room
from .parents import (
    MEDOID,
    Parents,
    anchor_index,
    assemble,
    find_medoid,
    graph_record,
    open_checkpoints,
)
from .requests import ImproveOptions, MergeRequest, OutputOptions, Source
from .weights import Rules, weight_rules

Put = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class Plan:
    """What a fusion will do, decided before anything is solved."""

    command: str
    checkpoints: tuple[Source, ...]
    anchor_index: int
    weights: tuple[float, ...]
    output: Path | None
    report: Path | None
    options: ImproveOptions
    target: OutputOptions
    rules: Rules = ()


def merge(request: MergeRequest, *, progress: Progress = silent) -> Report:
    """Fuse the checkpoints of `request` into its output file.

    Raises:
        OtfuseError: See docs/exit-codes.md; nothing is left behind.
    """
    if request.output is None:
        raise UsageError("no output", where="-o OUT", fix="say where the fused model goes")
    return run(plan_merge(request), progress)


def merge_tensors(
    request: MergeRequest, *, progress: Progress = silent
) -> tuple[dict[str, torch.Tensor], Report]:
    """Fuse in memory, and to the output file as well where the request names one."""
    plan = plan_merge(request)
    tensors: dict[str, torch.Tensor] = {}
    report = run(plan, progress, also=tensors.__setitem__)
    return tensors, report


def plan_merge(request: MergeRequest) -> Plan:
    """Check counts, weights and anchor before any file is opened."""
    count = len(request.checkpoints)
    if count < 2:
        raise UsageError(
            f"{count} checkpoint{'s' * (count != 1)} to merge",
            where="CKPT CKPT...",
            fix="name two or more",
        )
    output = None if request.output is None else Path(request.output)
    weights, rules = weight_rules(request.weights, count)
    return Plan(
        command="merge",
        checkpoints=tuple(request.checkpoints),
        anchor_index=anchor_index(request.anchor, count),
        weights=weights,
        output=output,
        report=report_path(output, request.report),
        options=request,
        target=request,
        rules=rules,
    )


def report_path(output: Path | None, report: Path | None) -> Path | None:
    """Where the report goes: as asked, or beside the output."""
    if report is not None:
        return Path(report)
    return None if output is None else report_beside(output)


def run(plan: Plan, progress: Progress, also: Put | None = None) -> Report:
    """Carry out a plan: open, match each source, write the average and the report.

    `also` gets every fused tensor too, for callers in memory.
    """
    recipe = plan.options.recipe()
    watch = Stopwatch()
    runtime = Runtime(resolve_device(plan.options.device), recipe.seed, progress)
    refuse_outputs(plan.output, plan.report, plan.checkpoints, plan.target)
    with open_checkpoints(plan.checkpoints, plan.options.key) as checkpoints:
        if plan.anchor_index == MEDOID:
            with watch("match"):
                any_anchor = _assemble(plan, checkpoints, 0, runtime)
                chosen = find_medoid(any_anchor, recipe, runtime)
            plan = replace(plan, anchor_index=chosen)
        with watch("graph"):
            parents = _assemble(plan, checkpoints, plan.anchor_index, runtime)
        weights = plan.weights
        selection = _select(plan, parents)
        require_room(plan.output, _targets(plan, parents.whole.checkpoint))
        sources = [m for m in parents.sources if selection.used(m.index)]
        # A source of weight 0 is not read beyond its header; the anchor is what others align to.
        used = {plan.anchor_index, *(m.index for m in sources)}
        with watch("read"):
            _require_finite_inputs([parents.whole, *sources], runtime)
        with watch("inputs"):
            bench = open_bench(parents, plan.options, recipe, selection, runtime)
            if bench is not None:
                parents = watch_units(bench, parents, recipe)
                sources = [m for m in parents.sources if selection.used(m.index)]
        matches: list[Match] = []
        with watch("match"):
            for source in sources:
                judge = None if bench is None else bench.judge(source)
                matches.append(match(source, parents.anchor, recipe, runtime, judge))
            matches = realign(sources, matches, parents.anchor, weights, recipe, runtime)
        aligned = [
            Aligned(source, found.alignment, weights[source.index])
            for source, found in zip(sources, matches, strict=True)
        ]
        with watch("check"):
            checks, remarks = check_function(parents, aligned)
        repair = None
        if recipe.repair == "auto" and (plan.rules or not _endpoint(aligned)):
            repair = plan_repair(parents.anchor.graph)
        fused = Fused(parents.whole, parents.anchor, aligned, selection, repair)
        better = Improved()
        if bench is not None:
            with watch("refit"):
                endpoint = _endpoint(aligned)
                better = improve(bench, fused, recipe, plan.options, endpoint=endpoint)
                fused = replace(fused, better=better.tensors)
        with watch("write"):
            lost = _write(plan, fused, runtime, also)
        with watch("read"):
            inputs = tuple(c.record(digest=at in used) for at, c in enumerate(checkpoints))
        report = Report(
            command=plan.command,
            version=__version__,
            inputs=inputs,
            output=_output_record(plan),
            recipe=_recipe(plan, recipe, runtime),
            graph=graph_record(parents.anchor.graph),
            spaces=tuple(s for m in matches for s in m.spaces),
            layers=tuple(layer for m in matches for layer in m.layers),
            candidates=tuple(c for m in matches for c in m.candidates),
            warnings=(
                *parents.warnings,
                *selection.warnings(parents.whole.checkpoint.infos),
                *lost,
                *_warnings(parents, recipe, aligned, repair),
                *(w for m in matches for w in m.warnings),
                *remarks,
                *better.remarks,
            ),
            checks=checks,
            steps=better.steps,
            refits=better.refits,
        )
    report = replace(report, timings=dict(watch.seconds), peak_rss_bytes=peak_rss_bytes())
    if plan.report is not None:
        write_text(plan.report, report.to_json(), overwrite=plan.target.overwrite)
    return report


def _assemble(
    plan: Plan, checkpoints: Sequence[Checkpoint], anchor_index: int, runtime: Runtime
) -> Parents:
    options = plan.options
    return assemble(
        checkpoints,
        anchor_index,
        options.arch,
        runtime.device,
        free_outputs=options.free_outputs,
        strict=options.strict,
        vocab=options.vocab,
    )


def _select(plan: Plan, parents: Parents) -> Selection:
    anchor, target = parents.whole.checkpoint, plan.target
    selection = Selection(
        plan.weights,
        plan.rules,
        target.skip,
        target.only,
        parents.kept,
        dict(anchor.aliases),
    )
    selection.require_matches(anchor.infos)
    return selection


def _require_finite_inputs(models: Sequence[Model], runtime: Runtime) -> None:
    """Read every tensor that counts once, so that a NaN is named before any solve.

    The first model has all names, the others may lack some (see `reconcile`).
    """
    names = list(models[0].graph.tensors)
    for done, name in enumerate(names):
        runtime.progress("read", done, len(names))
        for model in models:
            if name in model.graph.tensors:
                model.stored(name)
    runtime.progress("read", len(names), len(names))


def _endpoint(aligned: Sequence[Aligned]) -> bool:
    """Whether one model has all the weight: nothing is averaged, so nothing shrinks."""
    return not aligned or (len(aligned) == 1 and aligned[0].weight == 1.0)


def _write(plan: Plan, fused: Fused, runtime: Runtime, also: Put | None) -> tuple[str, ...]:
    """Write every tensor; returns what could not be written along with them."""
    anchor = fused.whole.checkpoint
    infos = _targets(plan, anchor)
    extras = anchor.extras() if plan.target.keep_extras else None
    with _sink(plan, anchor, infos, also, extras) as put:
        for done, info in enumerate(infos):
            runtime.progress("write", done, len(infos))
            put(info.name, fused.tensor(info.name, dtype=info.dtype))
    runtime.progress("write", len(infos), len(infos))
    if extras is None or not extras.left_out:
        return ()
    return (f"--keep-extras left out: {', '.join(extras.left_out)}",)


def _targets(plan: Plan, anchor: Checkpoint) -> list[TensorInfo]:
    """The tensors of the output, in the anchor's order."""
    if plan.target.dtype == "keep":
        return list(anchor.infos.values())
    wanted = getattr(torch, plan.target.dtype)
    return [
        replace(i, dtype=wanted) if i.dtype.is_floating_point else i for i in anchor.infos.values()
    ]


@contextmanager
def _sink(
    plan: Plan,
    like: Checkpoint,
    infos: Sequence[TensorInfo],
    also: Put | None,
    extras: Extras | None,
) -> Iterator[Put]:
    """Where fused tensors go: the output file, the caller, or both."""
    if plan.output is None:
        yield also or (lambda name, tensor: None)
        return
    target = plan.target
    with open_writer(
        plan.output,
        infos,
        like=like,
        overwrite=target.overwrite,
        extras=extras,
        shard_size=parse_size(target.shard_size or DEFAULT_SHARD),
        dtype=None if target.dtype == "keep" else target.dtype,
    ) as writer:

        def put(name: str, tensor: torch.Tensor) -> None:
            writer.put(name, tensor)
            if also is not None:
                also(name, tensor)

        yield put


def _output_record(plan: Plan) -> tuple[FileRecord, ...]:
    if plan.output is None:
        return ()
    # With the anchor's other entries beside it, the fused model is as ambiguous as the anchor was.
    key = plan.options.key if plan.target.keep_extras else None
    with open_checkpoint(plan.output, key=key) as written:
        return (written.record(),)


def _recipe(plan: Plan, recipe: Recipe, runtime: Runtime) -> dict[str, Any]:
    return {
        **recipe.to_dict(),
        "weights": list(plan.weights),
        "anchor": plan.anchor_index,
        "arch": plan.options.arch,
        "paper": plan.options.paper,
        **_inputs_recipe(plan.options),
        "strict": plan.options.strict,
        "vocab": plan.options.vocab,
        "weight_rules": [{"pattern": p, "weights": list(w)} for p, w in plan.rules],
        "skip": list(plan.target.skip),
        "only": list(plan.target.only),
        "keep_extras": plan.target.keep_extras,
        "shard_size": plan.target.shard_size,
        "dtype": plan.target.dtype,
        "device": runtime.device,
    }


def _inputs_recipe(options: ImproveOptions) -> dict[str, Any]:
    """Which inputs were used, and what for."""
    samples = options.samples
    return {
        "samples": str(samples) if isinstance(samples, str | Path) else None,
        "synthetic": options.synthetic,
        "synthetic_kind": options.synthetic_kind,
        "num_samples": options.num_samples,
        "input_shape": options.input_shape,
        "refit": options.refits,
        "ridge": options.ridge,
        "calibrate": options.calibration,
    }


def _warnings(
    parents: Parents, recipe: Recipe, aligned: Sequence[Aligned], repair: Repair | None
) -> tuple[str, ...]:
    found = list(parents.anchor.graph.warnings)
    if repair is not None:
        found += repair.warnings
    soft = [a for a in aligned if not a.alignment.hard]
    if (
        repair is None
        and soft
        and any(n.endswith("running_var") for n in parents.anchor.graph.tensors)
    ):
        found.append(
            "BatchNorm statistics went through maps that are not permutations: running variances "
            "are weighted means, exact for duplicated units only"
        )
    if recipe.residual == "average" and any(a.alignment.overrides for a in aligned):
        found.append("--residual average does not keep the function of the aligned sources")
    return tuple(found)
