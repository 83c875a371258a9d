"""`curve`: what lies between two checkpoints, plainly averaged and fused (the paper's figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

import torch

from .. import __version__
from ..errors import UsageError
from ..fusion.average import Aligned, average
from ..fusion.repair import Repair, plan_repair
from ..matching.barycenter import iterate
from ..matching.match import match
from ..matching.models import Model
from ..matching.passes import realign
from ..plot.charts import LineChart, Picture, Series, Style
from ..plot.save import check_plot, write_picture
from ..report.records import Report
from ..requests.recipe import Recipe
from ..requests.requests import CurveRequest
from ..running.architecture import module_state
from ..running.evaluation import Score
from ..runtime import Progress, Runtime, Stopwatch, peak_rss_bytes, resolve_device, silent
from ..session.architectures import arch_of_each, arch_record
from ..session.function_check import check_function
from ..session.graph_records import graph_record
from ..session.parents import Parents, assemble, open_checkpoints
from .curve_widths import run_width_curve
from .evaluate import Evaluator, finite, measured_on, remarks, set_up

Curve = dict[float, Score]

_ANCHOR = 1
_STYLES: tuple[Style, ...] = ("dashed", "solid")


def run_curve(request: CurveRequest, *, progress: Progress = silent) -> Report:
    """Measure the averages of two checkpoints for weights of the second, the anchor, from 0 to 1.

    Over widths, what joint fusion makes of any number of them.

    Raises:
        OtfuseError: See docs/exit-codes.md.
    """
    recipe = request.recipe()
    if request.over == "width":
        return run_width_curve(request, progress)
    _check(request, recipe)
    watch = Stopwatch()
    runtime = Runtime(resolve_device(request.device), recipe.seed, progress)
    with open_checkpoints(request.checkpoints, request.key) as checkpoints:
        with watch("graph"):
            parents = assemble(
                checkpoints,
                _ANCHOR,
                request.arch,
                runtime.device,
                free_outputs=request.free_outputs,
                untie=request.untie,
            )
        with watch("read"):
            arch = arch_of_each(request.arch, len(checkpoints))[_ANCHOR]
            bench = set_up(request, parents.shared_architecture, arch, recipe.seed, runtime.device)
            inputs = tuple(c.record() for c in checkpoints)
        work = _Curves(request, recipe, runtime, watch, parents, bench)
        report = Report(
            command="curve",
            version=__version__,
            inputs=inputs,
            graph=graph_record(parents.anchor.graph),
        )
        report = report.replace(warnings=work.plain())
        if recipe.align != "none":
            report = work.fused(report)
        labels = [c.label for c in checkpoints]
    curves = work.curves
    scores = {f"{n} at {w:.4g}": s for n, points in curves.items() for w, s in points.items()}
    report = report.replace(
        recipe=_recipe(request, recipe, runtime),
        evaluation={
            "samples": bench.samples.count,
            "weight of": labels[_ANCHOR],
            **_columns(curves),
            "loss barrier": {name: barrier(points) for name, points in curves.items()},
        },
        warnings=(
            *parents.warnings,
            *report.warnings,
            *remarks(parents.shared_architecture, scores),
        ),
        timings=dict(watch.seconds),
        peak_rss_bytes=peak_rss_bytes(),
    )
    if request.plot is not None:
        write_picture(request.plot, _picture(curves, labels), overwrite=request.overwrite)
    return report


def barrier(points: Mapping[float, Score]) -> float | None:
    """How far the loss rises above the line between the ends, at most; None without finite ones."""
    losses = {w: score.cross_entropy for w, score in points.items()}
    if not all(map(isfinite, losses.values())):
        return None
    first, last = losses[min(losses)], losses[max(losses)]
    return max(loss - ((1 - w) * first + w * last) for w, loss in losses.items())


def _check(request: CurveRequest, recipe: Recipe) -> None:
    count = len(request.checkpoints)
    if count != 2:
        raise UsageError(
            f"a curve lies between two checkpoints, not {count}",
            where="CKPT CKPT",
            fix="name two; the second one has weight 1 at the right end",
        )
    given = {"widths": request.widths, "inputs": request.inputs, "num-inputs": request.num_inputs}
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"--{name} means nothing along weights",
                where="--over weight",
                why="nothing is fitted there, and the width is that of the second checkpoint",
                fix="add --over width, or leave it out",
            )
    if recipe.align == "acts" or recipe.mass == "importance":
        raise UsageError(
            "a curve is matched by weights alone",
            where="--align acts" if recipe.align == "acts" else "--mass importance",
            why="its samples are there to measure on",
            fix="fuse with otfuse merge --samples, and measure with otfuse eval",
        )
    if request.plot is not None:
        check_plot(request.plot, overwrite=request.overwrite)


def _same_shapes(parents: Parents) -> bool:
    first, second = ({n: i.shape for n, i in m.checkpoint.infos.items()} for m in parents.models)
    return first == second


@dataclass
class _Curves:
    """Two models, measured on the way from one to the other.

    Attributes:
        request: What was asked for.
        recipe: How units are matched.
        runtime: Device, seed, progress.
        watch: Takes the time.
        parents: The models.
        bench: What they are measured on.
        curves: Scores by name of the curve and weight of the anchor.
    """

    request: CurveRequest
    recipe: Recipe
    runtime: Runtime
    watch: Stopwatch
    parents: Parents
    bench: Evaluator
    curves: dict[str, Curve] = field(default_factory=dict)

    @property
    def source(self) -> Model:
        """The model that is not the anchor."""
        (source,) = self.parents.sources
        return source

    def plain(self) -> tuple[str, ...]:
        """Measure plain averages; a remark where there are none."""
        if self.recipe.align != "none" and not _same_shapes(self.parents):
            return ("the checkpoints differ in width: there is no plain average",)
        still = replace(self.recipe, align="none", repair="none")
        with self.watch("match"):
            unmoved = match(self.source, self.parents.anchor, still, self.runtime)
        self._measure("plain", Aligned(self.source, unmoved.alignment, 0.5), None)
        return ()

    def fused(self, report: Report) -> Report:
        """Measure averages of matched units; the report with what matching gave."""
        parents, recipe = self.parents, self.recipe
        with self.watch("match"):
            first = [match(self.source, parents.anchor, recipe, self.runtime)]
            how = parents.anchor, (0.5, 0.5), recipe, self.runtime
            realigned = realign([self.source], first, *how)
            (matched,), rounds = iterate([self.source], realigned, *how)
        aligned = Aligned(self.source, matched.alignment, 0.5)
        with self.watch("check"):
            checks, unchecked = check_function(parents, [aligned])
        repair = plan_repair(parents.anchor.graph) if recipe.repair == "auto" else None
        self._measure("fused", aligned, repair)
        return report.replace(
            rounds=rounds,
            spaces=matched.spaces,
            layers=matched.layers,
            candidates=matched.candidates,
            checks=checks,
            warnings=(*report.warnings, *matched.warnings, *unchecked),
        )

    def _measure(self, name: str, aligned: Aligned, repair: Repair | None) -> None:
        """Scores for each weight of the anchor; the ends are the models themselves."""
        steps = self.request.steps
        scores: Curve = {}
        with self.watch("evaluate"):
            for done in range(steps):
                self.runtime.progress("evaluate", done, steps)
                weight = done / (steps - 1)
                scores[weight] = self._score(aligned, weight, repair)
        self.curves[name] = scores

    def _score(self, aligned: Aligned, weight: float, repair: Repair | None) -> Score:
        anchor = self.parents.anchor
        sources = [replace(aligned, weight=1 - weight)] if weight < 1 else []
        inner = repair if 0 < weight < 1 else None
        tensors: dict[str, torch.Tensor] = {}
        for name, info in anchor.checkpoint.infos.items():
            dtype = torch.float32 if info.dtype.is_floating_point else info.dtype
            tensors[name] = average(name, anchor, sources, dtype=dtype, repair=inner)
        bench = self.bench
        return bench.score(module_state(bench.network, bench.names, tensors.__getitem__))


def _columns(curves: Mapping[str, Curve]) -> dict[str, dict[str, float | None]]:
    """One mapping of weights to numbers for each curve and measure."""
    columns: dict[str, dict[str, float | None]] = {}
    for name, points in curves.items():
        at = {f"{w:.4g}": score for w, score in points.items()}
        columns[f"{name} accuracy"] = {w: score.accuracy for w, score in at.items()}
        columns[f"{name} cross-entropy"] = {w: finite(s.cross_entropy) for w, s in at.items()}
    return columns


def _recipe(request: CurveRequest, recipe: Recipe, runtime: Runtime) -> dict[str, object]:
    return {
        **recipe.to_dict(),
        "anchor": _ANCHOR,
        "arch": arch_record(request.arch, len(request.checkpoints)),
        "paper": request.paper,
        "over": request.over,
        "steps": request.steps,
        "untie": request.untie,
        **measured_on(request),
        "device": runtime.device,
    }


def _picture(curves: Mapping[str, Curve], labels: Sequence[str]) -> Picture:
    first, last = (Path(label).name for label in labels)
    charts = []
    for title, unit, value in (
        ("Accuracy", "%", lambda s: s.accuracy),
        ("Loss", "cross-entropy, nats", lambda s: finite(s.cross_entropy)),
    ):
        lines = []
        for (name, points), style in zip(curves.items(), _STYLES, strict=False):
            heights = tuple(value(score) for score in points.values())
            lines.append(Series(name, tuple(points), heights, style))
        charts.append(LineChart(title, f"weight of {last}", unit, tuple(lines)))
    rises = {name: barrier(points) for name, points in curves.items()}
    note = ", ".join(f"{name} {rise:.3g}" for name, rise in rises.items() if rise is not None)
    return Picture(f"{first} to {last}", f"loss barrier: {note}" if note else "", tuple(charts))
