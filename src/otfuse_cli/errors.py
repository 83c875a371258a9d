"""What can go wrong, and the exit code that says so.

Every failure that a user's file or option causes is an `OtfuseError`; it answers four questions,
one line each: what, where, why, and what to do. Nothing of ours may be imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar

# How a user gives the network itself: what proves a graph, and finds one that names don't tell.
NETWORKS = "--arch net.py:make_net (or hf:DIR, timm:NAME, torchvision:NAME, graph.pt2)"


class ExitCode(IntEnum):
    """Exit statuses of every command (documented in docs/exit-codes.md)."""

    OK = 0
    BUG = 1
    USAGE = 2
    UNREADABLE = 3
    INCOMPATIBLE = 4
    SOLVE_FAILED = 5
    OUTPUT_REFUSED = 6
    GATE_FAILED = 7
    INTERRUPTED = 130


class OtfuseError(Exception):
    """A failure with a cause and a remedy.

    Attributes:
        what: The failure in one line.
        where: File, tensor, axis or option it concerns, with both shapes where there are two.
        why: The cause.
        fix: What to do about it.
        report: The `Report` of what was found all the same, which is shown too (an object here,
            since this module imports nothing).
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        report: object | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        self.report = report

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix)):
            if text is not None:
                lines.append(f"{label}: {text}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str | int | None]:
        """The error as it stands in a JSON envelope."""
        return {
            "type": type(self).__name__,
            "exit_code": int(self.exit_code),
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "fix": self.fix,
        }


class UsageError(OtfuseError):
    """An option or argument that can't be meant: bad weights, too few samples."""

    exit_code = ExitCode.USAGE


class UnreadableInput(OtfuseError):
    """A file that is missing, broken, unsafe, or holds NaN."""

    exit_code = ExitCode.UNREADABLE


class IncompatibleModels(OtfuseError):
    """Models that don't fit together, or an architecture nobody knows."""

    exit_code = ExitCode.INCOMPATIBLE


class SolveFailed(OtfuseError):
    """A transport problem that wasn't solved, or a map that changed the function."""

    exit_code = ExitCode.SOLVE_FAILED


class OutputRefused(OtfuseError):
    """An output that exists already or can't be written."""

    exit_code = ExitCode.OUTPUT_REFUSED


class GateFailed(OtfuseError):
    """A threshold that the user set was passed, or a check came out negative.

    The run itself went well, so its report is shown too.
    """

    exit_code = ExitCode.GATE_FAILED


def few(names: Sequence[str]) -> str:
    """The first three of many names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def only_in(names: Sequence[str], holder: str, other: str) -> str:
    """That one side has tensors which the other lacks, in words."""
    return f"{few(names)} in {holder} but not in {other}"
