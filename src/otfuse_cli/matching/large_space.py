"""One space whose rows are large: producers one at a time, so that one pair is in memory.

The cost of joined rows is the root of the mean of the producers' squared costs; so are the costs
that the report gives. The same numbers as `match_space`'s up to rounding, in other order.

Legend: N source units, M anchor units, K features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..report.records import LayerRecord, SpaceRecord
from ..requests.recipe import Recipe
from ..transport.cost import Metric, cost_matrix, dead_rows, paired_cost, unit_rows
from ..transport.plan import Plan
from ..transport.solve import Solution, Solver, solve
from .alignment import Alignment
from .features import Producer, raw_rows
from .models import Model

# Rows of both models, in float32, from which producers are taken one at a time.
LARGE_BYTES = 1 << 26


@dataclass(frozen=True)
class LargeSpace:
    """The rows of a space, as they are read when they are needed."""

    source: Model
    anchor: Model
    space: str
    producers: tuple[Producer, ...]
    alignment: Alignment
    pool: frozenset[str]
    recipe: Recipe

    @property
    def features(self) -> int:
        """Numbers per unit."""
        nodes = (self.anchor.graph.tensors[p.weight] for p in self.producers)
        return sum(prod(n.shape) for n in nodes) // self.anchor.graph.spaces[self.space].size

    def solve(self) -> Solution:
        """The transport plan between the units, by the recipe's cost and solver.

        Raises:
            SolveFailed: The transport problem was not solved.
        """
        cost_NM = self._cost(unit_norm=self.recipe.unit_norm)
        return solve(
            cost_NM,
            solver=Solver(self.recipe.solver),
            epsilon=self.recipe.epsilon,
            absolute=self.recipe.epsilon_unit == "cost",
            tie_NM=lambda: self._cost(unit_norm=False),
        )

    def records(self, solution: Solution) -> tuple[SpaceRecord, list[LayerRecord]]:
        """What the report says about the space and the layers it was solved from."""
        squares: torch.Tensor | None = None
        layers = []
        dead: tuple[torch.Tensor, torch.Tensor] | None = None
        for producer in self.producers:
            layer, stay = self._layer(producer, solution.plan)
            layers.append(layer)
            if stay is not None:
                squares = stay[0] if squares is None else squares.add_(stay[0])
                dead = stay[1:] if dead is None else (dead[0] & stay[1], dead[1] & stay[2])
        sizes = (
            self.source.graph.spaces[self.space].size,
            self.anchor.graph.spaces[self.space].size,
        )
        identity = None
        if squares is not None and dead is not None:
            squares = squares / len(self.producers)
            identity = float(self._rooted(squares, dead[0] | dead[1]).mean())
        record = SpaceRecord(
            id=self.space,
            source=self.source.index,
            sizes=sizes,
            tensors=tuple(p.weight for p in self.producers),
            ot_cost=solution.ot_cost,
            identity_cost=identity,
            moved_fraction=solution.plan.moved_fraction,
            solver=solution.solver,
            marginal_error=solution.marginal_error,
        )
        return record, layers

    def layer_records(self, plan: Plan) -> list[LayerRecord]:
        """The space's plan against each layer's own rows."""
        return [self._layer(producer, plan)[0] for producer in self.producers]

    def _pair(self, producer: Producer, *, unit_norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
        sides = []
        for model, moves in ((self.source, self.alignment), (self.anchor, None)):
            # Half types go to float64 block by block there: no pass to float32 before.
            rows = raw_rows(model, producer, self.space, moves, pool=self.pool, widen=not unit_norm)
            sides.append(unit_rows(rows, in_place=True) if unit_norm else rows)
            del rows  # before those of the other side are read
        return sides[0], sides[1]

    def _cost(self, *, unit_norm: bool) -> torch.Tensor:
        """Euclidean, the only metric of a large space: squares add up over producers."""
        total: torch.Tensor | None = None
        dead: list[torch.Tensor] = []
        for producer in self.producers:
            pair = self._pair(producer, unit_norm=unit_norm)
            idle = [dead_rows(side) for side in pair]
            dead = [a & b for a, b in zip(dead, idle, strict=True)] if dead else idle
            part = cost_matrix(*pair, metric=Metric.SQEUCLIDEAN)
            del pair
            total = part if total is None else total.add_(part)
        assert total is not None
        if len(self.producers) > 1:
            total.div_(len(self.producers))
        total.sqrt_()
        if unit_norm:
            total[dead[0]] = 1.0
            total[:, dead[1]] = 1.0
        return total

    def _layer(
        self, producer: Producer, plan: Plan
    ) -> tuple[LayerRecord, tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None]:
        """One layer's record; squared costs of staying in place, dead units on both sides."""
        source, anchor = self._pair(producer, unit_norm=self.recipe.unit_norm)
        idle = dead_rows(source), dead_rows(anchor)
        stay, identity = None, None
        if source.shape == anchor.shape:
            squares = paired_cost(source, anchor, metric=Metric.SQEUCLIDEAN).double()
            stay = squares, *idle
            identity = float(self._rooted(squares, idle[0] | idle[1]).mean())
        if plan.index_M is not None:
            index_M = plan.index_M.to(source.device)
            total = 0.0
            step = max(1, _PICKED // source.shape[1])
            for first in range(0, len(index_M), step):
                last = min(first + step, len(index_M))
                some = index_M[first:last]
                moved = paired_cost(source[some], anchor[first:last], metric=Metric.SQEUCLIDEAN)
                lost = idle[0][some] | idle[1][first:last]
                total += float(self._rooted(moved.double(), lost).sum())
            ot_cost = total / len(index_M)
        else:
            dead_cost = 1.0 if self.recipe.unit_norm else None
            costs = cost_matrix(source, anchor, metric=Metric.EUCLIDEAN, dead_cost=dead_cost)
            ot_cost = plan.cost(costs)
        record = LayerRecord(
            producer.layer,
            self.source.index,
            ot_cost,
            identity,
            moved_fraction=plan.moved_fraction,
        )
        return record, stay

    def _rooted(self, squares_M: torch.Tensor, dead_M: torch.Tensor) -> torch.Tensor:
        cost_M = squares_M.sqrt()
        return torch.where(dead_M, 1.0, cost_M) if self.recipe.unit_norm else cost_M


# Numbers of the rows that are picked at a time.
_PICKED = 1 << 21


def large_space(
    source: Model,
    anchor: Model,
    producers: Sequence[Producer],
    space: str,
    alignment: Alignment,
    recipe: Recipe,
    pool: frozenset[str] = frozenset(),
) -> LargeSpace | None:
    """The space, if its rows are large; None where all of them can be had at once.

    None too where more than sums over producers is asked for: other metrics, masses by norm, a map
    for each unit of another space.
    """
    graph = anchor.graph
    sums = recipe.metric == "euclidean" and recipe.mass == "uniform"
    if not sums or recipe.align != "wts" or graph.spaces[space].per is not None:
        return None
    numbers = sum(
        prod(model.graph.tensors[p.weight].shape) for model in (source, anchor) for p in producers
    )
    if 4 * numbers <= LARGE_BYTES:
        return None
    return LargeSpace(source, anchor, space, tuple(producers), alignment, pool, recipe)
