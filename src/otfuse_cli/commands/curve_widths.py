"""`curve --over width`: what joint fusion makes of checkpoints at several widths, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from .. import __version__
from ..errors import UsageError
from ..plot.charts import LineChart, Picture, Series, Style
from ..plot.save import check_plot, write_picture
from ..report.records import Report
from ..requests.recipe import Recipe
from ..requests.requests import CurveRequest, MergeRequest
from ..running.architecture import module_state
from ..running.evaluation import Score
from ..runtime import Progress, Stopwatch, peak_rss_bytes, resolve_device
from ..session.architectures import arch_of_each, arch_record
from ..session.graph_records import graph_record
from ..session.parents import Parents, assemble, open_checkpoints
from ..session.widened import wide_architecture
from ..session.width_rules import require_factor
from .evaluate import (
    Evaluator,
    distinct,
    finite,
    for_each,
    measured_on,
    measures,
    remarks,
    set_up,
    together,
)
from .merge import merge_tensors

# Between the anchor's width and that of all checkpoints together.
_STEP = 0.25
_ENSEMBLE = "ensemble (logits)"


@dataclass(frozen=True)
class _Point:
    """One width: what the network is worth, its parameters, and what was said of it."""

    score: Score
    parameters: int
    warnings: tuple[str, ...]


def run_width_curve(request: CurveRequest, progress: Progress) -> Report:
    """Fuse the checkpoints at every width, and measure what comes out beside them.

    Raises:
        OtfuseError: See docs/exit-codes.md.
    """
    count = len(request.checkpoints)
    _check(request)
    watch, device = Stopwatch(), resolve_device(request.device)
    with open_checkpoints(request.checkpoints, request.key) as checkpoints:
        with watch("graph"):
            parents = assemble(
                checkpoints,
                count - 1,
                request.arch,
                device,
                free_outputs=request.free_outputs,
                untie=request.untie,
            )
        with watch("read"):
            arch = arch_of_each(request.arch, count)[-1]
            bench = set_up(request, parents.shared_architecture, arch, request.seed, device)
            inputs = tuple(c.record() for c in checkpoints)
        with watch("evaluate"):
            names = distinct([c.label for c in checkpoints])
            alone = together(for_each(bench, parents), names, parents.models, progress)
    points, widths = {}, _widths(request)
    for done, width in enumerate(widths):
        progress("evaluate", done, len(widths))
        with watch(f"width {width:g}"):
            points[width] = _point(request, parents, bench, width)
    if request.plot is not None:
        picture = _picture(alone, points, names)
        write_picture(request.plot, picture, overwrite=request.overwrite)
    said: list[str] = []
    for width, point in points.items():
        said.extend(f"width {width:g}: {warning}" for warning in point.warnings)
    scores = {**alone, **{f"width {width:g}": p.score for width, p in points.items()}}
    return Report(
        command="curve",
        version=__version__,
        inputs=inputs,
        recipe=_recipe(request, device),
        graph=graph_record(parents.anchor.graph),
        evaluation={
            "samples": bench.samples.count,
            "width of": names[-1],
            **measures(alone),
            **_columns(points),
        },
        warnings=(
            *parents.warnings,
            *said,
            *remarks(parents.shared_architecture, scores),
        ),
        timings=dict(watch.seconds),
        peak_rss_bytes=peak_rss_bytes(),
    )


def _check(request: CurveRequest) -> None:
    """Refuse what can't be meant, and a picture that can't be drawn, before any work is done."""
    if len(request.checkpoints) < 2:
        raise UsageError(
            "nothing to fuse at several widths",
            where="CKPT CKPT...",
            fix="name two or more; widths are relative to the last one",
        )
    matching = [f.name for f in fields(Recipe) if f.name != "seed"]
    given = [name for name in matching if getattr(request, name, None) is not None]
    if given or request.paper:
        flag = f"--{given[0].replace('_', '-')}" if given else "--paper"
        raise UsageError(
            f"{flag} means nothing along widths",
            where="--over width",
            why="joint fusion matches no units",
            fix="leave it out",
        )
    for width in _widths(request):
        require_factor(f"--widths {width:g}", width, len(request.checkpoints))
    if request.plot is not None:
        check_plot(request.plot, overwrite=request.overwrite)


def _widths(request: CurveRequest) -> tuple[float, ...]:
    """The widths asked for, in ascending order."""
    if request.widths is not None:
        return tuple(sorted(set(request.widths)))
    steps = round((len(request.checkpoints) - 1) / _STEP)
    return tuple(1 + _STEP * step for step in range(steps + 1))


def _point(request: CurveRequest, parents: Parents, bench: Evaluator, width: float) -> _Point:
    """Fuse at one width, and measure."""
    from ..running.runnable import network_at

    merge = MergeRequest(
        checkpoints=request.checkpoints,
        width=width,
        arch=request.arch,
        key=request.key,
        samples=request.inputs,
        synthetic=request.inputs is None,
        num_samples=request.num_inputs,
        free_outputs=request.free_outputs,
        untie=request.untie,
        seed=request.seed,
        device=request.device,
    )
    tensors, report = merge_tensors(merge)
    assert report.widened is not None
    arch = arch_of_each(request.arch, len(request.checkpoints))[-1]
    sizes = {space.id: space.units for space in report.widened.spaces}
    architecture = wide_architecture(parents, arch, sizes)
    wide = replace(bench, network=network_at(architecture, tensors), names=architecture.names)
    score = wide.score(module_state(wide.network, wide.names, tensors.__getitem__))
    return _Point(score, report.widened.parameters, report.warnings)


def _columns(points: Mapping[float, _Point]) -> dict[str, dict[str, float | None]]:
    """One mapping of widths to numbers for each measure."""
    at = {f"{width:g}": point for width, point in points.items()}
    return {
        "fused accuracy": {width: point.score.accuracy for width, point in at.items()},
        "fused cross-entropy": {w: finite(p.score.cross_entropy) for w, p in at.items()},
        "parameters": {width: point.parameters for width, point in at.items()},
    }


def _recipe(request: CurveRequest, device: str) -> dict[str, object]:
    source = request.inputs
    return {
        "arch": arch_record(request.arch, len(request.checkpoints)),
        "anchor": len(request.checkpoints) - 1,
        "over": request.over,
        "widths": list(_widths(request)),
        "inputs": str(source) if isinstance(source, str | Path) else None,
        "synthetic": source is None,
        "num_inputs": request.num_inputs,
        "untie": request.untie,
        **measured_on(request),
        "device": device,
        "seed": request.seed,
    }


def _picture(
    alone: Mapping[str, Score], points: Mapping[float, _Point], names: Sequence[str]
) -> Picture:
    """Accuracy and loss against parameters; parents and ensemble as horizontal lines."""
    sizes = tuple(point.parameters / 1000 for point in points.values())
    charts = []
    for title, unit, value in (
        ("Accuracy", "%", lambda s: s.accuracy),
        ("Loss", "cross-entropy, nats", lambda s: finite(s.cross_entropy)),
    ):
        lines = [Series("fused", sizes, tuple(value(p.score) for p in points.values()))]
        for name in (*names, _ENSEMBLE):
            style: Style = "dotted" if name == _ENSEMBLE else "dashed"
            height = value(alone[name])
            ends = (sizes[0], sizes[-1])
            lines.append(Series(Path(name).name, ends, (height, height), style))
        charts.append(LineChart(title, "parameters, thousands", unit, tuple(lines)))
    note = "widths, relative to the last checkpoint: " + ", ".join(f"{w:g}" for w in points)
    return Picture("Joint fusion at several widths", note, tuple(charts))
