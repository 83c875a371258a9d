"""`curve`: what lies between two checkpoints, plainly averaged and fused (the paper's figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

import torch

from .. import __version__
from ..errors import UsageError
from ..fusion.average import Aligned, average
from ..fusion.repair import Repair, plan_repair
from ..matching.match import match
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
from ..session.parents import Parents, assemble, graph_record, open_checkpoints
from .evaluate import Evaluator, finite, measured_on, remarks, set_up

Curve = dict[float, Score]

_ANCHOR = 1
_STYLES: tuple[Style, ...] = ("dashed", "solid")


def run_curve(request: CurveRequest, *, progress: Progress = silent) -> Report:
    """Measure the averages of two checkpoints for weights of the second, the anchor, from 0 to 1.

    Raises:
        OtfuseError: See docs/exit-codes.md.
    """
    recipe = request.recipe()
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
            bench = set_up(request, parents.known, arch, recipe.seed, runtime.device)
            inputs = tuple(c.record() for c in checkpoints)
        (source,) = parents.sources
        weights = [at / (request.steps - 1) for at in range(request.steps)]
        curves: dict[str, Curve] = {}
        notes: tuple[str, ...] = ()
        if recipe.align != "none" and not _same_shapes(parents):
            notes = ("the checkpoints differ in width: there is no plain average",)
        else:
            still = replace(recipe, align="none", repair="none")
            with watch("match"):
                plain = match(source, parents.anchor, still, runtime)
            with watch("evaluate"):
                aligned = Aligned(source, plain.alignment, 0.5)
                curves["plain"] = _measure(parents, aligned, bench, weights, None, runtime)
        report = Report(
            command="curve",
            version=__version__,
            inputs=inputs,
            graph=graph_record(parents.anchor.graph),
        )
        if recipe.align != "none":
            with watch("match"):
                found = [match(source, parents.anchor, recipe, runtime)]
                found = realign([source], found, parents.anchor, (0.5, 0.5), recipe, runtime)
            aligned = Aligned(source, found[0].alignment, 0.5)
            with watch("check"):
                checks, unchecked = check_function(parents, [aligned])
            repair = plan_repair(parents.anchor.graph) if recipe.repair == "auto" else None
            with watch("evaluate"):
                curves["fused"] = _measure(parents, aligned, bench, weights, repair, runtime)
            report = report.replace(
                spaces=found[0].spaces,
                layers=found[0].layers,
                candidates=found[0].candidates,
                checks=checks,
                warnings=(*notes, *found[0].warnings, *unchecked),
            )
        labels = [c.label for c in checkpoints]
    scores = {f"{n} at {w:.4g}": s for n, points in curves.items() for w, s in points.items()}
    report = report.replace(
        recipe=_recipe(request, recipe, runtime),
        evaluation={
            "samples": bench.samples.count,
            "weight of": labels[_ANCHOR],
            **_columns(curves),
            "loss barrier": {name: barrier(points) for name, points in curves.items()},
        },
        warnings=(*parents.warnings, *report.warnings, *remarks(parents.known, scores)),
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


def _measure(
    parents: Parents,
    aligned: Aligned,
    bench: Evaluator,
    weights: Sequence[float],
    repair: Repair | None,
    runtime: Runtime,
) -> Curve:
    """Scores for each weight of the anchor; the ends are the models themselves."""
    anchor, found = parents.anchor, {}
    for done, weight in enumerate(weights):
        runtime.progress("evaluate", done, len(weights))
        sources = [replace(aligned, weight=1 - weight)] if weight < 1 else []
        inner = repair if 0 < weight < 1 else None
        tensors: dict[str, torch.Tensor] = {}
        for name, info in anchor.checkpoint.infos.items():
            dtype = torch.float32 if info.dtype.is_floating_point else info.dtype
            tensors[name] = average(name, anchor, sources, dtype=dtype, repair=inner)
        found[weight] = bench.score(module_state(bench.network, bench.names, tensors.__getitem__))
    return found


def _columns(curves: Mapping[str, Curve]) -> dict[str, dict[str, float | None]]:
    """One mapping of weights to numbers for each curve and measure."""
    found: dict[str, dict[str, float | None]] = {}
    for name, points in curves.items():
        at = {f"{w:.4g}": score for w, score in points.items()}
        found[f"{name} accuracy"] = {w: score.accuracy for w, score in at.items()}
        found[f"{name} cross-entropy"] = {w: finite(s.cross_entropy) for w, s in at.items()}
    return found


def _recipe(request: CurveRequest, recipe: Recipe, runtime: Runtime) -> dict[str, object]:
    return {
        **recipe.to_dict(),
        "anchor": _ANCHOR,
        "arch": arch_record(request.arch, len(request.checkpoints)),
        "paper": request.paper,
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
        series = tuple(
            Series(name, tuple(points), tuple(value(s) for s in points.values()), style)
            for (name, points), style in zip(curves.items(), _STYLES, strict=False)
        )
        charts.append(LineChart(title, f"weight of {last}", unit, series))
    rises = {name: barrier(points) for name, points in curves.items()}
    note = ", ".join(f"{name} {rise:.3g}" for name, rise in rises.items() if rise is not None)
    return Picture(f"{first} to {last}", f"loss barrier: {note}" if note else "", tuple(charts))
