"""A process of its own, and what it took: what benchmarks of whole commands measure by."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Taken:
    """Wall and CPU seconds of a process, and its peak of memory in MiB."""

    wall: float
    cpu: float
    peak: float


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Taken:
    """Run a command to its end, which has to be a good one."""
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (process.returncode, command)
    wall = time.perf_counter() - began
    return Taken(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
