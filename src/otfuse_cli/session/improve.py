"""What inputs make of the average: candidates, the best of them, calibration, each step judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..errors import GateFailed
from ..fusion.average import Aligned
from ..fusion.fused import Fused
from ..report.records import RefitRecord, StepRecord
from ..requests.recipe import Recipe
from ..requests.requests import ImproveOptions
from ..runtime import Stopwatch
from .bench import Bench, Tensors
from .candidates import choose_way, clearly_more, ways
from .ways import Ways


@dataclass(frozen=True)
class Improved:
    """What inputs made of the average.

    Attributes:
        tensors: Those that are no longer the average's, by name.
        yardsticks: What every parent is worth by itself.
        steps: What each step gave.
        refits: Layers that were fitted.
        remarks: What was left alone, and where the result is worse than the anchor.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    yardsticks: tuple[StepRecord, ...] = ()
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
    watch: Stopwatch | None = None,
) -> Improved:
    """Refit or replace the average, calibrate it; all in memory.

    With the whole weight on one model only what was asked for is done. Where the sources could not
    be `matched` there is no average, only joint fusion. `teachers` are what a refit aims at instead
    of the parents' mean.

    Raises:
        OtfuseError: A fit that is singular, a `--blend` where it can't be, `--require-gain`.
    """
    if teachers is not None:
        aims = {t.model.index: t.weight for t in teachers}
        bench = replace(bench, weights=[aims.get(at, 0.0) for at in range(len(bench.weights))])
    work = Ways(bench, fused, recipe, options, teachers)
    average = bench.average(fused if matched else replace(fused, sources=(), repair=None))
    steps = [bench.step("average", average)] if matched else []
    tensors = average
    fitted: tuple[RefitRecord, ...] = ()
    remarks: tuple[str, ...] = ()
    behind: float | None = None
    blend = _blend(options, endpoint=endpoint, taught=teachers is not None)
    if blend is not None:
        every = ways(work, blend)
        name, way = next(iter(every.items()))
        if len(every) > 1:
            chosen = choose_way(work, every, watch or Stopwatch())
            name, way, behind = chosen.name, chosen.way, chosen.behind
            steps += chosen.steps
            remarks = chosen.remarks
        if name != "average":
            made, fitted, more = way(bench)
            worse = matched and clearly_more(bench.hits(average), bench.hits(made))
            steps.append(bench.step(name, made, kept=not worse))
            remarks = (*remarks, *more)
            if worse:
                fitted = ()
                remarks = (*remarks, f"{name}: it lowers agreement, the average was kept")
            else:
                tensors = made
    wanted = "none" if endpoint and options.calibrate is None else options.calibration
    best = next(step for step in reversed(steps) if step.kept)
    tensors, tried, more = _calibrate(work, tensors, wanted, best)
    remarks = (*remarks, *more)
    if blend is not None:
        remarks = (
            *remarks,
            *_against_anchor(
                bench, tensors, behind, compared=len(every) > 1, required=options.require_gain
            ),
        )
    changed = {n: t for n, t in tensors.items() if t is not average[n]}
    return Improved(changed, bench.yardsticks(), (*steps, *tried), fitted, remarks)


def _blend(options: ImproveOptions, *, endpoint: bool, taught: bool) -> str | None:
    """What is tried; None: nothing is fitted. What was asked for is, whoever has the weight."""
    if not options.refits:
        return None
    if endpoint and options.blend in (None, "average"):
        return "average" if options.refit else None
    if taught and options.blend is None:
        return "average"
    return options.blending


def _against_anchor(
    bench: Bench, tensors: Tensors, behind: float | None, *, compared: bool, required: bool
) -> tuple[str, ...]:
    """A warning where the anchor alone does better by more than chance.

    Raises:
        GateFailed: The same, where a gain is required.
    """
    if behind is None:
        if compared:
            return ()
        anchor, own = bench.hits(bench.tensors[bench.anchor]), bench.hits(tensors)
        if not clearly_more(anchor, own):
            return ()
        behind = float(anchor.double().mean() - own.double().mean())
    does = "is right" if bench.judged.labels is not None else "agrees with the parents' ensemble"
    what = f"the result {does} on {100 * behind:.1f} % fewer inputs than the anchor alone"
    if required:
        raise GateFailed(
            what,
            where="--require-gain",
            why="no way of fusing these models is better than the anchor on the inputs",
            fix="give more inputs, give the better model more weight (--weights), or keep it",
        )
    return (f"{what}: keep the anchor, or give more inputs or other --weights",)


def _calibrate(
    work: Ways, tensors: Tensors, wanted: str, before: StepRecord
) -> tuple[Tensors, Sequence[StepRecord], tuple[str, ...]]:
    """Try what `--calibrate` says; keep what agrees more with the parents."""
    kinds = {"none": (), "auto": ("bn", "repair")}.get(wanted, (wanted,))
    best, steps, remarks = before, list[StepRecord](), tuple[str, ...]()
    for kind in kinds:
        trial = work.bench.calibrate(kind, work.fused.sources, tensors, work.left)
        if trial is None:
            if wanted != "auto":
                remarks = (*remarks, f"--calibrate {kind}: nothing to calibrate")
            continue
        found = work.bench.step(f"calibrate {kind}", trial)
        kept = found.agreement > best.agreement
        steps.append(found.replace(kept=kept))
        if kept:
            best, tensors = found, trial
    return tensors, steps, remarks
