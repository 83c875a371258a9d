"""The last sentence of a fusion, in plain words: what was matched, is it sure, what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tables import quantity

if TYPE_CHECKING:
    from ..report.records import Report, SpaceRecord, Widened

_FUSIONS = ("merge", "prune-fuse")

# What running a network shows is which units may move, not that merged units lose nothing.
_FUNCTION = {
    "kept": "running the network showed which units may change places",
    "assumed": "which units may change places is assumed, not shown",
    None: "which units may change places was not checked",
}


def closing(report: Report) -> str | None:
    """The sentence; None for what is no fusion."""
    if report.command not in _FUSIONS:
        return None
    parts = [_matched(report)]
    if report.spaces and report.checks.function in _FUNCTION:
        parts.append(_FUNCTION[report.checks.function])
    return f"{'; '.join(parts)}. {_next(report)}"


def _matched(report: Report) -> str:
    if report.widened is not None:
        return _chosen(report.widened)
    if not report.spaces:
        plain = report.recipe.get("align") == "none"
        return "Nothing was matched" + ": tensors were averaged as they stood" * plain
    units = sum(space.sizes[1] for space in report.spaces)
    text = f"{quantity(units, 'unit')} in {quantity(len(report.spaces), 'space')}"
    return f"{text} {'was' if units == 1 else 'were'} matched{_nearer(report.spaces)}"


def _chosen(widened: Widened) -> str:
    """How many units of all checkpoints are in a result with widths of its own."""
    units, together = (sum(getattr(s, at) for s in widened.spaces) for at in ("units", "together"))
    if units == together:
        return "All units of all checkpoints stand side by side: the mean of their logits"
    return f"{units} of the {together} units of all checkpoints were chosen, none averaged"


def _nearer(spaces: tuple[SpaceRecord, ...]) -> str:
    """By how much matching brought units nearer: than chance where that is known, or than before.

    Only spaces with both costs count.
    """
    for name, against in (("random_cost", "by chance"), ("identity_cost", "in the order they had")):
        matched = before = 0.0
        for space in spaces:
            cost = getattr(space, name)
            if cost is not None and space.ot_cost is not None:
                matched += space.ot_cost
                before += cost
        if before > 0:
            nearer = round(100 * (1 - matched / before))
            return (
                f", {nearer} % nearer than {against}" if nearer > 0 else f", as near as {against}"
            )
    return ""


def _next(report: Report) -> str:
    measure = "measure the result with otfuse eval"
    if report.widened is not None or report.recipe.get("samples") or report.recipe.get("synthetic"):
        return f"Next: {measure}"
    return (
        "Next: give inputs, real (--samples FILE) or made up (--synthetic), with --arch, which "
        f"mostly helps; {measure}"
    )
