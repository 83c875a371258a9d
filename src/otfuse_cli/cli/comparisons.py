"""How several checkpoints compare, as rich tables: differences, all pairs, what a merge takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tables import Look, clean, new_table, number

if TYPE_CHECKING:
    from rich.table import Table

    from ..report.records import DepthRecord, Estimate, Report

_KINDS = {
    "missing": "missing",
    "extra": "only there",
    "axes": "number of axes",
    "size": "size",
    "width": "width (allowed)",
    "dtype": "dtype (allowed)",
}


def difference_table(report: Report, look: Look) -> Table:
    """What each checkpoint has that the anchor has not; dtypes one by one only where asked."""
    table = new_table("difference")
    table.add_column("source", justify="right", no_wrap=True)
    table.add_column("tensor or space", overflow="fold")
    for name in ("there", "in the anchor"):
        table.add_column(name, no_wrap=True)
    table.add_column("", overflow="fold")
    folded: dict[tuple[int, str], int] = {}
    for item in report.differences:
        if item.kind == "dtype" and not look.verbose:
            key = item.source, item.reason or ""
            folded[key] = folded.get(key, 0) + 1
            continue
        shapes = [_shape(shape, item.kind) for shape in (item.shape, item.anchor_shape)]
        cells = [str(item.source), clean(item.name), *shapes, clean(item.reason or "")]
        table.add_row(_KINDS.get(item.kind, clean(item.kind)), *cells)
    for (source, reason), count in folded.items():
        table.add_row(_KINDS["dtype"], str(source), f"{count} tensors", "", "", clean(reason))
    return table


def pairs(report: Report) -> Table:
    """Total OT costs, sources down, anchors across."""
    count = len(report.inputs)
    costs = {(p.source, p.anchor): p.ot_cost for p in report.pairs}
    table = new_table("#", *map(str, range(count)))
    for source in range(count):
        cells = [number(costs.get((source, anchor))) or "-" for anchor in range(count)]
        table.add_row(str(source), *cells)
    return table


def depth_table(record: DepthRecord) -> Table:
    """Layers that stand for one another; with a matrix all layers, those that do marked by *."""
    if not record.matrix:
        table = new_table("anchor's layer")
        table.add_column("source's layer", overflow="fold")
        table.add_column("CKA", justify="right", no_wrap=True)
        for pair in record.pairs:
            table.add_row(clean(pair.anchor_layer), clean(pair.source_layer), f"{pair.cka:.3f}")
        return table
    paired = {(pair.anchor_layer, pair.source_layer) for pair in record.pairs}
    table = new_table("", *map(clean, record.source_layers))
    for layer, values in zip(record.anchor_layers, record.matrix, strict=True):
        cells = [
            f"{value:.3f}" + ("*" if (layer, other) in paired else " ")
            for other, value in zip(record.source_layers, values, strict=True)
        ]
        table.add_row(clean(layer), *cells)
    return table


def estimate_table(record: Estimate) -> list[tuple[str, str]]:
    """What a merge would take, as labels and values."""
    text = f"{readable_size(record.memory_bytes)} beside the program, {record.flop:.2g} operations"
    if record.skipped:
        text += f" ({', '.join(map(clean, record.skipped))} left out: above --effort)"
    return [("merge", text)]


def readable_size(count: int) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def _shape(shape: tuple[int, ...] | None, kind: str) -> str:
    if shape is None:
        return ""
    return f"{shape[0]} units" if kind == "width" else "x".join(map(str, shape)) or "scalar"
