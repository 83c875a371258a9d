"""What the report says about an alignment: the layer-wise OT costs of the maps chosen.

Whatever the matcher, the cost is the sweep's: incoming weights of a unit, all other axes moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..report.records import LayerRecord, SpaceRecord
from ..requests.recipe import Recipe
from ..transport.maps import Map, plan_of
from .alignment import Alignment, stay
from .features import producers
from .match_space import (
    ProducerRows,
    identity_cost,
    layer_records,
    observed_rows,
    plan_cost,
    random_cost,
    read_rows,
)
from .matchers.sweep import mean_record, output_records, processing_order, stream_spaces
from .models import Model


def measure(
    source: Model,
    anchor: Model,
    alignment: Alignment,
    recipe: Recipe,
    errors: Mapping[str, float],
    *,
    random: bool = False,
) -> tuple[tuple[SpaceRecord, ...], tuple[LayerRecord, ...]]:
    """Records of every space and layer for given maps.

    `errors`: marginal error of soft plans; `random`: what random maps would cost, too.
    """
    graph = anchor.graph
    held = stream_spaces(graph) if recipe.residual == "identity" else frozenset()
    spaces: list[SpaceRecord] = []
    layers: list[LayerRecord] = []
    for space in processing_order(graph):
        rows = observed_rows(source, anchor, space.id, recipe)
        if rows is None:
            every = producers(graph, space.id)
            rows = read_rows(source, anchor, every, space.id, alignment)
        one = alignment.maps.get(space.id) or stay(space.size)
        maps = alignment.families.get(space.id) or (one,)
        if space.per is not None and space.id not in alignment.families:
            maps *= graph.spaces[space.per].size
        inner = [rows] if space.per is None else [rows.unit(u, u) for u in range(len(maps))]
        solver = "identity" if space.id in held else _solver(maps, recipe)
        records = []
        for unit_rows, map in zip(inner, maps, strict=True):
            record = _record(space.id, source.index, unit_rows, map, recipe, solver, errors)
            if random:
                record = record.replace(random_cost=random_cost(unit_rows, plan_of(map), recipe))
            records.append(record)
        spaces.append(mean_record(records))
        if space.per is None:
            layers += layer_records(rows, plan_of(maps[0]), source.index, recipe, random=random)
    layers += output_records(source, anchor, alignment, recipe, random=random)
    place = {op.name: at for at, op in enumerate(graph.ops)}
    layers.sort(key=lambda layer: place.get(layer.name, len(place)))
    return tuple(spaces), tuple(layers)


def _solver(maps: Sequence[Map], recipe: Recipe) -> str:
    if all(m.hard for m in maps):
        return "assignment"
    return "emd" if recipe.solver == "exact" else recipe.solver


def _record(
    space: str,
    source: int,
    rows: ProducerRows,
    map: Map,
    recipe: Recipe,
    solver: str,
    errors: Mapping[str, float],
) -> SpaceRecord:
    return SpaceRecord(
        id=space,
        source=source,
        sizes=map.sizes,
        tensors=tuple(p.weight for p in rows.producers),
        ot_cost=plan_cost(rows, plan_of(map), recipe),
        identity_cost=identity_cost(rows, recipe),
        moved_fraction=plan_of(map).moved_fraction,
        solver=solver,
        marginal_error=errors.get(space, 0.0),
    )
