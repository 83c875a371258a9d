"""The one renderer, and the only module that prints: an outcome as text, or as a JSON envelope.

Results go to standard output, everything else to standard error. Off a terminal, tables are as
wide as their content, so that nothing is cut in a pipe. Imports no torch; rich only when needed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .. import __version__
from ..errors import NETWORKS, ExitCode, OtfuseError
from ..remote.location import location
from ..requests.requests import STANDARD
from ..runtime import Progress, silent
from . import comparisons, outcomes, tables
from .closing import closing
from .tables import Look

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.table import Table

    from ..report.records import Report

_BARS_FROM = 72  # narrower terminals do without bars
_PLAIN_WIDTH = 100_000


@dataclass(frozen=True, kw_only=True)
class Display:
    """How an outcome is to be shown.

    Attributes:
        json: One envelope on standard output instead of text.
        quiet: Nothing but errors.
        verbose: Everything the report holds.
        debug: Tracebacks.
        graph: Spaces and pinned axes in full.
        costs: Costs per layer too.
        report: Where the report went, if not beside the output; `-`: it is what is shown.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    graph: bool = False
    costs: bool = False
    report: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How a command ended: a report, an error, or both (a gate that failed).

    `command` is None when the command line named none that exists.
    """

    command: str | None
    report: Report | None = None
    error: OtfuseError | None = None

    @property
    def exit_code(self) -> ExitCode:
        """The status that the process ends with."""
        return ExitCode.OK if self.error is None else self.error.exit_code

    def envelope(self) -> dict[str, Any]:
        """What `--json` prints (docs/report.md)."""
        from ..report.records import ENVELOPE

        return {
            "schema": ENVELOPE,
            "command": self.command,
            "exit_code": int(self.exit_code),
            "report": None if self.report is None else self.report.to_dict(),
            "error": None if self.error is None else self.error.to_dict(),
        }


def show(outcome: Outcome, view: Display) -> None:
    """Print an outcome. A reader that closed the pipe is no error."""
    if view.debug and outcome.error is not None:
        _write(sys.stderr, "".join(traceback.format_exception(outcome.error)))
    if view.json:
        _write(sys.stdout, json.dumps(outcome.envelope(), indent=2, allow_nan=False) + "\n")
    elif outcome.report is not None and view.report == STANDARD:
        _write(sys.stdout, outcome.report.to_json())
    elif outcome.report is not None and not view.quiet:
        _print_report(outcome.report, view)
        _write(sys.stderr, _asides(outcome))
    if outcome.error is not None and not view.json:
        _print_error(outcome.error)


def _asides(outcome: Outcome) -> str:
    """Warnings, and once what nobody has proven, where that led to a result."""
    report = outcome.report
    assert report is not None
    told = [f"warning: {tables.clean(w)}\n" for w in report.warnings]
    if report.checks.function == "assumed" and outcome.error is None:
        assumption = tables.clean(report.checks.assumption or "")
        told.insert(0, f"assumed: {assumption}; prove it with {NETWORKS}\n")
    return "".join(told)


def show_text(text: str) -> None:
    """Print a help page."""
    _write(sys.stdout, text)


def show_version() -> None:
    """Print the program's name and version."""
    _write(sys.stdout, f"otfuse {__version__}\n")


@contextmanager
def progress(view: Display) -> Iterator[Progress]:
    """A sink for progress: bars on standard error, if that is a terminal; otherwise nothing."""
    if view.quiet or sys.stderr is None or not sys.stderr.isatty():
        yield silent
        return
    with ExitStack() as stack:
        bars: Bars | None = None
        tasks: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            nonlocal bars
            if bars is None:  # nothing to draw, and no rich to import, before the first step
                bars = stack.enter_context(_bars())
            if stage not in tasks:
                tasks[stage] = bars.add_task(tables.clean(stage), total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield advance


def _bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr, markup=False, highlight=False),
        transient=True,
    )


class _Sheet:
    """Lines and tables gathered for a stream: for a terminal, or plain and never wrapped."""

    def __init__(self, stream: TextIO | None) -> None:
        from rich.console import Console

        self.stream = stream
        self.terminal = stream is not None and stream.isatty()
        self.gathered = StringIO()
        self.console: Console = Console(
            file=self.gathered,
            width=None if self.terminal else _PLAIN_WIDTH,
            color_system="auto" if self.terminal else None,
            force_terminal=self.terminal,
            markup=False,
            highlight=False,
            emoji=False,
        )

    def look(self, verbose: bool) -> Look:
        encoding = getattr(self.stream, "encoding", None) or "ascii"
        return Look(
            bars=not self.terminal or self.console.width >= _BARS_FROM,
            blocks=("█", "░") if encoding.lower().startswith("utf") else ("#", "."),
            verbose=verbose,
        )

    def line(self, text: str = "", style: str | None = None) -> None:
        self.console.print(text, style=style, soft_wrap=True)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Labels and values, values in one column."""
        width = max((len(label) for label, _ in rows), default=0)
        for label, value in rows:
            self.line(f"{label:<{width}}  {tables.clean(value)}")

    def table(self, title: str, table: Table) -> None:
        """A table under its title, after an empty line."""
        self.line()
        self.line(title, style="bold")
        self.console.print(table)

    def paragraph(self, text: str | None) -> None:
        """A sentence after an empty line, wrapped on a terminal; None is nothing."""
        if text is not None:
            self.line()
            self.console.print(text)

    def print(self) -> None:
        """Write what was gathered; off a terminal without trailing blanks."""
        text = self.gathered.getvalue()
        if not self.terminal:
            text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        _write(self.stream, text)


def _print_report(report: Report, view: Display) -> None:
    sheet = _Sheet(sys.stdout)
    look = sheet.look(view.verbose)
    _print_head(sheet, report, view)
    if report.inputs:
        sheet.table("Inputs", tables.inputs(report, look))
    if report.tensors and _lists_tensors(report, view):
        sheet.table("Tensors", tables.tensors(report))
    if report.differences:
        sheet.table("Differences", comparisons.difference_table(report, look))
    _print_costs(sheet, report, view, look)
    if report.graph is not None and (view.graph or view.verbose):
        for title, table in tables.graph(report):
            sheet.table(title, table)
    _print_search(sheet, report, view)
    _print_sizes(sheet, report, view)
    if report.steps:
        teacher = "the whole network" if report.command == "prune" else "the parents' ensemble"
        sheet.table(f"Steps, by agreement with {teacher}", outcomes.steps(report))
    if report.refits and view.verbose:
        sheet.table("Refitted layers", outcomes.refits(report))
    if report.evaluation:
        _print_evaluation(sheet, report.evaluation, look)
    if view.verbose:
        sheet.line()
        seconds = [(stage, f"{value:.2f} s") for stage, value in report.timings.items()]
        sheet.pairs([*seconds, ("peak memory", f"{report.peak_rss_bytes / 2**20:.0f} MiB")])
    sheet.paragraph(closing(report))
    sheet.print()


def _print_costs(sheet: _Sheet, report: Report, view: Display, look: Look) -> None:
    """Of spaces, of layers where that was asked for, of all pairs."""
    if any(space.ot_cost is not None for space in report.spaces):
        sheet.table(tables.cost_title("Spaces", look), tables.spaces(report, look))
    has_layers = any(layer.ot_cost is not None for layer in report.layers)
    if has_layers and (view.costs or view.verbose):
        sheet.table(tables.cost_title("Layers", look), tables.layer_table(report, look))
    if report.pairs:
        sheet.table("All pairs: OT cost of row to column", comparisons.pairs(report))


def _print_search(sheet: _Sheet, report: Report, view: Display) -> None:
    """How maps were found: candidates, rounds, and what stands for what in other depths."""
    compared = len(report.candidates) > len({c.source for c in report.candidates})
    if compared or (report.candidates and view.verbose):
        sheet.table("Candidates", outcomes.candidates(report))
    if report.rounds:
        sheet.table("Rounds", outcomes.rounds(report))
    for record in report.depth:
        what = f"checkpoint {record.source} stand for the anchor's, by linear CKA"
        sheet.table(f"Layers of {what}", comparisons.depth_table(record))


def _lists_tensors(report: Report, view: Display) -> bool:
    """One checkpoint is described in full; with several, or a graph, on request."""
    alone = report.command == "inspect" and len(report.inputs) == 1 and not view.graph
    return alone or view.verbose


def _print_head(sheet: _Sheet, report: Report, view: Display) -> None:
    """Output, report, graph, recipe and checks: one line each."""
    rows: list[tuple[str, str]] = []
    for record in report.output:
        rows.append(("output", record.path))
        rows.append(("", tables.describe(record)))
        if record.sha256 is not None:
            rows.append(("sha256", record.sha256))
    if view.report is not None or report.output:
        from ..report.files import report_beside

        where = view.report or report_beside(location(report.output[0].path))
        rows.append(("report", str(where)))
    if report.graph is not None:
        told = "" if view.graph or view.verbose else " (-v names them)"
        rows.append(("network", tables.network(report.graph) + told * bool(report.graph.pinned)))
    if report.estimate is not None:
        rows += comparisons.estimate_table(report.estimate)
    if report.recipe and (report.output or report.spaces or report.evaluation or view.verbose):
        settings = outcomes.recipe_settings(report, view.verbose)
        if settings:
            rows.append(("recipe", " ".join(f"{k}={tables.as_text(v)}" for k, v in settings)))
    if report.checks.function is not None:
        rows.append(("function", tables.verdict(report.checks)))
    sheet.pairs(rows)


def _print_sizes(sheet: _Sheet, report: Report, view: Display) -> None:
    """What was pruned or widened, by layer where that is news, and what else has to change."""
    if report.pruning is not None:
        if report.pruning.blocks:
            sheet.table("Removed", outcomes.removed_blocks(report))
        else:
            sheet.table("Pruned", outcomes.pruned_spaces(report))
        if report.command == "prune" or view.verbose:
            sheet.table("Sparsity", outcomes.pruned_layers(report))
        _print_advice(sheet, report.pruning.advice)
    if report.widened is not None:
        sheet.table("Widths", outcomes.widened_spaces(report.widened))
        _print_advice(sheet, report.widened.advice)


def _print_advice(sheet: _Sheet, advice: Sequence[str]) -> None:
    """What else has to change."""
    if not advice:
        return
    sheet.line()
    sheet.line("To do", style="bold")
    for text in advice:
        sheet.line(tables.clean(text))


def _print_evaluation(sheet: _Sheet, evaluation: Mapping[str, Any], look: Look) -> None:
    """Plain values as lines; mappings of names to numbers as tables, one for equal names."""
    mappings = {key: value for key, value in evaluation.items() if isinstance(value, Mapping)}
    sheet.line()
    sheet.pairs([(k, tables.as_text(v)) for k, v in evaluation.items() if k not in mappings])
    alike: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for key, values in mappings.items():
        alike.setdefault(tuple(values), {})[key] = values
    for columns in alike.values():
        if len(columns) > 1:
            sheet.console.print(outcomes.side_by_side(columns))
            continue
        for key, values in columns.items():
            sheet.console.print(outcomes.score_table(key, values, look))


def _print_error(error: OtfuseError) -> None:
    sheet = _Sheet(sys.stderr)
    sheet.line(f"error: {tables.clean(error.what)}", style="bold red")
    for label, text in (("where", error.where), ("why", error.why), ("fix", error.fix)):
        if text is not None:
            sheet.line(f"{label}: {tables.clean(text)}")
    sheet.print()


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None or not text:
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _silence(stream)


def _silence(stream: TextIO | None) -> None:
    """Point a stream that nobody reads at nothing, or its flush at exit would complain."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
