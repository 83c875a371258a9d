"""The paper's tables beside ours: one row for each of its rows, each measured once.

    python examples/paper/run.py [--only S2.1,S3] [--quick|--full] [--write] [--jobs 2]

Every row is kept by all that it depends on (--results), so that a run that was stopped goes on, and
what has not changed is not measured again. Networks that are missing are trained and kept too
(--cache). `--quick` has three seeds and ten epochs of training on; `--full` the paper's, and what
hours of training come before. `--write` writes docs/paper.md from what was measured so far, and its
pictures (which need matplotlib).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import cifar  # noqa: E402
import distil  # noqa: E402
import finetune  # noqa: E402
import mnist  # noqa: E402
import one_shot  # noqa: E402
import pruned  # noqa: E402
import transfer  # noqa: E402
import widths  # noqa: E402
from figures import draw  # noqa: E402
from items import HEAD, ITEMS  # noqa: E402
from jobs import Job, Results, run  # noqa: E402
from laboratory import Laboratory  # noqa: E402
from page import measured, written  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "paper.md"


def every_job(given: argparse.Namespace, *, quick: bool) -> list[Job]:
    """All rows of one size."""
    lab = Laboratory(given, quick=quick)
    modules = (one_shot, widths, transfer, pruned, cifar, finetune, distil)
    return [job for module in modules for job in module.jobs(lab)]


def main() -> None:
    parser = mnist.options(__doc__)
    parser.add_argument("--only", default="", help="items that begin with one of these: S2,Fig. 2")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="fewer seeds and epochs (default)")
    depth.add_argument("--full", action="store_true", help="the paper's seeds and epochs")
    parser.add_argument("--jobs", type=int, default=2, help="rows at once, a core each (default 2)")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    parser.add_argument("--write", action="store_true", help="write docs/paper.md and its pictures")
    given = parser.parse_args()
    if given.jobs < 1:
        parser.error(f"--jobs {given.jobs}: at least one")
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    wanted = tuple(given.only.split(","))
    results = Results(given.results)
    chosen = [job for job in every_job(given, quick=not given.full) if job.item.startswith(wanted)]
    if not chosen:
        parser.error(f"--only {given.only}: no item begins so; they are {', '.join(ITEMS)}")
    failed = run(chosen, results, given.jobs)
    if given.write:
        both = [job for quick in (False, True) for job in every_job(given, quick=quick)]
        rows = measured(ITEMS, both, results)
        drawn = draw(rows, PAGE.parent / "pictures")
        pictures = {item: f"pictures/{name}" for item, name in drawn.items()}
        PAGE.write_text(written(ITEMS, rows, pictures, HEAD))
    if failed:
        raise SystemExit(f"failed: {', '.join(f'{job.item}: {job.row}' for job in failed)}")


if __name__ == "__main__":
    main()
