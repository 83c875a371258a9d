"""Reports as files: where one lies, reading it back, and the gate on its costs.

For verbs and the command line alike; knows no networks and no checkpoints.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from ..errors import GateFailed, UnreadableInput, UsageError
from ..output_names import is_folder_name
from .records import (
    ENVELOPE,
    SCHEMA,
    AxisRecord,
    Candidate,
    Checks,
    Difference,
    Estimate,
    FileRecord,
    GraphRecord,
    LayerRecord,
    Pair,
    Pinned,
    PrunedLayer,
    PrunedSpace,
    Pruning,
    RefitRecord,
    Report,
    SpaceRecord,
    StepRecord,
    TensorRecord,
)

# Fields that reports of the first release don't have.
_LATER = frozenset({"differences", "pairs", "estimate", "steps", "refits", "pruning", "yardsticks"})
EXAMPLES = (
    "otfuse inspect a.pt b.pt --ot-costs",
    "otfuse merge a.pt b.pt -o fused.pt --json | otfuse inspect --ot-costs",
)


def report_beside(checkpoint: Path) -> Path:
    """Where the report of a checkpoint lies: `fused.pt` -> `fused.report.json`; inside a folder."""
    if checkpoint.is_dir() or (not checkpoint.exists() and is_folder_name(checkpoint)):
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


def gate(report: Report, max_cost: float | None, max_moved: float | None = None) -> Report:
    """`report` itself, if no space costs more than `max_cost` or moves more than `max_moved`.

    What was not measured passes no gate.

    Raises:
        GateFailed: One does; carries the report.
    """
    for option, noun, limit, values in (
        ("--max-cost", "cost", max_cost, [s.ot_cost for s in report.spaces]),
        ("--max-moved", "move", max_moved, [s.moved_fraction for s in report.spaces]),
    ):
        if limit is not None:
            _hold(report, option, noun, limit, values)
    return report


def report_from_dict(data: Mapping[str, Any]) -> Report:
    """Read back a report, or the report inside a `--json` envelope.

    Raises:
        ValueError: `data` is neither.
    """
    if data.get("schema") == ENVELOPE:
        data = data.get("report") or {}
    if data.get("schema") != SCHEMA:
        raise ValueError(f"not an {SCHEMA} document")
    try:
        values = {f.name: data[f.name] for f in fields(Report) if f.name not in _LATER}
        values |= {name: data[name] for name in _LATER & data.keys()}
        values["inputs"] = tuple(FileRecord(**r) for r in values["inputs"])
        values["output"] = tuple(FileRecord(**r) for r in values["output"])
        values["tensors"] = tuple(_tensor(r) for r in values["tensors"])
        values["spaces"] = tuple(map(_space, values["spaces"]))
        values["layers"] = tuple(LayerRecord(**r) for r in values["layers"])
        values["candidates"] = tuple(Candidate(**r) for r in values["candidates"])
        values["yardsticks"] = tuple(StepRecord(**r) for r in values.get("yardsticks", ()))
        values["steps"] = tuple(StepRecord(**r) for r in values.get("steps", ()))
        values["refits"] = tuple(RefitRecord(**r) for r in values.get("refits", ()))
        values["differences"] = tuple(map(_difference, values.get("differences", ())))
        values["pairs"] = tuple(
            Pair(**{**r, "spaces": tuple(map(_space, r["spaces"]))})
            for r in values.get("pairs", ())
        )
        if values.get("estimate") is not None:
            estimate = values["estimate"]
            values["estimate"] = Estimate(**{**estimate, "skipped": tuple(estimate["skipped"])})
        values["checks"] = _checks(values["checks"])
        if values["graph"] is not None:
            graph = values["graph"]
            values["graph"] = GraphRecord(
                graph["source"], graph["spaces"], tuple(Pinned(**p) for p in graph["pinned"])
            )
        if values.get("pruning") is not None:
            values["pruning"] = _pruning(values["pruning"])
        values["warnings"] = tuple(values["warnings"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"broken report: {error}") from error
    return Report(**values)


def _checks(record: Mapping[str, Any]) -> Checks:
    """Older reports say `function_preserved` instead of `function`, and assume nothing."""
    if "function_preserved" in record:
        verdicts = {True: "kept", False: "failed", None: None}
        record = {
            "function": verdicts[record["function_preserved"]],
            "max_error": record["max_error"],
        }
    checks = Checks(**record)
    if checks.function not in ("kept", "assumed", "failed", None):
        raise TypeError("checks.function")
    if not isinstance(checks.assumption, str | None):
        raise TypeError("checks.assumption")
    return checks


def _hold(
    report: Report, option: str, noun: str, limit: float, values: Sequence[float | None]
) -> None:
    """Every space's value against one limit."""
    known = [
        (value, s) for value, s in zip(values, report.spaces, strict=True) if value is not None
    ]
    above = [(value, space) for value, space in known if value > limit]
    if above:
        value, worst = max(above, key=lambda pair: pair[0])
        raise GateFailed(
            f"{len(above)} of {len(report.spaces)} spaces {noun} more than {limit:g}",
            where=f"{worst.id} (source {worst.source}): {value:.6g}",
            why=option,
            report=report,
        )
    if option == "--max-moved" and 0 < len(known) < len(values):
        at = next(s.id for s in report.spaces if s.moved_fraction is None)
        raise GateFailed(
            "units of different number don't stay in place",
            where=f"{at} and {len(values) - len(known) - 1} more spaces",
            why=option,
            fix="hold models of different widths against --max-cost",
            report=report,
        )
    if not known:
        what = "no OT costs" if noun == "cost" else "no moved fractions"
        raise GateFailed(
            f"{what} to hold against {option}",
            why="the report has none, as after --align none",
            fix="compare two checkpoints, or give the report of an aligned fusion",
            report=report,
        )


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
    records += [*report.spaces, *report.layers, *report.candidates, *report.differences]
    for pair in report.pairs:
        records += [pair, *pair.spaces]
    if report.estimate is not None:
        records.append(report.estimate)
    if report.graph is not None:
        records += [report.graph, *report.graph.pinned]
    for record in records:
        for field in fields(record):
            value = getattr(record, field.name)
            if not any(_is(value, kind) for kind in str(field.type).split(" | ")):
                raise ValueError(f"broken report: {field.name} is {value!r:.60}")


def _is(value: Any, kind: str) -> bool:
    """Whether `value` is what the annotation `kind` says; records were built before."""
    if isinstance(value, float) and not isfinite(value):
        return False
    if kind in _SCALARS:
        return isinstance(value, _SCALARS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if kind.startswith("Mapping["):
        inner = kind.removeprefix("Mapping[str, ").removesuffix("]")
        return isinstance(value, Mapping) and all(_is(item, inner) for item in value.values())
    if kind == "tuple[int, ...]":
        return isinstance(value, tuple) and all(_is(item, "int") for item in value)
    if kind == "tuple[str, ...]":
        return all(isinstance(item, str) for item in value)
    if kind == "tuple[int, int]":
        return len(value) == 2 and all(_is(item, "int") for item in value)
    return True


def _space(data: Mapping[str, Any]) -> SpaceRecord:
    return SpaceRecord(**{**data, "sizes": tuple(data["sizes"]), "tensors": tuple(data["tensors"])})


def _difference(data: Mapping[str, Any]) -> Difference:
    shapes = {
        key: None if data[key] is None else tuple(data[key]) for key in ("shape", "anchor_shape")
    }
    return Difference(**{**data, **shapes})


def _tensor(data: Mapping[str, Any]) -> TensorRecord:
    axes = data["axes"]
    if axes is not None:
        axes = tuple(AxisRecord(a["expr"], tuple(a["spaces"]), tuple(a["roles"])) for a in axes)
    return TensorRecord(data["name"], tuple(data["shape"]), data["dtype"], axes)


def _pruning(data: Mapping[str, Any]) -> Pruning:
    return Pruning(
        **{
            **data,
            "spaces": tuple(PrunedSpace(**s) for s in data["spaces"]),
            "layers": tuple(PrunedLayer(**r) for r in data["layers"]),
            "advice": tuple(data["advice"]),
        }
    )
