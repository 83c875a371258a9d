"""What `inspect` says about several checkpoints beside their costs."""

from __future__ import annotations

from collections.abc import Sequence

from ..checkpoint.open import Checkpoint
from ..errors import IncompatibleModels
from ..graph.analysis.differences import ALLOWED, differences
from ..graph.model import LayerGraph
from ..report.records import Difference, Report, SpaceRecord
from .find_architecture import shapes_of

# Identity is as good as optimal where it gives away less than this share of what a random map does.
_AS_GOOD = 0.05


def compare(
    graph: LayerGraph, checkpoints: Sequence[Checkpoint], anchor: int
) -> tuple[Difference, ...]:
    """Every difference of the other checkpoints from the anchor."""
    every_difference: list[Difference] = []
    for index, checkpoint in enumerate(checkpoints):
        if index != anchor:
            every_difference += differences(graph, shapes_of(checkpoint), source=index)
            every_difference += _dtypes(checkpoint, checkpoints[anchor], index)
    return tuple(every_difference)


def refusal(
    error: IncompatibleModels, checkpoints: Sequence[Checkpoint], anchor: int, report: Report
) -> IncompatibleModels:
    """Why checkpoints can't be fused, in terms of their differences; carries the report."""
    fatal = [d for d in report.differences if d.kind not in ALLOWED]
    if not fatal:
        error.report = report
        return error
    first = fatal[0]
    more = f" and {len(fatal) - 1} more" if len(fatal) > 1 else ""
    return IncompatibleModels(
        "the checkpoints don't fit together",
        where=f"{first.name} in {checkpoints[first.source].label}{more}",
        why=_why(first, checkpoints[anchor].label),
        fix=error.fix,
        report=report,
    )


def _why(difference: Difference, anchor: str) -> str:
    if difference.kind == "missing":
        return f"it is in {anchor} only"
    if difference.kind == "extra":
        return f"it is not in {anchor}"
    shapes = f"{list(difference.shape or ())}, {list(difference.anchor_shape or ())} in {anchor}"
    return shapes if difference.reason is None else f"{shapes}; {difference.reason}"


def _dtypes(checkpoint: Checkpoint, anchor: Checkpoint, index: int) -> list[Difference]:
    dtype_differences = []
    for name, info in checkpoint.infos.items():
        other = anchor.infos.get(name)
        if other is not None and other.dtype != info.dtype:
            here, there = (str(i.dtype).removeprefix("torch.") for i in (info, other))
            reason = f"{here} there, {there} in the anchor"
            dtype_differences.append(
                Difference(index, "dtype", name, info.shape, other.shape, reason)
            )
    return dtype_differences


def one_start(spaces: Sequence[SpaceRecord]) -> tuple[str, ...]:
    """A remark for each source whose units lie in the anchor's order nearly everywhere.

    Nearly: over all spaces, leaving the units in place gives away less than a twentieth of what
    a random map does. Where no unit moves at all the matcher says so.
    """
    remarks = []
    for source in dict.fromkeys(space.source for space in spaces):
        of_source = [space for space in spaces if space.source == source]
        costs = [(s.ot_cost, s.identity_cost, s.random_cost, s.sizes[1]) for s in of_source]
        given_away = at_random = 0.0
        for ot, identity, random, units in costs:
            if ot is None or identity is None or random is None:
                break
            given_away += units * (identity - ot)
            at_random += units * (random - ot)
        else:
            moved = any(space.moved_fraction for space in of_source)
            if moved and at_random > 0 and given_away <= _AS_GOOD * at_random:
                remarks.append(
                    f"checkpoint {source} and the anchor: these look like fine-tunes of one start; "
                    "leaving the units in place is optimal nearly everywhere, so that a plain "
                    "average (--align none) may be enough"
                )
    return tuple(remarks)
