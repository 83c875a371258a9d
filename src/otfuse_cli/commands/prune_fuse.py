"""`prune-fuse`: fuse a dense network into its pruned version, which is the anchor."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import torch

from ..errors import UsageError
from ..report import Report
from ..runtime import Progress, silent
from .merge import Plan, report_path, run
from .requests import PruneFuseRequest


def prune_fuse(request: PruneFuseRequest, *, progress: Progress = silent) -> Report:
    """Fuse `request.dense` into `request.pruned`; the output has the pruned net's shape.

    Raises:
        OtfuseError: See docs/exit-codes.md; nothing is left behind.
    """
    return run(_plan(request, to_file=True), progress)


def prune_fuse_tensors(
    request: PruneFuseRequest, *, progress: Progress = silent
) -> tuple[dict[str, torch.Tensor], Report]:
    """Fuse in memory, and to the output file as well where the request names one."""
    tensors: dict[str, torch.Tensor] = {}
    report = run(_plan(request, to_file=False), progress, also=tensors.__setitem__)
    return tensors, report


def _plan(request: PruneFuseRequest, *, to_file: bool) -> Plan:
    weight = request.dense_weight
    if not (isfinite(weight) and 0 <= weight <= 1):
        raise UsageError(
            "the dense weight must lie between 0 and 1",
            where=f"--dense-weight {weight:g}",
            fix="0 keeps the pruned net, 1 the aligned dense one",
        )
    output = request.output
    if output is None and to_file:
        if not isinstance(request.pruned, str | Path):
            raise UsageError("no output", where="-o OUT", fix="say where the fused model goes")
        pruned = Path(request.pruned)
        name = f"{pruned.stem}.fused{pruned.suffix}"
        if pruned.is_dir():
            name = f"{pruned.resolve().name}-fused"  # a suffix would make it a file
            pruned = pruned.resolve()
        output = pruned.with_name(name)
    return Plan(
        command="prune-fuse",
        checkpoints=(request.dense, request.pruned),
        anchor_index=1,
        weights=(weight, 1 - weight),
        output=output,
        report=report_path(output, request.report),
        options=request,
        target=request,
    )
