"""Pieces of work that are done once: kept by what they depend on, resumed, estimated.

Not a script: see run.py. Several run at once in processes that are forked, so that what measures
need not travel.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Column of a row to its values, one for each seed.
Values = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Job:
    """One row of a table.

    Attributes:
        item: Of the paper: `S2.1`.
        row: What it is called.
        recipe: All that its values depend on: it is measured again when that changes.
        measure: Gives the values by column.
        paper: The paper's own figures by column.
        seconds: What it takes, roughly, on one core.
    """

    item: str
    row: str
    recipe: Mapping[str, object]
    measure: Callable[[], Values]
    paper: Mapping[str, float | str] = field(default_factory=dict)
    seconds: float = 5.0

    @property
    def key(self) -> str:
        """Of what it depends on."""
        text = json.dumps([self.item, self.row, self.recipe], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Kept:
    """What a job gave, and the seconds of one core that it took."""

    values: Values
    seconds: float


class Results:
    """What was measured, in a file that is written after every job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: dict[str, Kept] = {}
        if path.exists():
            for key, entry in json.loads(path.read_text()).items():
                self._kept[key] = Kept(entry["values"], entry["seconds"])

    def of(self, job: Job) -> Kept | None:
        """What a job gave, if it was done."""
        return self._kept.get(job.key)

    def keep(self, job: Job, kept: Kept) -> None:
        """Remember it, on disk too; what a run beside this one has written stays."""
        self._kept = {**Results(self.path)._kept, **self._kept, job.key: kept}
        entries = {k: vars(self._kept[k]) for k in sorted(self._kept)}
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(entries, indent=1) + "\n")
        draft.replace(self.path)


def run(jobs: Sequence[Job], results: Results, workers: int = 1) -> list[Job]:
    """Do what is missing; says what is left. Gives back what failed, when all else is done."""
    missing = [job for job in jobs if results.of(job) is None]
    left, failed = sum(job.seconds for job in missing), []
    began = time.perf_counter()
    for done, (job, kept) in enumerate(_measured(missing, workers), start=1):
        if isinstance(kept, Kept):
            results.keep(job, kept)
        else:
            failed.append(job)
            print(kept, file=sys.stderr)
        left -= job.seconds
        passed = (time.perf_counter() - began) / 60
        print(
            f"[{done} of {len(missing)}; {passed:.0f} min, about {left / 60 / workers:.0f} min "
            f"left] {job.item}: {job.row}{'' if isinstance(kept, Kept) else ' failed'}",
            flush=True,
        )
    return failed


def _measured(missing: Sequence[Job], workers: int) -> Iterator[tuple[Job, Kept | str]]:
    """What they give, each when it is done; of one that failed, why."""
    if workers == 1 or len(missing) < 2:
        for job in missing:
            yield job, _measure(job)
        return
    _waiting[:] = missing
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for at, kept in pool.imap_unordered(_measure_at, range(len(missing))):
            yield missing[at], kept


_waiting: list[Job] = []


def _measure_at(at: int) -> tuple[int, Kept | str]:
    return at, _measure(_waiting[at])


def _measure(job: Job) -> Kept | str:
    began = time.process_time()
    try:
        values = {name: [float(v) for v in found] for name, found in job.measure().items()}
    except Exception:  # noqa: BLE001  # the others go on, and it is told
        return traceback.format_exc()
    return Kept(values, round(time.process_time() - began, 1))
