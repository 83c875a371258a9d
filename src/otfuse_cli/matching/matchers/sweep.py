"""The paper's matching: one pass over the spaces in graph order (Singh & Jaggi, algorithm 1).

A space is solved when the sweep first reaches it, from the producers whose other axes are mapped
by then. A shared space (a residual stream) is solved once; `residual_average` holds the paper's
own way with streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import IncompatibleModels
from ...graph.axes import axis_units
from ...graph.model import LayerGraph, OpKind, Space
from ...report.records import Candidate, LayerRecord, SpaceRecord
from ...requests.recipe import Recipe
from ...runtime import Runtime
from ...transport.maps import Map
from ...transport.plan import Plan
from ...transport.solve import Solution
from ..alignment import Alignment
from ..features import Producer, producers
from ..large_space import LargeSpace, large_space
from ..match_space import (
    ProducerRows,
    identity_cost,
    layer_records,
    observed_rows,
    read_rows,
    solve_rows,
    space_record,
    to_map,
)
from ..models import Model


class DifferentHeads(IncompatibleModels):
    """Heads or groups of different number, or maps of them that are not one to one."""


@dataclass(frozen=True)
class Match:
    """The alignment of one source, and what the report says about it."""

    alignment: Alignment
    spaces: tuple[SpaceRecord, ...]
    layers: tuple[LayerRecord, ...]
    flop: float = 0.0
    candidates: tuple[Candidate, ...] = ()
    warnings: tuple[str, ...] = ()


def stream_spaces(graph: LayerGraph) -> frozenset[str]:
    """Spaces that residual adds write to."""
    return frozenset(
        u
        for op in graph.ops
        if op.kind is OpKind.ADD and op.writes is not None
        for u in axis_units(op.writes)
        if graph.spaces[u].pinned is None
    )


def processing_order(graph: LayerGraph) -> list[Space]:
    """Free spaces in graph order, a family after the space that indexes it."""
    placed: dict[str, Space] = {}

    def place(space: Space) -> None:
        if space.per is not None and graph.spaces[space.per].pinned is None:
            place(graph.spaces[space.per])
        placed.setdefault(space.id, space)

    for space in sorted(graph.free(), key=lambda s: s.order):
        place(space)
    return list(placed.values())


def sweep(
    source: Model, anchor: Model, recipe: Recipe, runtime: Runtime, *, random: bool = False
) -> Match:
    """Match every free space of `source` to the anchor, one pass in graph order.

    With `random`, the records say what random maps would cost, too.

    Raises:
        SolveFailed: A transport problem was not solved.
        IncompatibleModels: `--residual identity` between streams of different widths.
    """
    work = _Sweep(source, anchor, recipe, random)
    order = processing_order(anchor.graph)
    for done, space in enumerate(order):
        runtime.progress("match", done, len(order))
        work.solve(space)
    runtime.progress("match", len(order), len(order))
    work.measure_the_rest(order)
    return Match(work.alignment, tuple(work.spaces), tuple(work.layers), work.flop)


class _Sweep:
    """State of one pass: the maps so far and the records."""

    def __init__(self, source: Model, anchor: Model, recipe: Recipe, random: bool) -> None:
        self.source, self.anchor, self.recipe, self.random = source, anchor, recipe, random
        self.maps: dict[str, Map] = {}
        self.families: dict[str, tuple[Map, ...]] = {}
        self.plans: dict[str, list[Plan]] = {}
        self.alignment = Alignment(self.maps, self.families)
        self.spaces: list[SpaceRecord] = []
        self.layers: list[LayerRecord] = []
        self.measured: set[tuple[str, str]] = set()
        self.seen: set[str] = set()
        self.flop = 0.0
        self.streams = stream_spaces(anchor.graph) if recipe.residual == "identity" else frozenset()

    def solve(self, space: Space) -> None:
        seen = observed_rows(self.source, self.anchor, space.id, self.recipe)
        if seen is not None:
            self._solve_map(space, seen)
            return
        every = producers(self.anchor.graph, space.id)
        chosen = tuple(p for p in every if not self._unsettled(p, space))
        pool = self._families_of(space)
        if not chosen:
            # A loop without an entrance: compare what does not depend on the maps still missing.
            chosen = every
            pool |= {u for p in every for u in self._unsettled(p, space)}
        large = self._large(chosen, space, pool)
        if large is not None and space.id not in self.streams:
            self._solve_large(large, space)
            return
        rows = read_rows(self.source, self.anchor, chosen, space.id, self.alignment, pool)
        if space.per is not None:
            self._solve_family(space, rows)
        else:
            self._solve_map(space, rows)

    def _solve_map(self, space: Space, rows: ProducerRows) -> None:
        if space.id in self.streams:
            solution = _stay(space, rows, self.recipe)
        else:
            solution = solve_rows(rows, self.recipe)
        self.flop += 2.0 * rows.source[0].shape[0] * rows.anchor[0].shape[0] * rows.features
        self.maps[space.id] = to_map(solution.plan, self.recipe)
        self.plans[space.id] = [solution.plan]
        self.spaces.append(self._record(space.id, rows, solution))
        self._measure(rows, solution.plan, space.id)

    def _large(
        self, chosen: Sequence[Producer], space: Space, pool: frozenset[str] = frozenset()
    ) -> LargeSpace | None:
        recipe, alignment = self.recipe, self.alignment
        if self.random:
            return None  # random maps are compared to by the rows as a whole
        return large_space(self.source, self.anchor, chosen, space.id, alignment, recipe, pool)

    def _solve_large(self, large: LargeSpace, space: Space) -> None:
        """As `_solve_map`, with the rows of one producer in memory at a time."""
        solution = large.solve()
        n, m = solution.plan.shape
        self.flop += 2.0 * n * m * large.features
        self.maps[space.id] = to_map(solution.plan, self.recipe)
        self.plans[space.id] = [solution.plan]
        record, layers = large.records(solution)
        self.spaces.append(record)
        self.layers += layers
        self.measured |= {(space.id, p.weight) for p in large.producers}

    def _solve_family(self, space: Space, rows: ProducerRows) -> None:
        """One independent map for each anchor unit of the index space."""
        self._require_hard_index(space)
        plans, records = [], []
        for unit in range(rows.anchor[0].shape[0]):
            # The rows are moved on every other axis, the index among them: same place, same unit.
            inner = rows.unit(unit, unit)
            solution = solve_rows(inner, self.recipe)
            plans.append(solution.plan)
            records.append(self._record(space.id, inner, solution))
        self.families[space.id] = tuple(to_map(plan, self.recipe) for plan in plans)
        self.plans[space.id] = plans
        self.spaces.append(mean_record(records))

    def _record(self, space: str, rows: ProducerRows, solution: Solution) -> SpaceRecord:
        index, recipe = self.source.index, self.recipe
        return space_record(space, index, rows, solution, recipe, random=self.random)

    def _require_hard_index(self, space: Space) -> None:
        """Each anchor unit of the index space of a family has one source unit."""
        map = self.maps.get(space.per or "")
        if map is not None and not map.hard:
            raise DifferentHeads(
                "heads or groups of different number can't be matched one to one",
                where=f"space {space.per}: {map.sizes[0]} units in the source, "
                f"{map.sizes[1]} in the anchor",
                why=f"{space.id} needs one source unit for each anchor unit",
                fix="use --blend joint with inputs, which matches nothing, or fuse models with the "
                "same number of heads or groups, by the exact solver",
            )

    def _unsettled(self, producer: Producer, space: Space) -> set[str]:
        """Spaces on the producer's axes whose maps are not known yet, `space` aside.

        Families of `space` itself can't be known before it; they are pooled. The same space on a
        second axis (a recurrent weight) counts as unsettled.
        """
        node = self.anchor.graph.tensors[producer.weight]
        families = self._families_of(space)
        unsettled = set()
        for dim, axis in enumerate(node.axes):
            for unit in axis_units(axis.expr):
                settled = (
                    self.anchor.graph.spaces[unit].pinned is not None
                    or unit in self.maps
                    or unit in self.families
                    or unit in families
                    or (unit == space.id and dim == producer.dim)
                )
                if not settled:
                    unsettled.add(unit)
        return unsettled

    def _families_of(self, space: Space) -> frozenset[str]:
        return frozenset(
            s.id
            for s in self.anchor.graph.free()
            if s.per == space.id and s.id not in self.families
        )

    def _measure(self, rows: ProducerRows, plan: Plan, space: str) -> None:
        self.layers += layer_records(rows, plan, self.source.index, self.recipe, random=self.random)
        self.measured |= {(space, p.weight) for p in rows.producers}
        if rows.observed:
            self.seen.add(space)

    def _measure_layer(self, producer: Producer, space: Space) -> None:
        plan = self.plans[space.id][0]
        large = self._large((producer,), space)
        if large is not None:
            self.layers += large.layer_records(plan)
            return
        rows = read_rows(self.source, self.anchor, (producer,), space.id, self.alignment)
        self._measure(rows, plan, space.id)

    def measure_the_rest(self, order: Sequence[Space]) -> None:
        """Layers that a shared space was not solved from, and the output layers."""
        for space in order:
            if space.per is None and space.id not in self.seen:
                for producer in producers(self.anchor.graph, space.id):
                    if (space.id, producer.weight) not in self.measured:
                        self._measure_layer(producer, space)
        self.layers += output_records(
            self.source, self.anchor, self.alignment, self.recipe, random=self.random
        )
        place = {op.name: at for at, op in enumerate(self.anchor.graph.ops)}
        self.layers.sort(key=lambda layer: place.get(layer.name, len(place)))


# A would-be map between more outputs than this costs more than the diagnosis is worth.
_LARGEST_OUTPUT = 4096


def output_records(
    source: Model, anchor: Model, alignment: Alignment, recipe: Recipe, *, random: bool = False
) -> list[LayerRecord]:
    """The map that an output layer would get: a diagnosis only, outputs never move."""
    records = []
    for space in anchor.graph.spaces.values():
        if space.pinned != "output" or space.size > _LARGEST_OUTPUT:
            continue
        for producer in producers(anchor.graph, space.id):
            rows = read_rows(source, anchor, (producer,), space.id, alignment)
            solution = solve_rows(rows, recipe)
            (record,) = layer_records(rows, solution.plan, source.index, recipe, random=random)
            records.append(record.replace(diagonal_mass=solution.plan.trace()))
    return records


def _stay(space: Space, rows: ProducerRows, recipe: Recipe) -> Solution:
    cost = identity_cost(rows, recipe)
    sizes = (rows.source[0].shape[0], rows.anchor[0].shape[0])
    if cost is None:
        raise IncompatibleModels(
            "a residual stream can't stay in place",
            where=f"space {space.id}: {sizes[0]} units in the source, {sizes[1]} in the anchor",
            why="--residual identity maps unit n to unit n",
            fix="use --residual shared",
        )
    return Solution(Plan.identity(sizes[0]), cost, "identity", 0.0)


def mean_record(records: Sequence[SpaceRecord]) -> SpaceRecord:
    """One record for the maps of a family: mean costs, largest error."""

    def mean(values: Sequence[float | None]) -> float | None:
        numbers = [v for v in values if v is not None]
        return sum(numbers) / len(numbers) if len(numbers) == len(values) else None

    first = records[0]
    return SpaceRecord(
        first.id,
        first.source,
        first.sizes,
        first.tensors,
        mean([r.ot_cost for r in records]),
        mean([r.identity_cost for r in records]),
        mean([r.moved_fraction for r in records]),
        first.solver,
        max(r.marginal_error for r in records),
        mean([r.random_cost for r in records]),
    )
