"""Rounds in which every model, the anchor too, is realigned to the present mean (`--iterate`).

The mean of aligned models is the free-support Wasserstein barycentre's next estimate, and each
model is then matched to it, from where it is: what alternates is the paper's fusion as a
barycentre (Singh & Jaggi, section 4; Cuturi & Doucet, ICML 2014). With descent what the models lack
on their mean never grows. The order of the mean's units means nothing, so the result keeps the
anchor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import UsageError
from ..graph.model import LayerGraph
from ..report.records import RoundRecord
from ..requests.recipe import Recipe
from ..runtime import Runtime
from ..transport.maps import Map, Permutation, plan_of
from ..transport.plan import Plan
from .alignment import Alignment, in_place, pairs_of_maps
from .apply import transport
from .match_space import to_map
from .matchers.sweep import Match, stream_spaces
from .models import Model
from .passes import Mean, Member, again, mean_of, same_maps, unscaled, with_maps
from .similarity import Similarity

# Generators of rounds lie behind those of passes.
_FIRST_ROUND = 50


def iterate(
    sources: Sequence[Model],
    matches: Sequence[Match],
    anchor: Model,
    weights: Sequence[float],
    recipe: Recipe,
    runtime: Runtime,
) -> tuple[list[Match], tuple[RoundRecord, ...]]:
    """`recipe.iterate` rounds, fewer where the maps rest; the matches after them, and each round.

    Args:
        sources: The models that are aligned.
        matches: What they are aligned by so far.
        anchor: Whose order of units the result has.
        weights: Of all models, by their index.
        recipe: Its matcher, solver and metric.
        runtime: Seed and progress.

    Raises:
        SolveFailed: A transport problem was not solved.
        UsageError: The anchor's units would be blurred: no exact solver, or masses that differ.
    """
    if not recipe.iterate or not sources or recipe.align == "none":
        return list(matches), ()
    _require_permutations(recipe, anchor.graph)
    models = [*sources, anchor]
    shares = [weights[model.index] for model in models]
    maps = [*(unscaled(match) for match in matches), in_place(anchor.graph)]
    names = Similarity(sources[0], anchor).tensors

    def estimate() -> Mean:
        return mean_of(list(zip(models, maps, shares, strict=True)), anchor, recipe)

    mean = estimate()
    rounds = [RoundRecord(0, _spread(mean.members, anchor, names), None)]
    for number in range(1, recipe.iterate + 1):
        before = list(maps)
        work = _Realigning(mean, recipe, runtime.inner(), _FIRST_ROUND + number)
        realigned = runtime.workers.each(work, list(zip(models, before, strict=True)))
        for at in range(len(models)):
            runtime.progress("match", at, len(models))
            maps[at] = next(realigned)
        mean = estimate()
        moved = _moved(before, maps)
        rounds.append(RoundRecord(number, _spread(mean.members, anchor, names), moved))
        if not moved:
            break
    improved = list[Match]()
    for match, source, own in zip(matches, sources, maps[:-1], strict=True):
        kept = _in_order_of(maps[-1], own, anchor.graph, recipe)
        changed = not same_maps(kept, unscaled(match))
        improved.append(with_maps(match, source, anchor, kept, recipe) if changed else match)
    return improved, tuple(rounds)


@dataclass(frozen=True)
class _Realigning:
    """Realigns models to one mean, each from where it is.

    Attributes:
        mean: To what.
        recipe: See `iterate`.
        runtime: See `iterate`.
        number: Of the round, among generators.
    """

    mean: Mean
    recipe: Recipe
    runtime: Runtime
    number: int

    def __call__(self, item: tuple[Model, Alignment]) -> Alignment:
        """The maps of one model."""
        model, maps = item
        return again(model, self.mean, maps, self.recipe, self.runtime, self.number).alignment


def _require_permutations(recipe: Recipe, graph: LayerGraph) -> None:
    soft = None
    if recipe.solver != "exact":
        soft = f"--solver {recipe.solver}"
    elif recipe.mass != "uniform":
        soft = f"--mass {recipe.mass}"
    elif recipe.residual in ("average", "orthogonal") and stream_spaces(graph):
        soft = f"--residual {recipe.residual}"
    if soft is not None:
        raise UsageError(
            f"--iterate can't be combined with {soft}",
            where=f"--iterate {recipe.iterate}",
            why="the anchor is realigned too, by maps that must do no more than reorder its units",
            fix="use --solver exact --mass uniform --residual shared",
        )


def _spread(members: Sequence[Member], anchor: Model, names: Sequence[str]) -> float:
    """What the aligned models lack on their mean: the sum of `w |aligned - mean|^2`."""
    total = sum(weight for _, _, weight in members)
    spread = 0.0
    for name in names:
        like = anchor.read(name)
        aligned = []
        for model, alignment, weight in members:
            tensor = model.read(name)
            if alignment is not None:
                tensor = transport(tensor, name, model.graph, alignment, anchor=like)
            aligned.append((tensor, weight / total))
        mean = torch.zeros_like(aligned[0][0])
        for tensor, share in aligned:
            mean += tensor * share
        for tensor, share in aligned:
            spread += share * float((tensor - mean).double().square().sum())
    return spread


def _moved(before: Sequence[Alignment], after: Sequence[Alignment]) -> float:
    """Share of all units, of all models, that have another place than before."""
    units = changed = 0
    for old, new in zip(before, after, strict=True):
        for one, other in pairs_of_maps(old, new):
            a, b = plan_of(one), plan_of(other)
            units += one.sizes[1]
            if a.index_M is not None and b.index_M is not None:
                changed += int((a.index_M != b.index_M).sum())
            elif a is not b:
                changed += int((a.dense() != b.dense()).any(0).sum())
    return changed / units if units else 0.0


def _in_order_of(
    anchors: Alignment, own: Alignment, graph: LayerGraph, recipe: Recipe
) -> Alignment:
    """Maps onto a mean as maps onto the anchor, whose own maps onto the mean are known."""
    maps = {s: _behind(anchors.maps[s], map, recipe) for s, map in own.maps.items()}
    families: dict[str, tuple[Map, ...]] = {}
    for space, inner in own.families.items():
        index = graph.spaces[space].per
        assert index is not None
        at_mean = torch.argsort(_index(anchors.maps[index])).tolist()  # by unit of the anchor
        theirs = anchors.families[space]
        families[space] = tuple(_behind(theirs[m], inner[m], recipe) for m in at_mean)
    return replace(own, maps=maps, families=families)


def _index(map: Map) -> torch.Tensor:
    index_M = plan_of(map).index_M
    assert index_M is not None, "the anchor's units are only reordered"
    return index_M


def _behind(anchors: Map, own: Map, recipe: Recipe) -> Map:
    """What is mapped onto place m of the mean, mapped onto the anchor's unit that lies there."""
    back_M = torch.argsort(_index(anchors))
    plan = plan_of(own)
    if plan.index_M is not None:
        return Permutation(plan.index_M[back_M])
    return to_map(Plan.from_dense(plan.dense()[:, back_M]), recipe)
