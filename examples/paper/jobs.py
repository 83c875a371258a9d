"""Pieces of work that are done once: kept by what they depend on, resumed, estimated.

Not a script: see run.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
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


def run(jobs: Sequence[Job], results: Results) -> None:
    """Do what is missing, in order; says what is left."""
    missing = [job for job in jobs if results.of(job) is None]
    left = sum(job.seconds for job in missing)
    for at, job in enumerate(missing, start=1):
        print(
            f"[{at}/{len(missing)}, about {left / 60:.0f} min left] {job.item}: {job.row}",
            flush=True,
        )
        began = time.process_time()
        values = {name: [float(v) for v in found] for name, found in job.measure().items()}
        results.keep(job, Kept(values, round(time.process_time() - began, 1)))
        left -= job.seconds
