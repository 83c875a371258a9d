"""A report as rich tables, and its values as text. Prints nothing: that is the renderer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import few

if TYPE_CHECKING:
    from rich.table import Table

    from ..report.records import Checks, FileRecord, GraphRecord, LayerRecord, Report, SpaceRecord

BAR = 24  # characters of the longest bar


@dataclass(frozen=True)
class Look:
    """What there is room for.

    Attributes:
        bars: Whether bars fit.
        blocks: A full and a light block, in the stream's encoding.
        verbose: Every column.
    """

    bars: bool
    blocks: tuple[str, str]
    verbose: bool


def inputs(report: Report, look: Look) -> Table:
    """The checkpoints: their weights, which one is the anchor, what they hold."""
    weights = report.recipe.get("weights")
    anchor = report.recipe.get("anchor")
    weighted = isinstance(weights, list | tuple) and len(weights) == len(report.inputs)
    table = new_table("#")
    table.add_column("checkpoint", overflow="fold")
    if weighted:
        table.add_column("weight", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("contents", overflow="fold")
    if look.verbose:
        table.add_column("sha256", overflow="fold")
    for index, record in enumerate(report.inputs):
        cells = [str(index), clean(record.path)]
        if weighted and weights is not None:
            cells.append(as_text(weights[index]))
        cells += ["anchor" if anchor == index and len(report.inputs) > 1 else "", describe(record)]
        if look.verbose:
            cells.append(record.sha256 or "")
        table.add_row(*cells)
    return table


def verdict(checks: Checks) -> str:
    """What is known of the function, as text."""
    if checks.function == "assumed":
        return f"assumed, not proven: {clean(checks.assumption or '')}"
    text = "NOT kept" if checks.function == "failed" else (checks.function or "")
    return text + ("" if checks.max_error is None else f" (error {checks.max_error:.2g})")


def spaces(report: Report, look: Look) -> Table:
    """OT cost of every space beside the cost of leaving its units in place."""
    several = len({space.source for space in report.spaces}) > 1
    table = new_table("space", *(["source"] if several else []), "units")
    random = _cost_columns(table, report.spaces)
    table.add_column("moved", justify="right", no_wrap=True)
    if look.bars:
        table.add_column("", no_wrap=True)
    if look.verbose:
        table.add_column("solver", no_wrap=True)
        table.add_column("marginals", justify="right", no_wrap=True)
        table.add_column("tensors", overflow="fold")
    top = _top(report.spaces)
    for space in report.spaces:
        source, anchor = space.sizes
        units = str(source) if source == anchor else f"{source} -> {anchor}"
        cells = [clean(space.id), *([str(space.source)] if several else []), units]
        cells += [*_cost_cells(space, random), percent(space.moved_fraction)]
        if look.bars:
            cells.append(bar(look, space.ot_cost, space.identity_cost, top))
        if look.verbose:
            cells += [space.solver, f"{space.marginal_error:.1e}", clean(", ".join(space.tensors))]
        table.add_row(*cells)
    _total_row(table, report.spaces, skip=2 + several, random=random)
    return table


def layer_table(report: Report, look: Look) -> Table:
    """OT cost of every layer's own rows; for an output layer, how diagonal its plan would be."""
    several = len({layer.source for layer in report.layers}) > 1
    table = new_table("layer", *(["source"] if several else []))
    random = _cost_columns(table, report.layers)
    moved = any(layer.moved_fraction is not None for layer in report.layers)
    for name in ("moved", "on diagonal") if moved else ("on diagonal",):
        table.add_column(name, justify="right", no_wrap=True)
    if look.bars:
        table.add_column("", no_wrap=True)
    top = _top(report.layers)
    for layer in report.layers:
        cells = [clean(layer.name), *([str(layer.source)] if several else [])]
        cells += _cost_cells(layer, random)
        cells += [percent(layer.moved_fraction)] if moved else []
        cells.append(percent(layer.diagonal_mass))
        if look.bars:
            cells.append(bar(look, layer.ot_cost, layer.identity_cost, top))
        table.add_row(*cells)
    return table


def tensors(report: Report) -> Table:
    """Every tensor of the anchor: shape, dtype, and what its axes are."""
    traced = any(t.axes is not None for t in report.tensors)
    table = new_table("tensor", "shape", "dtype")
    if traced:
        table.add_column("axes", overflow="fold")
    for tensor in report.tensors:
        cells = [clean(tensor.name), "x".join(map(str, tensor.shape)) or "scalar", tensor.dtype]
        if traced:
            cells.append(clean(", ".join(axis.expr for axis in tensor.axes or ())))
        table.add_row(*cells)
    return table


def graph(report: Report) -> Iterator[tuple[str, Table]]:
    """Titled tables of the graph: who makes, reads and carries each space; what stays in place."""
    assert report.graph is not None
    places = _places(report)
    if report.graph.spaces:
        table = new_table("space", "units")
        if places:
            table.add_column("", no_wrap=True)
            table.add_column("tensor:axis", overflow="fold")
        for name, size in report.graph.spaces.items():
            head = [clean(name), str(size)]
            for verb, where in places.get(name, {"": []}).items():
                table.add_row(*head, *([verb, clean(", ".join(where))] if places else []))
                head = ["", ""]
        yield "Spaces of the graph", table
    if report.graph.pinned:
        table = new_table("axis")
        table.add_column("reason", overflow="fold")
        for pin in report.graph.pinned:
            table.add_row(clean(pin.axis), clean(pin.reason))
        yield "Kept in place", table


_VERBS = {"produce": "made by", "consume": "read by"}


def _places(report: Report) -> dict[str, dict[str, list[str]]]:
    """Space to verb (made by, read by, carried by) to the tensor axes that do it."""
    places: dict[str, dict[str, list[str]]] = {}
    for tensor in report.tensors:
        for dim, axis in enumerate(tensor.axes or ()):
            for space in axis.spaces:
                for role in axis.roles:
                    verbs = places.setdefault(
                        space, {"made by": [], "read by": [], "carried by": []}
                    )
                    place = f"{tensor.name}:{dim}" if len(tensor.shape) > 1 else tensor.name
                    verbs[_VERBS.get(role, "carried by")].append(place)
    return {
        space: {verb: _grouped(where) for verb, where in verbs.items() if where}
        for space, verbs in places.items()
    }


def _grouped(names: Sequence[str]) -> list[str]:
    """`bn1.weight, bn1.bias` as `bn1.{weight, bias}`: vectors of one module together."""
    modules: dict[str, list[str]] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        modules.setdefault(module, []).append(part)
    return [
        ".".join(filter(None, (module, parts[0] if len(parts) == 1 else f"{{{', '.join(parts)}}}")))
        for module, parts in modules.items()
    ]


def cost_title(name: str, look: Look) -> str:
    """A title that explains the bars."""
    if not look.bars:
        return name
    full, light = look.blocks
    return f"{name}   {full} OT cost  {light} what leaving the units in place costs on top"


def describe(record: FileRecord) -> str:
    """What a checkpoint holds, in short."""
    dtypes = ", ".join(record.dtypes)
    tensors = quantity(record.tensors, "tensor")
    return clean(f"{record.container}, {tensors}, {record.parameters:,} parameters, {dtypes}")


def network(record: GraphRecord) -> str:
    """What the network is, how much of it can be matched, and what is pinned."""
    text = f"{record.source}; {quantity(len(record.spaces), 'space')}"
    if record.matched is not None:
        text += f", {100 * record.matched:.1f} % of parameters can be matched"
    if record.pinned:
        reasons = list(dict.fromkeys(pin.reason for pin in record.pinned))
        axes = quantity(len(record.pinned), "axis", "axes")
        text += f", {axes} kept in place: {few(reasons)}"
    return text


def quantity(number: int, noun: str, plural: str | None = None) -> str:
    """`1 axis`, `2 axes`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def number(value: float | None) -> str:
    """Four digits; nothing for null."""
    return "" if value is None else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A share in whole percent; nothing for null."""
    return "" if value is None else f"{100 * value:.0f} %"


def as_text(value: Any) -> str:
    """Any value of a recipe or an evaluation as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ",".join(as_text(item) for item in value)
    return clean(str(value))


def clean(text: str) -> str:
    """One line without control characters: names come from files we don't trust."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def new_table(name: str, *numbers: str) -> Table:
    """A table without lines: a name that folds rather than being cut, then columns of numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _cost_columns(table: Table, records: Sequence[SpaceRecord | LayerRecord]) -> bool:
    """Add the columns of costs; whether random maps have one is returned."""
    random = any(record.random_cost is not None for record in records)
    for name in ("OT cost", "identity", "random")[: 2 + random]:
        table.add_column(name, justify="right", no_wrap=True)
    return random


def _cost_cells(record: SpaceRecord | LayerRecord, random: bool) -> list[str]:
    return [number(cost) for cost in _costs(record)[: 2 + random]]


def _costs(record: SpaceRecord | LayerRecord) -> tuple[float | None, float | None, float | None]:
    return record.ot_cost, record.identity_cost, record.random_cost


def _total_row(table: Table, records: Sequence[SpaceRecord], *, skip: int, random: bool) -> None:
    """Sums of the cost columns, of each where every record has a cost."""
    if len(records) > 1 and all(record.ot_cost is not None for record in records):
        columns = list(zip(*map(_costs, records), strict=True))[: 2 + random]
        totals = [
            "" if None in column else number(sum(c for c in column if c is not None))
            for column in columns
        ]
        table.add_row("total", *[""] * (skip - 1), *totals, style="bold")


def _top(records: Sequence[SpaceRecord | LayerRecord]) -> float:
    costs = [c for r in records for c in (r.ot_cost, r.identity_cost) if c is not None]
    return max(costs, default=0.0)


def bar(look: Look, value: float | None, beyond: float | None, top: float) -> str:
    """`value` out of `top` in full blocks, then light ones as far as `beyond`."""
    if value is None or top <= 0:
        return ""
    full, light = look.blocks
    length = round(BAR * max(value, 0) / top)
    return full * length + light * (round(BAR * (beyond or 0) / top) - length)
