"""What inputs make of the average: refit, joint fusion, calibration, each step judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..align.alignment import Alignment
from ..align.canonical import canonical
from ..align.models import Model
from ..align.recipe import Recipe
from ..checkpoint.held import Held
from ..errors import IncompatibleModels, UsageError
from ..fuse.average import Aligned
from ..fuse.derived import renew_all
from ..fuse.fused import Fused
from ..fuse.joint import choices, joined_value, union
from ..fuse.joint_heads import add_heads
from ..fuse.joint_stream import Part, reduce_streams
from ..graph.streams import (
    PostNorm,
    TiedOutput,
    has_heads,
    in_heads,
    normed_stream,
    require_untied,
)
from ..network.runnable import graph_at
from ..report import RefitRecord, StepRecord
from .bench import Bench, Tensors, seen_units
from .requests import ImproveOptions

# Of the inputs, this part from the end is held out when two ways are compared.
_HELD = 5

# A fit that agrees with its teacher this often is not tried again from another start.
_ENOUGH = 0.98


@dataclass(frozen=True)
class Improved:
    """What inputs made of the average.

    Attributes:
        tensors: Those that are no longer the average's, by name.
        steps: What each step gave.
        refits: Layers that were fitted.
        remarks: What was left alone.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    steps: tuple[StepRecord, ...] = ()
    refits: tuple[RefitRecord, ...] = ()
    remarks: tuple[str, ...] = ()


def improve(
    bench: Bench,
    fused: Fused,
    recipe: Recipe,
    options: ImproveOptions,
    *,
    endpoint: bool,
    matched: bool = True,
    teachers: Sequence[Aligned] | None = None,
) -> Improved:
    """Refit or replace the average, calibrate it; all in memory.

    With the whole weight on one model only what was asked for is done. Where the sources could not
    be `matched` there is no average, only joint fusion. `teachers` are what a refit aims at instead
    of the parents' mean.

    Raises:
        OtfuseError: A fit that is singular, `--blend joint` where it can't be.
    """
    if teachers is not None:
        aims = {t.model.index: t.weight for t in teachers}
        bench = replace(bench, weights=[aims.get(at, 0.0) for at in range(len(bench.weights))])
    work = _Work(bench, fused, recipe, options, teachers)
    average = bench.average(fused if matched else replace(fused, sources=(), repair=None))
    steps = [bench.step("average", average)] if matched else []
    tensors = average
    fitted: tuple[RefitRecord, ...] = ()
    remarks: tuple[str, ...] = ()
    if options.refits and (not endpoint or bool(options.refit)):
        way = "average" if endpoint or teachers is not None else options.blend
        if way == "auto":
            way, trials, remarks = work.compare()
            steps += trials
        tensors, fitted, more = (work.joint if way == "joint" else work.refit)(bench)
        steps.append(bench.step("joint" if way == "joint" else "refit", tensors))
        remarks = (*remarks, *more)
    wanted = "none" if endpoint and options.calibrate is None else options.calibration
    tensors, tried, more = work.calibrate(tensors, wanted, steps[-1])
    changed = {n: t for n, t in tensors.items() if t is not average[n]}
    return Improved(changed, (*steps, *tried), fitted, (*remarks, *more))


def clearly_more(one: Tensor, other: Tensor) -> bool:
    """Whether one agrees more often than the other does, and by more than chance.

    Where only one of the two agrees, a coin would say which: the lead has to pass one standard
    deviation of as many tosses. With few inputs, `other` is the prior.
    """
    lead = one.double() - other.double()
    return bool(lead.sum() > lead.abs().sum().sqrt())


def _no_joint(error: UsageError) -> UsageError:
    """Why there is no joint fusion of some transformers."""
    fix = error.fix or "use --residual shared"
    return UsageError(
        f"no joint fusion of these transformers: {error.what}",
        where=error.where,
        why=error.why,
        fix=fix.replace("--residual shared", "--blend average"),
    )


_Fitted = tuple[Tensors, tuple[RefitRecord, ...], tuple[str, ...]]


@dataclass(frozen=True)
class _Work:
    bench: Bench
    fused: Fused
    recipe: Recipe
    options: ImproveOptions
    teachers: Sequence[Aligned] | None = None

    @property
    def left(self) -> frozenset[str]:
        """Tensors that stay the anchor's (`--skip`, `--only`)."""
        names = self.fused.whole.checkpoint.infos
        return frozenset(name for name in names if self.fused.selection.keeps(name))

    def refit(self, bench: Bench) -> _Fitted:
        """The average, every layer fitted to the parents' mean on the inputs of `bench`.

        Under teachers, where that falls short, the anchor itself is another start; the one that
        agrees more is kept.
        """
        average = bench.average(self.fused)
        if self.teachers is None:
            return self._refit(bench, average, self.fused.sources)
        first = self._refit(bench, average, self.teachers)
        agreement = bench.agreement(first[0])
        if agreement >= _ENOUGH:
            return first
        own = bench.average(replace(self.fused, sources=(), repair=None))
        second = self._refit(bench, own, self.teachers)
        return second if bench.agreement(second[0]) > agreement else first

    def _refit(self, bench: Bench, tensors: Tensors, aims: Sequence[Aligned]) -> _Fitted:
        parents = bench.run_parents(aims)
        fitted, remarks = bench.refit(parents, tensors, self.options.ridge, left=self.left)
        return tensors, fitted, remarks

    def joint(self, bench: Bench) -> _Fitted:
        """The union of the parents, reduced and fitted on the inputs of `bench`.

        Raises:
            IncompatibleModels: Units that can't be seen one by one.
            UsageError: Tensors that are to stay the anchor's.
        """
        if self.left:
            raise UsageError(
                "--blend joint makes all tensors anew",
                where="--skip, --only",
                fix="use --blend average",
            )
        graph = bench.parents.anchor.graph
        if not has_heads(graph):
            return self._joint_units(bench, self._counted(bench))
        try:
            normed_stream(graph)
        except PostNorm as error:
            return self._joint_post_norm(bench, error)
        except UsageError as error:
            raise _no_joint(error) from error
        return self._joint_stream(bench)

    def _counted(self, bench: Bench) -> list[Model]:
        """Models with a share, the anchor first: without one it gives its shape and nothing else.

        Where there are heads, widths alone don't tell how many: the graph is the model's own.
        """
        anchor = bench.parents.anchor
        found = []
        for model in (anchor, *(a.model for a in self.fused.sources)):
            if bench.weights[model.index] <= 0:
                continue
            ours = model.index not in bench.parents.own  # theirs are traced already
            if ours and has_heads(anchor.graph) and model.graph.sizes != anchor.graph.sizes:
                graph = graph_at(bench.parents.known, bench.tensors[model.index])
                model = replace(model, graph=graph)
            found.append(model)
        return found

    def _joint_units(self, bench: Bench, models: Sequence[Model]) -> _Fitted:
        """Units of all parents one by one; heads as wholes."""
        anchor, device = bench.parents.anchor, bench.runtime.device
        runs = [bench.run_parent(m, bench.weights[m.index]) for m in models]
        seen = seen_units(bench, bench.samples, post=True, seed=self.recipe.seed, models=models)
        graph, observed = anchor.graph, [seen[m.index] for m in models]
        chosen = choices(graph, observed, runs, without=in_heads(graph))
        runs = [replace(r, alignment=maps) for r, maps in zip(runs, chosen, strict=True)]
        read: Mapping[str, Tensor] = {}
        if has_heads(graph):
            runs, read = add_heads(graph, runs, bench.samples, device=device)
        parts = [
            (m, r.alignment or Alignment({}), r.weight) for m, r in zip(models, runs, strict=True)
        ]
        tensors = {
            name: read[name] if name in read else union(name, anchor, parts).to(device)
            for name in anchor.checkpoint.infos
        }
        renew_all(anchor.graph, tensors)
        fitted, remarks = bench.refit(runs, tensors, self.options.ridge, aim=joined_value)
        return tensors, fitted, remarks

    def _joint_post_norm(self, bench: Bench, error: PostNorm) -> _Fitted:
        """Transformers whose stream has axes of its own: its units are chosen, not directions."""
        try:
            require_untied(bench.parents.anchor.graph)
            tensors, fitted, remarks = self._joint_units(bench, self._counted(bench))
        except UsageError as refused:
            raise _no_joint(refused) from refused
        said = f"--blend joint: {error.what} at {error.where}: units of the stream were chosen"
        return tensors, fitted, (said, *remarks)

    def _joint_stream(self, bench: Bench) -> _Fitted:
        """Pre-norm transformers: parents in canonical form, a joint basis for the stream."""
        anchor = bench.parents.anchor
        parts = []
        for model in self._counted(bench):
            own = normed_stream(model.graph)
            settled = canonical(bench.tensors[model.index], model.graph, own)
            held = replace(model, checkpoint=Held(model.checkpoint, settled))
            tensors = {n: t.float() if t.is_floating_point() else t for n, t in settled.items()}
            run = replace(bench.run_parent(held, bench.weights[model.index]), tensors=tensors)
            parts.append(Part(held, own, run))
        ridge, device = self.options.ridge, bench.runtime.device
        reduced = reduce_streams(anchor, parts, bench.samples, ridge, device=device)
        renew_all(anchor.graph, reduced.tensors)
        fitted, remarks = bench.refit(
            [replace(p.run, alignment=a) for p, a in zip(parts, reduced.alignments, strict=True)],
            reduced.tensors,
            ridge,
            aim=joined_value,
            stress=reduced.stress,
        )
        return reduced.tensors, fitted, remarks

    def compare(self) -> tuple[str, list[StepRecord], tuple[str, ...]]:
        """`average` or `joint`: which agrees more with the parents on inputs not fitted on."""
        count = self.bench.samples.count
        cut = count - count // _HELD
        some, held = self.bench.part(slice(0, cut)), self.bench.part(slice(cut, count))
        try:
            joint = self.joint(some)[0]
        except (IncompatibleModels, UsageError) as error:
            way = f" ({error.fix})" if isinstance(error.__cause__, TiedOutput) else ""
            return "average", [], (f"--blend joint was not tried: {error.what}{way}",)
        average = self.refit(some)[0]
        better = clearly_more(held.agreeing(joint), held.agreeing(average))
        steps = [
            held.step("refit, held out", average, kept=not better),
            held.step("joint, held out", joint, kept=better),
        ]
        return ("joint" if better else "average"), steps, ()

    def calibrate(
        self, tensors: Tensors, wanted: str, before: StepRecord
    ) -> tuple[Tensors, Sequence[StepRecord], tuple[str, ...]]:
        """Try what `--calibrate` says; keep what agrees more with the parents."""
        kinds = {"none": (), "auto": ("bn", "repair")}.get(wanted, (wanted,))
        best, steps, remarks = before, list[StepRecord](), tuple[str, ...]()
        for kind in kinds:
            trial = self.bench.calibrate(kind, self.fused.sources, tensors, self.left)
            if trial is None:
                if wanted != "auto":
                    remarks = (*remarks, f"--calibrate {kind}: nothing to calibrate")
                continue
            found = self.bench.step(f"calibrate {kind}", trial)
            kept = found.agreement > best.agreement
            steps.append(replace(found, kept=kept))
            if kept:
                best, tensors = found, trial
        return tensors, steps, remarks
