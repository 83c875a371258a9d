"""`merge`: align every source to the anchor, average, write (docs/methods/README.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import __version__
from ..checkpoint.names import TensorInfo
from ..checkpoint.open import Checkpoint
from ..checkpoint.publication import Publication
from ..errors import UsageError
from ..fusion.average import Aligned
from ..fusion.fused import Fused
from ..fusion.repair import plan_repair
from ..fusion.selection import Selection
from ..graph.analysis.streams import PostNorm
from ..matching.alignment import Alignment
from ..matching.match import match, only_merge_turns
from ..matching.matchers.sweep import DifferentHeads, Match
from ..matching.models import Model
from ..matching.passes import realign
from ..matching.portfolio import Judge
from ..report.files import report_beside
from ..report.records import Checks, FileRecord, Report
from ..requests.recipe import Recipe
from ..requests.requests import STANDARD, AverageOptions, ImproveOptions, MergeRequest, Source
from ..requests.tensor_weights import Rules, weight_rules
from ..runtime import (
    Progress,
    Runtime,
    Stopwatch,
    ahead,
    cores,
    peak_rss_bytes,
    resolve_device,
    silent,
)
from ..session.architectures import arch_of_each, arch_record
from ..session.computed_tensors import settle
from ..session.function_check import (
    check_function,
    check_fused_outputs,
    require_kept,
    require_proof,
)
from ..session.memory import require_memory
from ..session.open_inputs import open_bench
from ..session.outputs import Put, kept_extras, refuse_outputs, require_room, sink, target_info
from ..session.parents import (
    MEDOID,
    Parents,
    anchor_index,
    assemble,
    find_medoid,
    graph_record,
    open_checkpoints,
)
from ..session.remarks import remarks_on_maps, unlike_widths
from ..session.turn_streams import Turned, turn

Assemble = Callable[[Sequence[Checkpoint], int, ImproveOptions, str], Parents]


class Matcher(Protocol):
    """Aligns one source to the anchor; a judge scores candidates, where there are any."""

    def __call__(
        self,
        source: Model,
        anchor: Model,
        recipe: Recipe,
        runtime: Runtime,
        judge: Judge | None = None,
    ) -> Match:
        """The source's match."""
        ...


def _assemble(
    checkpoints: Sequence[Checkpoint], anchor: int, options: ImproveOptions, device: str
) -> Parents:
    parents = assemble(
        checkpoints,
        anchor,
        options.arch,
        device,
        free_outputs=options.free_outputs,
        strict=options.strict,
        vocab=options.vocab,
        untie=isinstance(options, MergeRequest) and options.untie,
        plain=options.align == "none",
    )
    return settle(parents, keep=options.align != "none")


@dataclass(frozen=True)
class Steps:
    """What a verb does its own way.

    Attributes:
        assemble: Opened checkpoints, anchor's index, options, device -> models with graphs.
        match: One source against the anchor.
        describe: What the verb adds to the report before it is written.
        teach: From the aligned sources, what a refit aims at instead of the parents' mean; None
            where that is the aim.
    """

    assemble: Assemble = _assemble
    match: Matcher = match
    describe: Callable[[Parents, Report], Report] = lambda parents, report: report
    teach: Callable[[Sequence[Aligned]], Sequence[Aligned] | None] = lambda aligned: None


@dataclass(frozen=True)
class MergePlan:
    """What a fusion will do, decided before anything is solved."""

    command: str
    checkpoints: tuple[Source, ...]
    anchor_index: int
    weights: tuple[float, ...]
    output: Path | None
    report: Path | None
    options: ImproveOptions
    target: AverageOptions
    rules: Rules = ()
    steps: Steps = field(default_factory=Steps)


def run_merge(request: MergeRequest, *, progress: Progress = silent) -> Report:
    """Fuse the checkpoints of `request` into its output file.

    Raises:
        OtfuseError: See docs/exit-codes.md; nothing is left behind.
    """
    if request.output is None:
        raise UsageError("no output", where="-o OUT", fix="say where the fused model goes")
    return run(plan_merge(request), progress)


def merge_tensors(
    request: MergeRequest, *, progress: Progress = silent, outputs: Publication | None = None
) -> tuple[dict[str, torch.Tensor], Report]:
    """Fuse in memory, and to the output file as well where the request names one.

    `outputs` as for `run`.
    """
    plan = plan_merge(request)
    tensors: dict[str, torch.Tensor] = {}
    report = run(plan, progress, also=tensors.__setitem__, outputs=outputs)
    return tensors, report


def plan_merge(request: MergeRequest) -> MergePlan:
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
    return MergePlan(
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
    """The report's file: as asked, or beside the output; none where it goes to a stream."""
    if report is not None:
        return None if Path(report) == STANDARD else Path(report)
    return None if output is None else report_beside(output)


def run(
    plan: MergePlan, progress: Progress, also: Put | None = None, outputs: Publication | None = None
) -> Report:
    """Carry out a plan: open, match each source, write the average and the report.

    `also` gets every fused tensor too, for callers in memory. What is written appears when all of
    it is complete, or with the other `outputs` of a caller that has some.
    """
    if outputs is not None:
        return _run(plan, progress, also, outputs)
    with Publication(overwrite=plan.target.overwrite) as outputs:
        return _run(plan, progress, also, outputs)


def _run(plan: MergePlan, progress: Progress, also: Put | None, outputs: Publication) -> Report:
    recipe = plan.options.recipe()
    watch = Stopwatch()
    runtime = Runtime(resolve_device(plan.options.device), recipe.seed, progress)
    refuse_outputs(plan.output, plan.report, plan.checkpoints, plan.target)
    with open_checkpoints(plan.checkpoints, plan.options.key) as checkpoints:
        if plan.anchor_index == MEDOID:
            with watch("match"):
                any_anchor = plan.steps.assemble(checkpoints, 0, plan.options, runtime.device)
                chosen = find_medoid(any_anchor, recipe, runtime)
            plan = replace(plan, anchor_index=chosen)
        with watch("graph"):
            parents = plan.steps.assemble(
                checkpoints, plan.anchor_index, plan.options, runtime.device
            )
        require_proof(parents.known.graph, recipe.align, asked=plan.options.require_proof)
        weights = parents.weights or plan.weights
        plan = replace(plan, weights=weights)
        selection = _select(plan, parents)
        require_room(plan.output, _targets(plan, parents))
        sources = [m for m in parents.sources if selection.used(m.index)]
        require_memory(sources, parents.anchor, recipe, plan.options.max_memory)
        # A source of weight 0 is not read beyond its header; the anchor is what others align to.
        used = {plan.anchor_index, *(m.index for m in sources)}
        with watch("read"):
            _survey([parents.whole, *sources], runtime)
        with watch("match"):
            turned, recipe, fallen = _turned(plan, parents, used, recipe, runtime)
        if turned is not None:
            parents = turned.parents
            sources = [m for m in parents.sources if selection.used(m.index)]
        with watch("inputs"):
            bench = open_bench(parents, plan.options, recipe, selection, runtime)
            if bench is not None:
                from ..session.bench import watch_units

                parents = watch_units(bench, parents, recipe)
                sources = [m for m in parents.sources if selection.used(m.index)]
        matches: list[Match] = []
        matched = True
        with watch("match"):
            for source in sources:
                if turned is not None:
                    matches.append(turned.matches[source.index])
                    continue
                judge = None if bench is None else bench.judge(source)
                try:
                    found = plan.steps.match(source, parents.anchor, recipe, runtime, judge=judge)
                except DifferentHeads as error:
                    if bench is None or not _needs_no_maps(plan, weights[source.index]):
                        raise
                    matched = False
                    told = f"{error.what}: nothing was, joint fusion doesn't need it"
                    found = Match(Alignment({}), (), (), warnings=(told,))
                matches.append(found)
            matches = realign(sources, matches, parents.anchor, weights, recipe, runtime)
        aligned = [
            Aligned(source, found.alignment, weights[source.index])
            for source, found in zip(sources, matches, strict=True)
        ]
        with watch("check"):
            checks, remarks = _checked(plan, parents, aligned if matched else [], turned, recipe)
        repair = None
        if recipe.repair == "auto" and (plan.rules or not _endpoint(aligned)):
            repair = plan_repair(parents.anchor.graph) if turned is None else turned.repair
        fused = Fused(parents.whole, parents.anchor, aligned, selection, repair)
        better = None
        if bench is not None:
            from ..session.improve import improve

            with watch("refit"):
                endpoint = _endpoint(aligned)
                better = improve(
                    bench,
                    fused,
                    recipe,
                    plan.options,
                    endpoint=endpoint,
                    matched=matched,
                    teachers=plan.steps.teach(aligned),
                    watch=watch,
                )
                fused = replace(fused, better=better.tensors)
        with watch("check"):
            remarks = (*remarks, *check_fused_outputs(parents, fused))
        with watch("write"):
            lost, written = _write(plan, parents, fused, runtime, also, outputs)
        with watch("read"):
            inputs = tuple(c.record(digest=at in used) for at, c in enumerate(checkpoints))
        report = Report(
            command=plan.command,
            version=__version__,
            inputs=inputs,
            output=written,
            recipe=_recipe(plan, recipe, runtime)
            | ({"synthetic_kind": "class"} if bench is not None and bench.driven else {}),
            graph=graph_record(parents.anchor.graph),
            spaces=tuple(s for m in matches for s in m.spaces),
            layers=tuple(layer for m in matches for layer in m.layers),
            candidates=tuple(c for m in matches for c in m.candidates),
            warnings=(
                *parents.warnings,
                *fallen,
                *(bench.warnings if bench is not None else ()),
                *selection.warnings(parents.whole.checkpoint.infos),
                *lost,
                *remarks_on_maps(parents.anchor.graph, recipe, aligned, repair),
                *(unlike_widths(parents.anchor, aligned) if bench is None else ()),
                *(w for m in matches for w in m.warnings),
                *remarks,
                *(better.remarks if better is not None else ()),
            ),
            checks=checks,
            yardsticks=better.yardsticks if better is not None else (),
            steps=better.steps if better is not None else (),
            refits=better.refits if better is not None else (),
        )
        report = plan.steps.describe(parents, report)
    report = replace(report, timings=dict(watch.seconds), peak_rss_bytes=peak_rss_bytes())
    if plan.report is not None:
        outputs.write(plan.report, report.to_json())
    return report


def _checked(
    plan: MergePlan,
    parents: Parents,
    aligned: Sequence[Aligned],
    turned: Turned | None,
    recipe: Recipe,
) -> tuple[Checks, tuple[str, ...]]:
    """What the network itself says of the maps, and remarks; refused where proof was asked for."""
    moved = () if recipe.align == "none" else aligned
    checks, remarks = check_function(parents, moved, seed=recipe.seed)
    if turned is not None:
        checks = turned.checks
    require_kept(checks, remarks, parents.known.graph, asked=plan.options.require_proof)
    return checks, remarks


def _turned(
    plan: MergePlan, parents: Parents, used: Collection[int], recipe: Recipe, runtime: Runtime
) -> tuple[Turned | None, Recipe, tuple[str, ...]]:
    """Parents turned onto the anchor for `--residual orthogonal`; None where streams stay.

    A network whose stream has axes of its own falls back to permutations, and a warning says so.
    """
    if recipe.residual != "orthogonal":
        return None, recipe, ()
    if plan.command != "merge":
        raise only_merge_turns()
    try:
        arch = arch_of_each(plan.options.arch, len(plan.checkpoints))[plan.anchor_index]
        return turn(parents, used, arch, recipe, runtime), recipe, ()
    except PostNorm as error:
        warning = f"--residual orthogonal: {error.what} at {error.where}: units were permuted"
        return None, replace(recipe, residual="shared"), (warning,)


def _select(plan: MergePlan, parents: Parents) -> Selection:
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


def _survey(models: Sequence[Model], runtime: Runtime) -> None:
    """Read every tensor that counts once: a NaN is named before any solve, files are hashed.

    Files are read side by side, each from front to back. The first model has all names, the
    others may lack some (see `reconcile`).
    """
    names = [[n for n in m.checkpoint.infos if n in m.graph.tensors] for m in models]
    total = sum(map(len, names))
    done = count(1)

    def read(model: Model, wanted: Sequence[str]) -> None:
        model.checkpoint.hash_while_reading()
        for name in wanted:
            model.require_finite(name)
            runtime.progress("read", next(done), total)

    runtime.progress("read", 0, total)
    with ThreadPoolExecutor(min(len(models), cores())) as pool:
        for result in [pool.submit(read, m, n) for m, n in zip(models, names, strict=True)]:
            result.result()


def _needs_no_maps(plan: MergePlan, weight: float) -> bool:
    """Whether a source counts only in joint fusion, which aligns nothing."""
    options = plan.options
    calibrates = options.calibrate not in (None, "none")
    return options.blend == "joint" and options.refits and weight < 1 and not calibrates


def _endpoint(aligned: Sequence[Aligned]) -> bool:
    """Whether one model has all the weight: nothing is averaged, so nothing shrinks."""
    return not aligned or (len(aligned) == 1 and aligned[0].weight == 1.0)


def _write(
    plan: MergePlan,
    parents: Parents,
    fused: Fused,
    runtime: Runtime,
    also: Put | None,
    outputs: Publication,
) -> tuple[tuple[str, ...], tuple[FileRecord, ...]]:
    """Write every tensor; returns what could not be written along with them, and what was."""
    like = parents.stored_like or parents.whole.checkpoint
    infos = {info.name: info for info in _targets(plan, parents)}
    extras, lost = kept_extras(like, plan.target)
    names = list(parents.whole.checkpoint.infos.values())
    with sink(
        plan.output,
        like,
        list(infos.values()),
        plan.target,
        outputs,
        also=also,
        extras=extras,
        config=parents.config,
    ) as out:
        by_rows = out.put_rows if parents.store is None else None

        def pieces() -> Iterator[tuple[str, int | None, torch.Tensor]]:
            for done, info in enumerate(names):
                runtime.progress("write", done, len(names))
                dtype = target_info(info, plan.target.dtype).dtype
                blocks = None if by_rows is None else fused.blocks(info.name, dtype=dtype)
                if blocks is None:
                    yield info.name, None, fused.tensor(info.name, dtype=dtype)
                    continue
                for first, rows in blocks:
                    yield info.name, first, rows

        # The next piece is averaged while this one is hashed and written.
        for name, first, piece in ahead(pieces()):
            if by_rows is not None and first is not None:
                for own in parents.names(name):
                    by_rows(own, first, piece)
                continue
            for own, stored in parents.stored(name, piece).items():
                out.put(own, stored.to(infos[own].dtype))
    runtime.progress("write", len(names), len(names))
    return lost, out.written


def _targets(plan: MergePlan, parents: Parents) -> list[TensorInfo]:
    """The tensors of the output, in the order of the file that it is like."""
    like = parents.stored_like or parents.whole.checkpoint
    return [target_info(info, plan.target.dtype) for info in like.infos.values()]


def _recipe(plan: MergePlan, recipe: Recipe, runtime: Runtime) -> dict[str, Any]:
    return {
        **recipe.to_dict(),
        "weights": list(plan.weights),
        "anchor": plan.anchor_index,
        "arch": arch_record(plan.options.arch, len(plan.checkpoints)),
        "paper": plan.options.paper,
        **_inputs_recipe(plan.options),
        "strict": plan.options.strict,
        "vocab": plan.options.vocab,
        **({"untie": plan.options.untie} if isinstance(plan.options, MergeRequest) else {}),
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
        "blend": options.blending,
        "require_gain": options.require_gain,
        "calibrate": options.calibration,
    }
