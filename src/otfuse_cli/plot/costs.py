"""A report's OT costs as a picture: layer by layer as in the paper's figure S2, pairs, maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from ..errors import UsageError
from ..report.records import LayerRecord, Report, SpaceRecord
from .charts import HeatMap, LineChart, Picture, Series, Style

# More maps than this make no picture; how many there are is said.
MOST_MAPS = 48
_MOST_NUMBERS = 8  # rows of a matrix whose values are written into the cells
_COSTS: tuple[tuple[str, str, Style], ...] = (
    ("ot_cost", "OT", "solid"),
    ("identity_cost", "identity", "dashed"),
    ("random_cost", "random map, mean", "dotted"),
)

Record = LayerRecord | SpaceRecord


def picture(report: Report, maps: Sequence[HeatMap] = ()) -> Picture:
    """What `--plot` draws.

    Raises:
        UsageError: The report has no costs.
    """
    records: list[Record] = [r for r in report.layers if r.ot_cost is not None]
    noun = "layer"
    if not records:
        records, noun = [r for r in report.spaces if r.ot_cost is not None], "space"
    if not records and report.depth:
        note = "1 is alike up to a rotation and a scale, 0 has nothing in common."
        return Picture("How alike layers are", note, maps=tuple(_depths(report)))
    if not records:
        raise UsageError(
            "no OT costs to draw",
            where="--plot",
            why="one checkpoint alone, or a plain average, has none",
            fix="compare two checkpoints, or give the report of an aligned fusion",
        )
    names = tuple(dict.fromkeys(_name(record) for record in records))
    note = "Lower is more alike. Leaving the units in place costs as much as a random map where "
    note += "their order says nothing."
    if len(maps) > MOST_MAPS:
        note += f" Transport maps: the first {MOST_MAPS} of {len(maps)}."
    return Picture(
        _title(report),
        note,
        (
            LineChart(
                "",
                f"{noun}, in execution order",
                _unit(report),
                tuple(_lines(records, names)),
                names,
                True,
            ),
        ),
        (*_matrix(report), *_depths(report), *maps[:MOST_MAPS]),
    )


def _title(report: Report) -> str:
    names = [PurePath(record.path).name for record in report.inputs]
    anchor = report.recipe.get("anchor")
    if not isinstance(anchor, int) or not 0 <= anchor < len(names):
        return "OT costs"
    others = ", ".join(name for at, name in enumerate(names) if at != anchor)
    return f"OT costs of {others} to {names[anchor]}" if others else f"OT costs, {names[anchor]}"


def _unit(report: Report) -> str:
    metric, unit_norm = report.recipe.get("metric"), report.recipe.get("unit_norm")
    rows = "rows at unit norm" if unit_norm else "raw rows"
    return f"mean cost per unit ({metric}, {rows})" if metric else "OT cost"


def _name(record: Record) -> str:
    if isinstance(record, SpaceRecord):
        return record.id
    return record.name if record.diagonal_mass is None else f"{record.name} (output)"


def _lines(records: Sequence[Record], names: Sequence[str]) -> Iterator[Series]:
    sources = list(dict.fromkeys(record.source for record in records))
    for source in sources:
        records_of = {_name(record): record for record in records if record.source == source}
        for field, label, style in _COSTS:
            values = tuple(getattr(records_of.get(name), field, None) for name in names)
            if any(value is not None for value in values):
                several = len(sources) > 1
                more, colour = (f", checkpoint {source}", source) if several else ("", None)
                yield Series(label + more, tuple(range(len(names))), values, style, colour)


def _depths(report: Report) -> Iterator[HeatMap]:
    """How alike layers of each source and of the anchor are."""
    for record in report.depth:
        if record.matrix:
            yield HeatMap(
                f"Linear CKA, checkpoint {record.source}",
                "source's layer",
                "anchor's layer",
                record.matrix,
                (len(record.source_layers), len(record.anchor_layers)),
                record.source_layers,
                record.anchor_layers,
                numbers=len(record.matrix) <= _MOST_NUMBERS,
            )


def _matrix(report: Report) -> tuple[HeatMap, ...]:
    """Total costs of all pairs."""
    if not report.pairs:
        return ()
    count = len(report.inputs)
    costs = {(p.source, p.anchor): p.ot_cost for p in report.pairs}
    values: list[tuple[float | None, ...]] = []
    for source in range(count):
        values.append(tuple(costs.get((source, anchor)) for anchor in range(count)))
    numbers = tuple(map(str, range(count)))
    return (
        HeatMap(
            "Total OT cost of all pairs",
            "anchor",
            "source",
            tuple(values),
            (count, count),
            numbers,
            numbers,
            numbers=True,
        ),
    )
