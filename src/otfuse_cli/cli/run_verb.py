"""Verbs, run and shown: whatever one raises becomes an outcome with an exit code. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ..errors import ExitCode, OtfuseError, OutputRefused, UsageError
from ..requests.requests import STANDARD
from ..runtime import Progress, return_freed_memory, use_threads, wait_asleep
from . import render
from .options import RunOptions, build_request, split_values
from .render import Display, Outcome

if TYPE_CHECKING:
    from ..report.records import Report

Request = TypeVar("Request")
Verb = Callable[[Request, Progress], "Report"]


class Bug(OtfuseError):
    """Whatever nobody foresaw."""


class Interrupted(OtfuseError):
    """Ctrl-C."""

    exit_code = ExitCode.INTERRUPTED


def run_verb(
    name: str,
    verb: Verb[Request],
    request_type: Callable[..., Request],
    values: Mapping[str, Any],
) -> int:
    """Run a verb on Typer's values and show what came of it; returns the exit code."""
    assert isinstance(request_type, type)
    wait_asleep()
    return_freed_memory()
    keywords, options = split_values(request_type, values)
    view = _view(options, keywords)
    try:
        with render.progress(view) as progress:
            request = _request(request_type, keywords, view)
            if options.threads is not None:
                use_threads(options.threads)
            outcome = Outcome(name, report=verb(request, progress))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - becomes exit code 1
        outcome = Outcome(name, report=_report_of(error), error=foreseen(error))
    return show_outcome(outcome, view)


def show_outcome(outcome: Outcome, view: Display) -> int:
    """Show an outcome; what goes wrong in showing it is an outcome too."""
    try:
        render.show(outcome, view)
    except OSError as error:
        refused = OutputRefused("can't write to standard output", why=error.strerror or str(error))
        refused.__cause__ = error
        outcome = Outcome(outcome.command, error=refused)
        render.show(outcome, replace(view, json=False))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - becomes exit code 1
        outcome = Outcome(outcome.command, error=foreseen(error))
        render.show(outcome, view)
    return outcome.exit_code


def foreseen(error: BaseException) -> OtfuseError:
    """Any exception as one with an exit code."""
    if isinstance(error, OtfuseError):
        return error
    wrapped: OtfuseError
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        wrapped = Interrupted("interrupted")
    elif hasattr(error, "format_message"):  # Typer's own, whichever class it has in this version
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "otfuse"
        wrapped = UsageError(error.format_message(), fix=f"see {path} --help")
    else:
        lines = str(error).strip().splitlines()
        wrapped = Bug(
            f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__,
            fix="run with --debug for the traceback",
        )
    wrapped.__cause__ = error
    return wrapped


def _request(
    request_type: Callable[..., Request], keywords: dict[str, Any], view: Display
) -> Request:
    if view.json and view.report == STANDARD:
        raise UsageError(
            "two results for one standard output",
            where="--json --report -",
            why="the envelope of --json holds the report already",
            fix="leave one of the two out",
        )
    request: Request = build_request(request_type, keywords)
    return request


def _view(options: RunOptions, keywords: dict[str, Any]) -> Display:
    return Display(
        json=options.json,
        quiet=options.quiet,
        verbose=options.verbose,
        debug=options.debug,
        graph=keywords.get("graph", False),
        costs="ot_costs" in keywords,
        report=keywords.get("report"),
    )


def _report_of(error: BaseException) -> Report | None:
    from ..report.records import Report

    report = getattr(error, "report", None)
    return report if isinstance(report, Report) else None
