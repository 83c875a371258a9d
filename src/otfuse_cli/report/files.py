"""Reports as files: where one lies, and reading it back.

For verbs and the command line alike; knows no networks and no checkpoints.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

import msgspec

from ..errors import UnreadableInput, UsageError
from ..output_names import is_folder_name
from ..remote.location import is_remote
from .records import ENVELOPE, SCHEMA, Report

# Fields that reports of the first release don't have.
_LATER = frozenset(
    {"differences", "pairs", "estimate", "steps", "refits", "pruning", "widened", "yardsticks"}
)
EXAMPLES = (
    "otfuse inspect a.pt b.pt --ot-costs",
    "otfuse merge a.pt b.pt -o fused.pt --json | otfuse inspect --ot-costs",
)


def report_beside(checkpoint: Path) -> Path:
    """Where the report of a checkpoint lies: `fused.pt` -> `fused.report.json`; inside a folder."""
    folder = is_folder_name(checkpoint)
    if not is_remote(checkpoint):  # which has no folders but by the names of what lies in them
        folder = checkpoint.is_dir() or (not checkpoint.exists() and folder)
    if folder:
        return checkpoint / f"{checkpoint.resolve().name}.report.json"
    return checkpoint.with_suffix(".report.json")


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
        _require_report(data, where)
        _require_finite(data, "$")
        return report_from_dict(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(
            "not a report",
            where=where,
            why=" ".join(str(error).split()),
            fix="give the file that --report names, or the output of --json",
        ) from error


def report_from_dict(data: Mapping[str, Any]) -> Report:
    """Read back a report, or the report inside a `--json` envelope.

    Raises:
        ValueError: `data` is neither; says where in the report what is wrong.
    """
    if data.get("schema") == ENVELOPE:
        data = data.get("report") or {}
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        raise ValueError(f"not an {SCHEMA} document")
    for name in Report.__struct_fields__:
        if name not in data and name not in _LATER:
            raise ValueError(f"broken report: object missing required field `{name}`")
    try:
        return msgspec.convert({**data, "checks": _checks(data["checks"])}, Report)
    except msgspec.ValidationError as error:
        text = str(error)
        raise ValueError(f"broken report: {text[:1].lower()}{text[1:]}") from error


def _require_report(data: Mapping[str, Any], where: str) -> None:
    """Refuse the envelope of a command that has no report to show, and say why it has none."""
    if data.get("schema") != ENVELOPE or data.get("report"):
        return
    failure = data.get("error")
    failure = failure if isinstance(failure, Mapping) else {}
    raise UnreadableInput(
        "the command that wrote this failed, so there is no report",
        where=where,
        why=str(failure.get("what")),
        fix=failure.get("fix"),
    )


def _require_finite(value: Any, path: str) -> None:
    """Refuse NaN and infinities, which Python reads (also as 1e999) but JSON does not have."""
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"broken report: {value} is no number - at `{path}`")
    if isinstance(value, dict):
        for key, item in value.items():
            _require_finite(item, f"{path}.{key}")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            _require_finite(item, f"{path}[{at}]")


def _checks(record: Any) -> Any:
    """Older reports say `function_preserved` instead of `function`, and assume nothing."""
    if not isinstance(record, Mapping) or "function_preserved" not in record:
        return record
    verdict = record["function_preserved"]
    if isinstance(verdict, bool):
        verdict = "kept" if verdict else "failed"
    return {"function": verdict, "max_error": record.get("max_error")}


def _is_piped(stream: TextIO) -> bool:
    """Whether somebody sends us something: a pipe or a file, but no terminal and no /dev/null."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return not stream.isatty()
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
