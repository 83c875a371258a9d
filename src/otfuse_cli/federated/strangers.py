"""Clients whose units stand in an order of their own: matched to the others, and to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..checkpoint.open import open_checkpoint
from ..matching.alignment import Alignment, in_place
from ..matching.carry import carried, single_alignment
from ..matching.match import match
from ..matching.matchers.descent import descend, movable
from ..matching.models import Model
from ..matching.passes import realign, unscaled
from ..matching.similarity import Similarity
from ..requests.recipe import Recipe
from ..runtime import Runtime

# A rise of the objective below this share is no reason to give a client another order.
_RISE = 1e-6


def still_fits(
    model: Model, anchor: Model, alignment: Alignment | None, recipe: Recipe, runtime: Runtime
) -> bool:
    """Whether no exchange of units brings a client nearer to the global model than its plan does.

    Args:
        model: The client's.
        anchor: The global model that it was sent, on the global units.
        alignment: Its plan; None: in place.
        recipe: How units are matched.
        runtime: Seed and device.

    Raises:
        SolveFailed: Weights too large to compare.
    """
    start = in_place(anchor.graph) if alignment is None else alignment
    if not start.hard or recipe.solver != "exact":
        return True  # places of other widths are kept
    work = Similarity(model, anchor)
    if not movable(work, recipe):
        return True
    before = work.objective(start)
    better = descend(work, start, recipe, runtime.generator(model.index), most_passes=1)
    return better.objective - before <= _RISE * abs(before)


def place_strangers(
    strangers: Sequence[Model],
    weights: Sequence[float],
    before: Model,
    settled: Mapping[str, torch.Tensor] | None,
    recipe: Recipe,
    runtime: Runtime,
) -> dict[int, Alignment]:
    """Plans of clients that have none, by the model's index; every unit has one place.

    They are matched to what is `settled`. Where nothing is, the heaviest client of the global
    model's widths gives the order, or the heaviest of all, carried to them.

    Args:
        strangers: Models of the clients, one or more.
        weights: Of all models, by index; that of what is settled by the index of `before`.
        before: The global model so far.
        settled: The mean of the other clients, or the global model; None where no client has a
            plan onto its units.
        recipe: How units are matched, with its passes.
        runtime: Seed and device.

    Raises:
        SolveFailed: A transport problem was not solved.
        IncompatibleModels: Clients that can't be matched: other heads, complex weights.
    """
    plans: dict[int, Alignment] = {}
    weights = list(weights)
    if settled is None:
        first, plans[first.index], settled = _leader(strangers, weights, before, recipe, runtime)
        weights[before.index] = weights[first.index]
        strangers = [model for model in strangers if model is not first]
    anchor = replace(before, checkpoint=open_checkpoint(settled, label="the other clients"))
    matches = [match(model, anchor, recipe, runtime) for model in strangers]
    matches = realign(strangers, matches, anchor, weights, recipe, runtime)
    for model, found in zip(strangers, matches, strict=True):
        plans[model.index] = single_alignment(model, anchor, unscaled(found))
    return plans


def _leader(
    strangers: Sequence[Model],
    weights: Sequence[float],
    before: Model,
    recipe: Recipe,
    runtime: Runtime,
) -> tuple[Model, Alignment, dict[str, torch.Tensor]]:
    """The client that gives the order, its plan, and its tensors on the global units."""
    equal = [model for model in strangers if model.graph.sizes == before.graph.sizes]
    # The first of the heaviest: `max` keeps it.
    leader = max(equal or strangers, key=lambda model: weights[model.index])
    tensors = {name: leader.stored(name) for name in leader.graph.tensors}
    if equal:
        return leader, in_place(before.graph), tensors
    found = match(leader, before, recipe, runtime)
    plan = single_alignment(leader, before, unscaled(found))
    own = {name: before.stored(name) for name in before.graph.tensors}
    return leader, plan, carried(tensors, leader.graph, plan, own)
