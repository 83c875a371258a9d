"""`merge`: align every source to the anchor, average, write."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..checkpoint.publication import Publication
from ..errors import UsageError
from ..remote.location import location
from ..report.records import Report
from ..requests.requests import MergeRequest
from ..requests.tensor_weights import weight_rules
from ..runtime import Progress, silent
from ..session.merge_plan import MergePlan, report_path
from ..session.parents import anchor_index
from ..session.pipeline import run
from ..session.width_rules import asked_width


def run_merge(request: MergeRequest, *, progress: Progress = silent) -> Report:
    """Fuse the checkpoints of `request` into its output file.

    Raises:
        OtfuseError: See docs/exit-codes.md; nothing is left behind.
    """
    if request.output is None:
        raise UsageError("no output", where="-o OUT", fix="say where the fused model goes")
    return run(plan_merge(request), progress)


def merge_tensors(
    request: MergeRequest, *, progress: Progress = silent, outputs: Publication | None = None
) -> tuple[dict[str, torch.Tensor], Report]:
    """Fuse in memory, and to the output file as well where the request names one.

    `outputs` as for `run`.
    """
    plan = plan_merge(request)
    tensors: dict[str, torch.Tensor] = {}
    report = run(plan, progress, also=tensors.__setitem__, outputs=outputs)
    return tensors, report


def plan_merge(request: MergeRequest) -> MergePlan:
    """Check counts, weights and anchor before any file is opened."""
    count = len(request.checkpoints)
    if count < 2:
        raise UsageError(
            f"{count} checkpoint{'s' * (count != 1)} to merge",
            where="CKPT CKPT...",
            fix="name two or more",
        )
    output = None if request.output is None else location(request.output)
    weights, rules = weight_rules(request.weights, count)
    width = asked_width(request, weights, rules)
    return MergePlan(
        command="merge",
        checkpoints=tuple(request.checkpoints),
        anchor_index=anchor_index(request.anchor, count),
        weights=weights,
        output=output,
        report=report_path(output, request.report),
        # Only joint fusion has widths of its own: `auto` has nothing else to try there.
        options=request if width is None else replace(request, blend="joint"),
        target=request,
        rules=rules,
        width=width,
    )
