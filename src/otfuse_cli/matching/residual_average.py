"""The paper's way with residual streams: T_out = beta T_short + (1 - beta) T_res at each add.

Walks the operations in execution order and keeps the map that holds on each stream *now*; every
axis gets the map of its own moment. The result is faithful to the text (section 4, Residual
connections) and, unlike a shared map, does not keep the function.
"""

from __future__ import annotations

from ..errors import IncompatibleModels
from ..graph.axes import Axis, axis_units
from ..graph.model import Op, OpKind, Role
from ..report.records import LayerRecord, SpaceRecord
from ..requests.recipe import Recipe
from ..runtime import Runtime
from ..transport.maps import Map
from ..transport.plan import Plan
from .alignment import Alignment
from .features import producers
from .match_space import layer_records, observed_rows, read_rows, solve_rows, space_record, to_map
from .matchers.sweep import Match, output_records
from .models import Model


def sweep_average(
    source: Model, anchor: Model, recipe: Recipe, runtime: Runtime, *, random: bool = False
) -> Match:
    """Match layer by layer, averaging plans where a residual branch joins its stream.

    Raises:
        SolveFailed: A transport problem was not solved.
        IncompatibleModels: The graph has families (attention heads), which the paper's rule for
            streams does not speak of.
    """
    family = next((s for s in anchor.graph.free() if s.per is not None), None)
    if family is not None:
        raise IncompatibleModels(
            "--residual average does not know heads or groups",
            where=f"space {family.id}, one map for each unit of {family.per}",
            fix="use --residual shared",
        )
    walk = _Walk(source, anchor, recipe, random)
    ops = anchor.graph.ops
    for done, op in enumerate(ops):
        runtime.progress("match", done, len(ops))
        walk.step(op)
    runtime.progress("match", len(ops), len(ops))
    alignment = Alignment(walk.current, overrides=walk.overrides)
    walk.layers += output_records(source, anchor, alignment, recipe, random=random)
    return Match(alignment, tuple(walk.spaces), tuple(walk.layers), walk.flop)


class _Walk:
    def __init__(self, source: Model, anchor: Model, recipe: Recipe, random: bool) -> None:
        self.source, self.anchor, self.recipe, self.random = source, anchor, recipe, random
        self.graph = anchor.graph
        self.current: dict[str, Map] = {}
        self.plans: dict[str, Plan] = {}
        self.branch: dict[str, tuple[Plan, Map]] = {}
        self.overrides: dict[tuple[str, int], dict[str, Map]] = {}
        self.spaces: list[SpaceRecord] = []
        self.layers: list[LayerRecord] = []
        self.flop = 0.0

    def step(self, op: Op) -> None:
        """Map one operation's tensors with the maps that hold when it runs."""
        if op.kind is OpKind.ADD:
            self._join(op.writes)
            return
        made: set[str] = set()
        for name in op.tensors.values():
            for dim, axis in enumerate(self.graph.tensors[name].axes):
                if Role.PRODUCE in axis.roles:
                    made |= {u for u in axis_units(axis.expr) if self._free(u)}
                else:
                    self._pin_now(name, dim, axis.expr)
        for space in sorted(made):
            self._solve(op, space)
        for name in op.tensors.values():
            for dim, axis in enumerate(self.graph.tensors[name].axes):
                if not made.isdisjoint(axis_units(axis.expr)):
                    self.overrides[name, dim] = {
                        u: self.branch[u][1] if u in self.branch else self.current[u]
                        for u in axis_units(axis.expr)
                        if self._free(u)
                    }

    def _free(self, space: str) -> bool:
        return self.graph.spaces[space].pinned is None

    def _pin_now(self, name: str, dim: int, axis: Axis) -> None:
        """Fix an axis to the map of this moment; a norm right after its layer is on the branch."""
        now: dict[str, Map] = {}
        for unit in axis_units(axis):
            if unit in self.branch:
                now[unit] = self.branch[unit][1]
            elif unit in self.current:
                now[unit] = self.current[unit]
        if now:
            self.overrides[name, dim] = now

    def _solve(self, op: Op, space: str) -> None:
        names = set(op.tensors.values())
        chosen = [p for p in producers(self.graph, space) if p.weight in names]
        for producer in chosen:  # what the layer reads is read before its own branch begins
            for dim, axis in enumerate(self.graph.tensors[producer.weight].axes):
                if Role.CONSUME in axis.roles:
                    self.overrides[producer.weight, dim] = {
                        u: self.current[u] for u in axis_units(axis.expr) if u in self.current
                    }
        alignment = Alignment(self.current, overrides=self.overrides)
        rows = observed_rows(self.source, self.anchor, space, self.recipe, only=names)
        if rows is None:
            rows = read_rows(self.source, self.anchor, chosen, space, alignment)
        solution = solve_rows(rows, self.recipe)
        self.flop += 2.0 * rows.source[0].shape[0] * rows.anchor[0].shape[0] * rows.features
        map = to_map(solution.plan, self.recipe)
        if space in self.current:
            self.branch[space] = (solution.plan, map)
        else:
            self.current[space], self.plans[space] = map, solution.plan
        index, recipe, random = self.source.index, self.recipe, self.random
        self.spaces.append(space_record(space, index, rows, solution, recipe, random=random))
        self.layers += layer_records(rows, solution.plan, index, recipe, random=random)

    def _join(self, stream: Axis | None) -> None:
        for space in () if stream is None else axis_units(stream):
            if space in self.branch:
                plan, _ = self.branch.pop(space)
                self.plans[space] = Plan.blend(self.plans[space], plan, self.recipe.beta)
                self.current[space] = to_map(self.plans[space], self.recipe)
