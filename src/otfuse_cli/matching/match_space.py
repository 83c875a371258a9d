"""One space of one source against the anchor: rows, cost, plan, record.

Legend: N source units, M anchor units, K features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch

from ..report.records import LayerRecord, SpaceRecord
from ..requests.recipe import Recipe
from ..transport import mass
from ..transport.cost import Metric, cost_matrix, paired_cost
from ..transport.maps import Map, as_map
from ..transport.plan import Plan
from ..transport.solve import Solution, Solver, solve
from ..transport.ties import has_ties
from .alignment import Alignment
from .features import Producer, joined, raw_rows
from .models import Model

T = TypeVar("T")


@dataclass(frozen=True)
class ProducerRows:
    """Rows of some producers of one space, as they are: source N x K, anchor M x K each."""

    producers: tuple[Producer, ...]
    source: tuple[torch.Tensor, ...]
    anchor: tuple[torch.Tensor, ...]
    observed: bool = False  # what units do on inputs, not their weights
    _known: dict[object, object] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: object, find: Callable[[], T]) -> T:
        """What `find` says about these rows, asked once for each key."""
        if key not in self._known:
            self._known[key] = find()
        return cast(T, self._known[key])

    @property
    def features(self) -> int:
        """Numbers per unit."""
        return sum(r.shape[-1] for r in self.source)

    def unit(self, source_unit: int, anchor_unit: int) -> ProducerRows:
        """For a family: the rows inside one unit of the index space."""
        return ProducerRows(
            self.producers,
            tuple(r[source_unit] for r in self.source),
            tuple(r[anchor_unit] for r in self.anchor),
            self.observed,
        )


def read_rows(
    source: Model,
    anchor: Model,
    producers: Sequence[Producer],
    space: str,
    alignment: Alignment,
    pool: frozenset[str] = frozenset(),
) -> ProducerRows:
    """Read what both models say about the units of `space`, the source's other axes moved."""
    return ProducerRows(
        tuple(producers),
        tuple(raw_rows(source, p, space, alignment, pool=pool) for p in producers),
        tuple(raw_rows(anchor, p, space, pool=pool) for p in producers),
    )


def observed_rows(
    source: Model, anchor: Model, space: str, recipe: Recipe, *, only: Collection[str] | None = None
) -> ProducerRows | None:
    """What the units of a space do on the inputs, with `--align acts`; None where it is not seen.

    Args:
        source: Observed on the same inputs as the anchor.
        anchor: The anchor.
        space: Whose units.
        recipe: Its align.
        only: Of the layers with these weights.
    """
    if recipe.align != "acts":
        return None
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(
            source.observed.get(space, ()), anchor.observed.get(space, ()), strict=True
        )
        if only is None or theirs.weight in only
    ]
    if not pairs:
        return None
    return ProducerRows(
        tuple(Producer(theirs.layer, theirs.weight, 0) for _, theirs in pairs),
        tuple(mine.features_NF for mine, _ in pairs),
        tuple(theirs.features_NF for _, theirs in pairs),
        observed=True,
    )


def solve_rows(rows: ProducerRows, recipe: Recipe) -> Solution:
    """The transport plan between the units of a space, by the recipe's cost, mass and solver."""
    cost_NM = _cost(rows, recipe)
    if recipe.solver == "exact":
        cost_NM = cost_NM.cpu()  # where it is solved; what else is asked of it is asked there
    tie_NM = None
    if has_ties(cost_NM):
        raw = [joined(r, unit_norm=False) for r in (rows.source, rows.anchor)]
        tie_NM = cost_matrix(raw[0], raw[1], metric=Metric.EUCLIDEAN)
    mass_N = mass_M = None
    if recipe.mass == "norm":
        mass_N, mass_M = (
            mass.from_norms(torch.cat([*side], -1).norm(dim=-1).cpu())
            for side in (rows.source, rows.anchor)
        )
    elif recipe.mass == "importance" and rows.observed:
        mass_N, mass_M = (
            mass.from_norms(_importance(torch.cat([*side], -1)).cpu())
            for side in (rows.source, rows.anchor)
        )
    solution = solve(
        cost_NM,
        mass_N,
        mass_M,
        solver=Solver(recipe.solver),
        epsilon=recipe.epsilon,
        absolute=recipe.epsilon_unit == "cost",
        tie_NM=tie_NM,
    )
    # What is known by now about these rows need not be found once more.
    rows.once((recipe, solution.plan), lambda: solution.ot_cost)
    if rows.source[0].shape == rows.anchor[0].shape:
        rows.once((recipe, "identity"), lambda: float(cost_NM.diagonal().double().mean()))
    return solution


def identity_cost(rows: ProducerRows, recipe: Recipe) -> float | None:
    """Mean cost of leaving every unit in its place; None for unequal sizes."""
    if rows.source[0].shape != rows.anchor[0].shape:
        return None
    return rows.once((recipe, "identity"), lambda: _paired_mean(rows, recipe, None))


def layer_records(
    rows: ProducerRows, plan: Plan, source: int, recipe: Recipe, *, random: bool = False
) -> list[LayerRecord]:
    """The space's plan against each layer's own rows; `random`: what random maps cost, too."""
    records = []
    for at, producer in enumerate(rows.producers):
        layer_rows = rows
        if len(rows.producers) > 1:
            layer_rows = ProducerRows(
                (producer,), (rows.source[at],), (rows.anchor[at],), rows.observed
            )
        records.append(
            LayerRecord(
                producer.layer,
                source,
                plan_cost(layer_rows, plan, recipe),
                identity_cost(layer_rows, recipe),
                random_cost=random_cost(layer_rows, plan, recipe) if random else None,
                moved_fraction=plan.moved_fraction,
            )
        )
    return records


def random_cost(rows: ProducerRows, plan: Plan, recipe: Recipe) -> float:
    """Mean cost of a random map with the plan's masses: all source units to all anchor units."""
    cost_NM = _cost(rows, recipe)
    mean_N = torch.mv(cost_NM, (plan.mass_M / plan.total).to(cost_NM))
    return float(plan.mass_N @ mean_N.to("cpu", torch.float64))


def plan_cost(rows: ProducerRows, plan: Plan, recipe: Recipe) -> float:
    """`<plan, cost>` of given rows; a hard plan needs no cost matrix, one of these rows nothing."""

    def find() -> float:
        if plan.index_M is not None:
            return _paired_mean(rows, recipe, plan.index_M)
        return plan.cost(_cost(rows, recipe))

    return rows.once((recipe, plan), find)


def _paired_mean(rows: ProducerRows, recipe: Recipe, index_M: torch.Tensor | None) -> float:
    """Mean cost of source unit `index_M[m]` (None: m) to anchor unit m."""
    source, anchor = _sides(rows, recipe)
    if index_M is not None:
        source = source.index_select(0, index_M.to(source.device))
    cost_M = paired_cost(source, anchor, metric=_metric(recipe), dead_cost=_dead_cost(rows, recipe))
    return float(cost_M.double().mean())


def space_record(
    space: str,
    source: int,
    rows: ProducerRows,
    solution: Solution,
    recipe: Recipe,
    *,
    random: bool = False,
) -> SpaceRecord:
    """What the report says about one space; `random`: what random maps cost, too."""
    return SpaceRecord(
        id=space,
        source=source,
        sizes=(rows.source[0].shape[0], rows.anchor[0].shape[0]),
        tensors=tuple(p.weight for p in rows.producers),
        ot_cost=solution.ot_cost,
        identity_cost=identity_cost(rows, recipe),
        moved_fraction=solution.plan.moved_fraction,
        solver=solution.solver,
        marginal_error=solution.marginal_error,
        random_cost=random_cost(rows, solution.plan, recipe) if random else None,
    )


def to_map(plan: Plan, recipe: Recipe) -> Map:
    """The plan as a map, with the recipe's scale on the consume side."""
    return as_map(plan, scale="paper" if recipe.scale == "paper" else "preserve")


def _cost(rows: ProducerRows, recipe: Recipe) -> torch.Tensor:
    return cost_matrix(
        *_sides(rows, recipe),
        metric=_metric(recipe),
        dead_cost=_dead_cost(rows, recipe),
    )


def _sides(rows: ProducerRows, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.once(
        (recipe, "sides"),
        lambda: (_compared(rows.source, rows, recipe), _compared(rows.anchor, rows, recipe)),
    )


def _compared(side: Sequence[torch.Tensor], rows: ProducerRows, recipe: Recipe) -> torch.Tensor:
    """Rows as the cost compares them; activations as they are."""
    if recipe.metric == "correlation":
        side = [r - r.mean(-1, keepdim=True) for r in side]
    return joined(side, unit_norm=recipe.unit_norm and not rows.observed)


def _metric(recipe: Recipe) -> Metric:
    """Correlation is the cosine of centred rows."""
    return Metric.COSINE if recipe.metric == "correlation" else Metric(recipe.metric)


def _dead_cost(rows: ProducerRows, recipe: Recipe) -> float | None:
    """At unit norm a dead row costs 1 to everything: it neither attracts nor repels."""
    return 1.0 if recipe.unit_norm and not rows.observed else None


def _importance(features_NF: torch.Tensor) -> torch.Tensor:
    """Mean |activation| times its standard deviation (the paper's S1.2)."""
    return features_NF.abs().mean(1) * features_NF.std(1, correction=0)
