"""Reports as files: where one lies, reading it back, and the gate on its costs.

For verbs and the command line alike; knows no networks and no checkpoints.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from .errors import GateFailed, UnreadableInput, UsageError
from .report import ENVELOPE, Report, report_from_dict

EXAMPLES = (
    "otfuse inspect a.pt b.pt --ot-costs",
    "otfuse merge a.pt b.pt -o fused.pt --json | otfuse inspect --ot-costs",
)


def report_beside(checkpoint: Path) -> Path:
    """Where the report of a checkpoint lies: `fused.pt` -> `fused.report.json`; inside a folder."""
    if checkpoint.is_dir() or (not checkpoint.exists() and is_folder_name(checkpoint)):
        return checkpoint / f"{checkpoint.resolve().name}.report.json"
    return checkpoint.with_suffix(".report.json")


def is_folder_name(path: Path) -> bool:
    """Whether an output of this name is a folder: it has no suffix (one begins with a letter)."""
    return not path.suffix[1:2].isalpha()


def read_beside(checkpoint: Path) -> Report:
    """The report that was written beside `checkpoint`.

    Raises:
        UnreadableInput: There is none, or it isn't a report.
    """
    path = report_beside(checkpoint)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UnreadableInput(
            "no report beside the checkpoint",
            where=str(path),
            why="the OT costs of one checkpoint are those of the fusion that made it",
            fix="name two checkpoints to compare them, or pipe a report: "
            "otfuse inspect --ot-costs < PATH",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableInput("can't read the report", where=str(path), why=str(error)) from error
    return parse(text, where=str(path))


def read_pipe(stream: TextIO | None) -> Report:
    """The report, or the report in a `--json` envelope, that a pipe or redirected file holds.

    Raises:
        UsageError: `stream` is a terminal, or empty: nothing was given to look at.
        UnreadableInput: It holds something else.
    """
    text = ""
    if stream is not None and _is_piped(stream):
        try:
            text = stream.read()
        except UnicodeDecodeError as error:
            raise UnreadableInput(
                "not a report", where="standard input", why="it isn't text"
            ) from error
    if not text.strip():
        raise UsageError(
            "nothing to inspect",
            why="no checkpoint was named, and no report comes from a pipe",
            fix=f"for example: {EXAMPLES[0]}, or: {EXAMPLES[1]}",
        )
    return parse(text, where="standard input")


def parse(text: str, *, where: str) -> Report:
    """A report from JSON text.

    Raises:
        UnreadableInput: Not JSON, not a report, or the envelope of a command that failed.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("a report is a JSON object")
        if data.get("schema") == ENVELOPE and not data.get("report"):
            failure = data.get("error") or {}
            raise UnreadableInput(
                "the command that wrote this failed, so there is no report",
                where=where,
                why=str(failure.get("what")),
                fix=failure.get("fix"),
            )
        report = report_from_dict(data)
        _check_types(report)
        return report
    except (ValueError, RecursionError, AttributeError) as error:
        raise UnreadableInput(
            "not a report",
            where=where,
            why=" ".join(str(error).split()),
            fix="give the file that --report names, or the output of --json",
        ) from error


def gate(report: Report, max_cost: float | None) -> Report:
    """`report` itself, if no space costs more than `max_cost`.

    Raises:
        GateFailed: One does; carries the report.
    """
    if max_cost is None:
        return report
    above = [s for s in report.spaces if s.ot_cost is not None and s.ot_cost > max_cost]
    if above:
        worst = max(above, key=lambda s: s.ot_cost or 0.0)
        raise GateFailed(
            f"{len(above)} of {len(report.spaces)} spaces cost more than {max_cost:g}",
            where=f"{worst.id} (source {worst.source}): {worst.ot_cost:.6g}",
            why="--max-cost",
            report=report,
        )
    if not any(s.ot_cost is not None for s in report.spaces):
        raise GateFailed(
            "no OT costs to hold against --max-cost",
            why="the report has none, as after --align none",
            fix="compare two checkpoints, or give the report of an aligned fusion",
            report=report,
        )
    return report


def _is_piped(stream: TextIO) -> bool:
    """Whether somebody sends us something: a pipe or a file, but no terminal and no /dev/null."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return not stream.isatty()
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


_SCALARS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "None": (type(None),),
}


def _check_types(report: Report) -> None:
    """A report from outside may hold anything where we compute and print."""
    records: list[Any] = [report, report.checks, *report.inputs, *report.output]
    records += [*report.spaces, *report.layers, *report.candidates]
    if report.graph is not None:
        records += [report.graph, *report.graph.pinned]
    for record in records:
        for field in fields(record):
            value = getattr(record, field.name)
            if not any(_is(value, kind) for kind in str(field.type).split(" | ")):
                raise ValueError(f"broken report: {field.name} is {value!r:.60}")


def _is(value: Any, kind: str) -> bool:
    """Whether `value` is what the annotation `kind` says; records were built before."""
    if kind in _SCALARS:
        return isinstance(value, _SCALARS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if kind.startswith("Mapping["):
        inner = kind.removeprefix("Mapping[str, ").removesuffix("]")
        return isinstance(value, Mapping) and all(_is(item, inner) for item in value.values())
    if kind == "tuple[str, ...]":
        return all(isinstance(item, str) for item in value)
    if kind == "tuple[int, int]":
        return len(value) == 2 and all(_is(item, "int") for item in value)
    return True
