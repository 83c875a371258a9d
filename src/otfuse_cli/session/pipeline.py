"""A fusion from opened files to the written result: stages in their order, one method each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .. import __version__
from ..checkpoint.open import Checkpoint
from ..checkpoint.publication import Publication
from ..fusion.average import Aligned
from ..fusion.fused import Fused
from ..fusion.repair import Repair, plan_repair
from ..fusion.selection import Selection
from ..graph.analysis.streams import PostNorm
from ..matching.alignment import Alignment
from ..matching.barycenter import iterate
from ..matching.match import only_merge_turns
from ..matching.matchers.searches import DESCENT
from ..matching.matchers.sweep import DifferentHeads, Match
from ..matching.models import Model
from ..matching.passes import realign
from ..matching.portfolio import Judge
from ..report.records import Checks, DepthRecord, FileRecord, Report, RoundRecord
from ..requests.recipe import Recipe
from ..runtime import Progress, Runtime, Stopwatch, peak_rss_bytes
from .architectures import arch_of_each
from .far_workers import open_workers
from .function_check import check_function, check_fused_outputs, require_kept, require_proof
from .graph_records import graph_record
from .memory_limit import require_memory
from .merge_plan import MergePlan
from .open_inputs import add_network, open_bench
from .outputs import Put, refuse_outputs, require_room
from .parents import MEDOID, Parents, find_medoid, open_checkpoints
from .pieces import Matching, survey
from .recipe_record import recipe_record
from .remarks import remarks_on_maps, unlike_widths
from .turn_streams import Turned, turn
from .write_fused import output_infos, write_fused

if TYPE_CHECKING:
    from torch import Tensor

    from .bench import Bench
    from .improve import Improved
    from .widened import Wide


def run(
    plan: MergePlan, progress: Progress, also: Put | None = None, outputs: Publication | None = None
) -> Report:
    """Carry out a plan: open, match each source, write the average and the report.

    `also` gets every fused tensor too, for callers in memory. What is written appears when all of
    it is complete, or with the other `outputs` of a caller that has some.

    Raises:
        OtfuseError: See docs/exit-codes.md; nothing is left behind.
    """
    if outputs is not None:
        return _run(plan, progress, also, outputs)
    with Publication(overwrite=plan.target.overwrite) as outputs:
        return _run(plan, progress, also, outputs)


def _run(plan: MergePlan, progress: Progress, also: Put | None, outputs: Publication) -> Report:
    recipe = plan.options.recipe()
    refuse_outputs(plan.output, plan.report, plan.checkpoints, plan.target)
    with (
        open_workers(plan.options, progress) as runtime,
        open_checkpoints(plan.checkpoints, plan.options.key) as checkpoints,
    ):
        work = _Fusion(plan, recipe, runtime, checkpoints, also, outputs)
        for seconds, stage in _STAGES:
            with work.watch(seconds) if seconds else nullcontext():
                stage(work)
        report = plan.steps.describe(work.parents, work.report())
    report = report.replace(timings=dict(work.watch.seconds), peak_rss_bytes=peak_rss_bytes())
    if plan.report is not None:
        outputs.write(plan.report, report.to_json())
    return report


@dataclass
class _Fusion:
    """One fusion under way; each stage leaves behind what those after it need.

    Attributes:
        plan: What is to be done; stages fill in the anchor and the weights.
        recipe: How units are matched.
        runtime: Device, seed, progress.
        checkpoints: Opened files.
        also: Gets every fused tensor too.
        outputs: Where files appear together.
        parents: The models with their graphs.
        selection: Which tensors are averaged, with which weights.
        turned: The parents turned onto the anchor, for streams that are.
        bench: The parents running on the inputs; None without inputs.
        depth: What of sources of other depths stands for what of the anchor.
        rounds: What realigning to the mean did.
        wide: The network to fuse into, where that is no model's.
        side_by_side: All models as one, where nothing has to be left out.
        matches: Of the sources that count.
        matched: Every source has maps; without them only joint fusion is possible.
        repair: What an average loses and gets back.
        fused: The result.
        better: What inputs made of it.
        warnings: Of the stages that have no record of their own.
    """

    plan: MergePlan
    recipe: Recipe
    runtime: Runtime
    checkpoints: Sequence[Checkpoint]
    also: Put | None
    outputs: Publication
    watch: Stopwatch = field(default_factory=Stopwatch)
    parents: Parents = field(init=False)
    selection: Selection = field(init=False)
    turned: Turned | None = None
    bench: Bench | None = None
    depth: tuple[DepthRecord, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    wide: Wide | None = None
    side_by_side: dict[str, Tensor] | None = None
    matches: Sequence[Match] = ()
    matched: bool = True
    checks: Checks = field(default_factory=Checks)
    repair: Repair | None = None
    fused: Fused = field(init=False)
    better: Improved | None = None
    inputs: tuple[FileRecord, ...] = ()
    written: tuple[FileRecord, ...] = ()
    fallen_back: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def sources(self) -> list[Model]:
        """The models that are aligned; one of weight 0 is not read beyond its header."""
        return [model for model in self.parents.sources if self.selection.used(model.index)]

    @property
    def used(self) -> set[int]:
        """Indices of what is read: the anchor is what others align to, whatever it weighs."""
        return {self.plan.anchor_index, *(model.index for model in self.sources)}

    @property
    def only_joined(self) -> bool:
        """Whether every source counts in joint fusion alone, which aligns nothing."""
        shares = [self.plan.weights[source.index] for source in self.sources]
        return self.bench is not None and all(_needs_no_maps(self.plan, share) for share in shares)

    @property
    def search(self) -> Recipe:
        """The recipe that sources are matched by.

        For joint fusion one search does: its maps are reported, and averaged only if that fails.
        """
        recipe = self.recipe
        several = recipe.matcher == "auto" and recipe.solver == "exact"
        if not (self.only_joined and several) or recipe.residual == "average":
            return recipe
        return replace(recipe, matcher=DESCENT.name)

    @property
    def aligned(self) -> list[Aligned]:
        """Sources with their maps and shares."""
        return [
            Aligned(source, match.alignment, self.plan.weights[source.index])
            for source, match in zip(self.sources, self.matches, strict=True)
        ]

    def choose_anchor(self) -> None:
        """Find the medoid, where the plan leaves the anchor to us."""
        if self.plan.anchor_index != MEDOID:
            return
        with self.watch("match"):
            any_anchor = self._assemble(0)
            chosen = find_medoid(any_anchor, self.recipe, self.runtime)
        self.plan = replace(self.plan, anchor_index=chosen)

    def assemble(self) -> None:
        """Find the graphs; refuse what can't be proven, written, or held in memory."""
        plan, recipe = self.plan, self.recipe
        self.parents = self._assemble(plan.anchor_index)
        graph = self.parents.shared_architecture.graph
        require_proof(graph, recipe.align, asked=plan.options.require_proof)
        self.plan = plan = replace(plan, weights=self.parents.weights or plan.weights)
        self.selection = _select(plan, self.parents)
        require_room(plan.output, output_infos(plan, self.parents))
        require_memory(self.sources, self.parents.anchor, recipe, plan.options.max_memory)

    def _assemble(self, anchor: int) -> Parents:
        plan = self.plan
        return plan.steps.assemble(self.checkpoints, anchor, plan.options, self.runtime.device)

    def survey(self) -> None:
        """Read every tensor that counts once (see `pieces`).

        The first model has all names, the others may lack some (see `reconcile`).
        """
        models = [self.parents.whole, *self.sources]
        names = [[n for n in m.checkpoint.infos if n in m.graph.tensors] for m in models]
        survey(models, names, self.runtime)

    def turn_streams(self) -> None:
        """Turn the parents onto the anchor for `--residual orthogonal`.

        A network whose stream has axes of its own falls back to permutations, and a warning says
        so.
        """
        plan = self.plan
        if self.recipe.residual != "orthogonal":
            return
        if plan.command != "merge":
            raise only_merge_turns()
        try:
            arch = arch_of_each(plan.options.arch, len(plan.checkpoints))[plan.anchor_index]
            self.turned = turn(self.parents, self.used, arch, self.recipe, self.runtime)
        except PostNorm as error:
            warning = f"--residual orthogonal: {error.what} at {error.where}: units were permuted"
            self.recipe, self.fallen_back = replace(self.recipe, residual="shared"), (warning,)
            return
        self.parents = self.turned.parents

    def open_inputs(self) -> None:
        """Read or make inputs, and look at what units do on them."""
        options = self.plan.options
        if self.plan.width is not None and not options.has_inputs:
            options = replace(options, blend=None)  # nothing will be fitted, nor left out
        self.bench = open_bench(self.parents, options, self.recipe, self.selection, self.runtime)
        if self.bench is not None:
            from .bench import watch_units

            self.parents = watch_units(self.bench, self.parents, self.search)

    def correspond(self) -> None:
        """Find what of a parent of another depth stands for what of the anchor."""
        if self.bench is None or not self.parents.other_depth:
            return
        from .other_depth import correspond

        self.bench, self.depth = correspond(self.bench)
        self.parents = self.bench.parents

    def widen(self) -> None:
        """Make a network of other widths to fuse into, where those are asked for."""
        plan = self.plan
        if plan.width is None:
            return
        from .widened import widen

        arch = arch_of_each(plan.options.arch, len(plan.checkpoints))[plan.anchor_index]
        self.wide = widen(self.parents, plan.width, plan.weights, arch=arch, output=plan.output)
        self.parents = self.wide.parents
        require_room(plan.output, output_infos(plan, self.parents))
        if self.bench is None:
            self.side_by_side = self.wide.side_by_side()
        else:
            self.bench = add_network(self.bench, self.parents)

    def match(self) -> None:
        """Match every source to the anchor, then for as many passes and rounds as are asked for."""
        if self.wide is not None or self.parents.other_depth:
            self.matched = False
            self.matches = [Match(Alignment({}), (), ()) for _ in self.sources]
            return
        matches = self._matches()
        anchor, weights = self.parents.anchor, self.plan.weights
        how = anchor, weights, self.recipe, self.runtime
        self.matches = realign(self.sources, matches, *how)
        self.matches, self.rounds = iterate(self.sources, self.matches, *how)

    def _matches(self) -> list[Match]:
        """Every source's match by itself; those of turned streams were found before."""
        if self.turned is not None:
            return [self.turned.matches[source.index] for source in self.sources]
        work = Matching(self.plan.steps.match, self.parents.anchor, self.search, self.runtime)
        items = ((source, self._judge(source)) for source in self.sources)
        made = work.each(items, self.runtime, len(self.sources))
        return [self._settled(s, match) for s, match in zip(self.sources, made, strict=True)]

    def _judge(self, source: Model) -> Judge | None:
        """What scores its candidates, where anything does."""
        if self.bench is None or self.only_joined:
            return None
        return self.bench.judge(source, fitted=self.plan.options.refits)

    def _settled(self, source: Model, made: Match | DifferentHeads) -> Match:
        if isinstance(made, Match):
            return made
        if self.bench is None or not _needs_no_maps(self.plan, self.plan.weights[source.index]):
            raise made
        self.matched = False
        warning = f"{made.what}: nothing was, joint fusion doesn't need it"
        return Match(Alignment({}), (), (), warnings=(warning,))

    def check(self) -> None:
        """Ask the network itself whether the maps keep the function.

        Raises:
            SolveFailed: They don't.
            UsageError: Proof was asked for, and there is none.
        """
        if self.wide is not None:
            self.checks, self.remarks = self.wide.check(self.side_by_side)
        else:
            moved = self.aligned if self.matched and self.recipe.align != "none" else []
            self.checks, self.remarks = check_function(self.parents, moved, seed=self.recipe.seed)
        if self.turned is not None:
            self.checks = self.turned.checks
        graph = self.parents.shared_architecture.graph
        require_kept(self.checks, self.remarks, graph, asked=self.plan.options.require_proof)

    def average(self) -> None:
        """Set the average up; its tensors are computed when they are asked for."""
        parents, aligned = self.parents, self.aligned
        # At an endpoint nothing is averaged, so nothing shrinks.
        averages = self.recipe.repair == "auto" and self.wide is None
        if averages and (self.plan.rules or not _endpoint(aligned)):
            turned = self.turned
            self.repair = plan_repair(parents.anchor.graph) if turned is None else turned.repair
        self.fused = Fused(parents.whole, parents.anchor, aligned, self.selection, self.repair)

    def improve(self) -> None:
        """Try what inputs make of the average, and keep what is better."""
        if self.side_by_side is not None:
            self.fused = replace(self.fused, better=self.side_by_side)
        if self.bench is None:
            return
        from .improve import improve

        with self.watch("refit"):
            self.better = improve(
                self.bench,
                self.fused,
                self.recipe,
                self.plan.options,
                endpoint=_endpoint(self.aligned),
                matched=self.matched,
                teachers=self.plan.steps.teach(self.aligned),
                watch=self.watch,
            )
        self.fused = replace(self.fused, better=self.better.tensors)

    def check_outputs(self) -> None:
        """Run the fused network once: what comes out has to be finite."""
        self.remarks = (*self.remarks, *check_fused_outputs(self.parents, self.fused))

    def write(self) -> None:
        """Write the fused model."""
        self.lost, self.written = write_fused(
            self.plan, self.parents, self.fused, self.runtime, self.also, self.outputs
        )

    def record_inputs(self) -> None:
        """Note what was read, with digests of what was read whole."""
        used = self.used
        self.inputs = tuple(c.record(digest=at in used) for at, c in enumerate(self.checkpoints))

    def report(self) -> Report:
        """Everything that was done, but for seconds and bytes."""
        recipe = recipe_record(self.plan, self.recipe, self.runtime)
        if self.bench is not None and self.bench.moved is not None:
            recipe["synthetic_kind"] = self.bench.moved
        better, matches = self.better, self.matches
        return Report(
            command=self.plan.command,
            version=__version__,
            inputs=self.inputs,
            output=self.written,
            recipe=recipe,
            graph=graph_record(self.parents.anchor.graph),
            spaces=tuple(space for match in matches for space in match.spaces),
            layers=tuple(layer for match in matches for layer in match.layers),
            candidates=tuple(tried for match in matches for tried in match.candidates),
            warnings=self._warnings(),
            checks=self.checks,
            yardsticks=better.yardsticks if better is not None else (),
            steps=better.steps if better is not None else (),
            refits=better.refits if better is not None else (),
            depth=self.depth,
            rounds=self.rounds,
            widened=self.wide.record() if self.wide is not None else None,
        )

    def _warnings(self) -> tuple[str, ...]:
        """What readers of the result should know, in the order of the stages."""
        parents, bench, aligned = self.parents, self.bench, self.aligned
        graph = parents.anchor.graph
        return (
            *parents.warnings,
            *self.fallen_back,
            *(bench.warnings if bench is not None else ()),
            *self.selection.warnings(parents.whole.checkpoint.infos),
            *self.lost,
            *(self.wide.remarks if self.wide is not None else ()),
            *remarks_on_maps(graph, self.recipe, aligned, self.repair),
            *(unlike_widths(parents.anchor, aligned) if bench is None and not self.wide else ()),
            *(warning for match in self.matches for warning in match.warnings),
            *self.remarks,
            *self.runtime.workers.remarks,
            *(self.better.remarks if self.better is not None else ()),
        )


# What is done, in order, and under which name its seconds are in the report; what most fusions
# leave out times itself.
_STAGES: tuple[tuple[str | None, Callable[[_Fusion], None]], ...] = (
    (None, _Fusion.choose_anchor),
    ("graph", _Fusion.assemble),
    ("read", _Fusion.survey),
    ("match", _Fusion.turn_streams),
    ("inputs", _Fusion.open_inputs),
    ("inputs", _Fusion.correspond),
    ("graph", _Fusion.widen),
    ("match", _Fusion.match),
    ("check", _Fusion.check),
    ("check", _Fusion.average),
    (None, _Fusion.improve),
    ("check", _Fusion.check_outputs),
    ("write", _Fusion.write),
    ("read", _Fusion.record_inputs),
)


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


def _needs_no_maps(plan: MergePlan, weight: float) -> bool:
    """Whether a source counts only in joint fusion, which aligns nothing."""
    options = plan.options
    calibrates = options.calibrate not in (None, "none")
    return options.blend == "joint" and options.refits and weight < 1 and not calibrates


def _endpoint(aligned: Sequence[Aligned]) -> bool:
    """Whether one model has all the weight: nothing is averaged, so nothing shrinks."""
    return not aligned or (len(aligned) == 1 and aligned[0].weight == 1.0)
