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
from ..running.chance import clearly_more
from ..runtime import Stopwatch
from .bench import Bench, Tensors, Verdict
from .candidates import choose_way, ways
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
    first = bench.verdict(average)
    made = _Made(average, first)
    blend = _blend(options, endpoint=endpoint, taught=teachers is not None)
    if blend is not None:
        _take_a_way(work, made, blend, watch or Stopwatch(), matched=matched)
    if matched:  # after what runs the parents, and hears what they say
        made.steps.insert(0, first.step("average"))
    endpoint_only = endpoint and options.calibrate is None
    _calibrate(work, made, "none" if endpoint_only else options.calibration)
    if blend is not None:
        _compare_with_anchor(bench, made, required=options.require_gain)
    return Improved(
        {name: tensor for name, tensor in made.tensors.items() if tensor is not average[name]},
        bench.yardsticks(),
        tuple(made.steps),
        made.refits,
        tuple(made.remarks),
    )


@dataclass
class _Made:
    """The network as it is after the steps so far.

    Attributes:
        tensors: All of them.
        verdict: What it says on the inputs that are judged.
        steps: What each step gave, kept or not.
        refits: Layers that were fitted.
        remarks: What was left alone.
        compared: Ways were compared on inputs that were held out.
        behind: By how much the way that was taken was worse there than the anchor alone, where
            that is no chance.
    """

    tensors: Tensors
    verdict: Verdict
    steps: list[StepRecord] = field(default_factory=list)
    refits: tuple[RefitRecord, ...] = ()
    remarks: list[str] = field(default_factory=list)
    compared: bool = False
    behind: float | None = None


def _take_a_way(work: Ways, made: _Made, blend: str, watch: Stopwatch, *, matched: bool) -> None:
    """Make of the average what `--blend` says; of several ways the one that does best."""
    every = ways(work, blend)
    name, way = next(iter(every.items()))
    if len(every) > 1:
        chosen = choose_way(work, every, watch)
        name, way = chosen.name, chosen.way
        made.compared, made.behind = True, chosen.behind
        made.steps += chosen.steps
        made.remarks += chosen.remarks
    if name == "average":
        return
    tensors, refits, remarks = way(work.bench)
    verdict = work.bench.verdict(tensors)
    worse = matched and clearly_more(made.verdict.hits, verdict.hits)
    made.steps.append(verdict.step(name, kept=not worse))
    made.remarks += remarks
    if worse:
        made.remarks.append(f"{name}: it lowers agreement, the average was kept")
    else:
        made.tensors, made.verdict, made.refits = tensors, verdict, refits


def _blend(options: ImproveOptions, *, endpoint: bool, taught: bool) -> str | None:
    """What is tried; None: nothing is fitted. What was asked for is, whoever has the weight."""
    if not options.refits:
        return None
    if endpoint and options.blend in (None, "average"):
        return "average" if options.refit else None
    if taught and options.blend is None:
        return "average"
    return options.blending


def _calibrate(work: Ways, made: _Made, wanted: str) -> None:
    """Try what `--calibrate` says; keep what agrees more with the parents."""
    kinds = {"none": (), "auto": ("bn", "repair")}.get(wanted, (wanted,))
    for kind in kinds:
        trial = work.bench.calibrate(kind, work.fused.sources, made.tensors, work.left)
        if trial is None:
            if wanted != "auto":
                made.remarks.append(f"--calibrate {kind}: nothing to calibrate")
            continue
        verdict = work.bench.verdict(trial)
        kept = verdict.agreement > made.verdict.agreement
        made.steps.append(verdict.step(f"calibrate {kind}", kept=kept))
        if kept:
            made.tensors, made.verdict = trial, verdict


def _compare_with_anchor(bench: Bench, made: _Made, *, required: bool) -> None:
    """A remark where the anchor alone does better by more than chance.

    Raises:
        GateFailed: The same, where a gain is required.
    """
    behind = made.behind
    if not made.compared:
        anchor = bench.anchor_verdict()
        if clearly_more(anchor.hits, made.verdict.hits):
            behind = anchor.hit_rate - made.verdict.hit_rate
    if behind is None:
        return
    does = "is right" if bench.judged.labels is not None else "agrees with the parents' ensemble"
    what = f"the result {does} on {100 * behind:.1f} % fewer inputs than the anchor alone"
    if required:
        raise GateFailed(
            what,
            where="--require-gain",
            why="no way of fusing these models is better than the anchor on the inputs",
            fix="give more inputs, give the better model more weight (--weights), or keep it",
        )
    made.remarks.append(f"{what}: keep the anchor, or give more inputs or other --weights")
