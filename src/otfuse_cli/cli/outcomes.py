"""What came of a run, as rich tables: candidates, steps, what was pruned, what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from ..requests.requests import InspectRequest, MergeRequest, PruneFuseRequest, PruneRequest, Recipe
from .tables import Look, as_text, bar, clean, new_table, number

if TYPE_CHECKING:
    from rich.table import Table

    from ..report.records import Report, Widened

# Whose defaults a report's recipe is compared with; those of a merge for the others.
_REQUESTS: Mapping[str, type] = {
    "inspect": InspectRequest,
    "prune": PruneRequest,
    "prune-fuse": PruneFuseRequest,
}


def recipe_settings(report: Report, verbose: bool) -> list[tuple[str, Any]]:
    """Settings of the recipe that differ from the defaults, by name; all of them with `verbose`.

    The table of inputs says weights and anchor already.
    """
    hidden = {"weights", "anchor"} if report.inputs else set()
    items = [(k, v) for k, v in report.recipe.items() if k not in hidden and v is not None]
    if verbose:
        return items
    usual = _usual_settings(report)
    return [(name, value) for name, value in items if name not in usual or value != usual[name]]


def _usual_settings(report: Report) -> dict[str, Any]:
    """What a recipe says, by name, where nobody asked for anything else."""
    request = _REQUESTS.get(report.command, MergeRequest)
    usual = {field.name: field.default for field in fields(Recipe)}
    for field in fields(request):
        # None there means that the recipe decides, except for what has no other default.
        if field.default is not MISSING and (field.default is not None or field.name not in usual):
            usual[field.name] = field.default
    # Reports hold lists and mappings, and `auto` as the device that it became.
    usual |= {"skip": [], "only": [], "weight_rules": [], "layer": {}, "device": "cpu"}
    has_inputs = bool(report.recipe.get("samples") or report.recipe.get("synthetic"))
    usual |= {"refit": has_inputs, "blend": "auto" if has_inputs else "average"}
    usual |= {"calibrate": "none"}
    if report.command == "prune-fuse":
        usual["scale"] = "preserve"  # the pruned network is made of the dense one, in full
    return usual


def candidates(report: Report) -> Table:
    """The alignments that were tried."""
    table = new_table("candidate", "source", "objective", "agreement", "FLOP")
    table.add_column("", no_wrap=True)
    for candidate in report.candidates:
        table.add_row(
            clean(candidate.name),
            str(candidate.source),
            number(candidate.objective),
            number(candidate.agreement),
            f"{candidate.flop:.2g}",
            "chosen" if candidate.chosen else "",
        )
    return table


def rounds(report: Report) -> Table:
    """What realigning all models to their mean did."""
    table = new_table("round", "spread", "moved")
    for record in report.rounds:
        moved = "" if record.moved is None else f"{record.moved:.0%}"
        table.add_row(str(record.round), number(record.spread), moved)
    return table


def steps(report: Report) -> Table:
    """What the fused model was worth on the inputs, step by step."""
    names = {s.name: s for s in report.yardsticks}
    names |= {s.name if s.kept else f"{s.name} (not kept)": s for s in report.steps}
    columns = {"agreement": {name: step.agreement for name, step in names.items()}}
    measured = {name: step.accuracy for name, step in names.items() if step.accuracy is not None}
    return side_by_side({**columns, "accuracy": measured} if measured else columns)


def refits(report: Report) -> Table:
    """How far each fitted layer misses its target, relative to it."""
    before, after = ({r.layer: getattr(r, at) for r in report.refits} for at in ("before", "after"))
    return side_by_side({"missed before": before, "after": after})


def pruned_spaces(report: Report) -> Table:
    """Units of every pruned space before and after, and how many of them were found again."""
    assert report.pruning is not None
    planted = any(space.survivors is not None for space in report.pruning.spaces)
    table = new_table("space", "units", "kept", *(["survivors"] if planted else []))
    for space in report.pruning.spaces:
        cells = [clean(space.id), str(space.units), str(space.kept)]
        table.add_row(*cells, *([as_text(space.survivors)] if planted else []))
    return table


def removed_blocks(report: Report) -> Table:
    """Blocks that were removed, in order, and how far the outputs then were from what they were."""
    assert report.pruning is not None
    table = new_table("block", "missed")
    for block in report.pruning.blocks:
        table.add_row(clean(block.name), number(block.miss))
    return table


def widened_spaces(widened: Widened) -> Table:
    """Units of every space: the anchor's, all checkpoints', the result's; parameters last."""
    table = new_table("space", "anchor", "together", "units")
    for space in widened.spaces:
        table.add_row(clean(space.id), str(space.anchor), str(space.together), str(space.units))
    before, after = f"{widened.anchor_parameters:,}", f"{widened.parameters:,}"
    table.add_row("parameters", before, "", after, style="bold")
    return table


def pruned_layers(report: Report) -> Table:
    """Parameters of every layer before and after; the last row is the whole network."""
    assert report.pruning is not None
    table = new_table("layer", "parameters", "kept", "sparsity")
    for layer in report.pruning.layers:
        share = f"{100 * layer.sparsity:.1f} %"
        table.add_row(clean(layer.name), f"{layer.parameters:,}", f"{layer.kept:,}", share)
    whole = report.pruning
    share = f"{100 * whole.sparsity:.1f} %"
    table.add_row("total", f"{whole.parameters:,}", f"{whole.kept:,}", share, style="bold")
    return table


def score_table(title: str, values: Mapping[str, Any], look: Look) -> Table:
    """What was measured: names, numbers and bars."""
    table = new_table("", clean(title))
    if look.bars:
        table.add_column("", no_wrap=True)
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
    top = max(numbers.values(), default=0)
    for name, value in values.items():
        cells = [clean(str(name)), _measured(value) if name in numbers else as_text(value)]
        if look.bars:
            cells.append(bar(look, numbers.get(name), None, top))
        table.add_row(*cells)
    return table


def side_by_side(columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """What was measured of the same things: a column for each measure."""
    table = new_table("", *map(clean, columns))
    for name in next(iter(columns.values())):
        cells = [values[name] for values in columns.values()]
        table.add_row(
            clean(str(name)),
            *(_measured(c) if isinstance(c, int | float | None) else as_text(c) for c in cells),
        )
    return table


def _measured(value: float | None) -> str:
    """Counts as they are, percents in hundredths, small numbers in four digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if value is not None and abs(value) >= 10 else number(value)
