"""More than two models: further passes over the sources (`--passes`), and which model to align to.

Aligned to the anchor one by one, the sources are not aligned to each other. From the second pass
each is matched to the weighted mean of the other aligned models, the anchor in place, from where
it is: the sum over pairs of `w_j w_k <aligned_j, aligned_k>` never falls (Git Re-Basin, MergeMany).
The mean exists one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..report.records import Candidate
from ..requests.recipe import Recipe
from ..runtime import Runtime
from ..transport.maps import plan_of
from .activations import Activations
from .alignment import Alignment, pairs_of_maps
from .alignment_costs import measure
from .apply import transport
from .match import scale_maps
from .matchers.descent import Found, descend
from .matchers.sweep import Match, sweep
from .models import Model
from .similarity import Similarity

# A model, its maps (None: in place) and its weight.
Member = tuple[Model, Alignment | None, float]


@dataclass(frozen=True)
class Mean(Model):
    """The weighted mean of aligned models, read tensor by tensor, in the anchor's graph.

    Attributes:
        members: What it is the mean of, weights above 0.
    """

    members: tuple[Member, ...] = field(default=())

    def stored(self, name: str) -> torch.Tensor:
        """The mean of one tensor: no file has it."""
        return self.read(name)

    def read(self, name: str) -> torch.Tensor:
        """The mean of one tensor, float32 or float64."""
        total = sum(weight for _, _, weight in self.members)
        mean: torch.Tensor | None = None
        before = self.widened(Model.stored(self, name))
        for model, alignment, weight in self.members:
            tensor = model.read(name)
            if alignment is not None and tensor.is_floating_point():
                tensor = transport(tensor, name, model.graph, alignment, anchor=before.to(tensor))
            term = tensor * (weight / total)
            mean = term if mean is None else mean + term
        assert mean is not None
        return mean


def mean_of(members: Sequence[Member], anchor: Model, recipe: Recipe) -> Mean:
    """The mean of the members that have a weight, in the anchor's graph.

    Where units are matched by what they do on inputs, those of the mean do the mean of what those
    of the members do, place by place.
    """
    counted = tuple(member for member in members if member[2] > 0)
    seen = {}
    if recipe.align == "acts":
        seen = {space: _mean_observed(space, counted) for space in anchor.observed}
    return Mean(anchor.index, anchor.checkpoint, anchor.graph, anchor.device, seen, members=counted)


def _mean_observed(space: str, members: Sequence[Member]) -> tuple[Activations, ...]:
    total = sum(weight for _, _, weight in members)
    means: list[Activations] = []
    for places in zip(*(model.observed[space] for model, _, _ in members), strict=True):
        features_NF: torch.Tensor | None = None
        for place, (_, alignment, weight) in zip(places, members, strict=True):
            term = place.features_NF
            if alignment is not None and space in alignment.maps:
                term = alignment.maps[space].produce(term, 0)
            term = term * (weight / total)
            features_NF = term if features_NF is None else features_NF + term
        assert features_NF is not None
        means.append(Activations(places[0].layer, places[0].weight, features_NF))
    return tuple(means)


def realign(
    sources: Sequence[Model],
    matches: Sequence[Match],
    anchor: Model,
    weights: Sequence[float],
    recipe: Recipe,
    runtime: Runtime,
) -> list[Match]:
    """Passes 2 to `recipe.passes`; ends early when a pass moves nothing.

    With `--matcher sweep` a source is swept anew, which may lower the objective; otherwise descent
    improves the maps it has. With two models the mean of the others is the anchor: nothing is left
    to do.

    Args:
        sources: The models that are aligned.
        matches: What the first pass found for them.
        anchor: Stays in place.
        weights: Of all models, by their index.
        recipe: Its passes, matcher and solver.
        runtime: Seed and progress.

    Raises:
        SolveFailed: A transport problem was not solved.
    """
    improved = list(matches)
    if len(sources) < 2 or recipe.align == "none":
        return improved
    maps = [unscaled(match) for match in improved]
    extra: list[list[Candidate]] = [[] for _ in sources]
    for number in range(2, recipe.passes + 1):
        moved = False
        for at, source in enumerate(sources):
            others: list[Member] = [(anchor, None, weights[anchor.index])]
            others += [(m, maps[k], weights[m.index]) for k, m in enumerate(sources) if k != at]
            target = mean_of(others, anchor, recipe)
            found = again(source, target, maps[at], recipe, runtime, number)
            value, flop = found.objective, found.flop
            moved |= not same_maps(found.alignment, maps[at])
            maps[at] = found.alignment
            extra[at].append(Candidate(f"pass {number}", source.index, value, None, flop, False))
        if not moved:
            break
    for at, source in enumerate(sources):
        if extra[at] and not same_maps(maps[at], unscaled(improved[at])):
            before = tuple(c.replace(chosen=False) for c in improved[at].candidates)
            extra[at][-1] = extra[at][-1].replace(chosen=True)
            moved_match = replace(improved[at], candidates=before)
            improved[at] = with_maps(moved_match, source, anchor, maps[at], recipe)
        improved[at] = replace(improved[at], candidates=(*improved[at].candidates, *extra[at]))
    return improved


def again(
    source: Model, target: Mean, maps: Alignment, recipe: Recipe, runtime: Runtime, number: int
) -> Found:
    """A source matched to a mean: swept anew (`--matcher sweep`), or by descent from its maps."""
    work = Similarity(source, target, paper_scale=recipe.scale == "paper")
    if recipe.matcher == "sweep":
        swept = sweep(source, target, recipe, runtime)
        return Found(swept.alignment, work.objective(swept.alignment), swept.flop)
    generator = runtime.generator(1000 * source.index + 100 * number)
    return descend(work, maps, recipe, generator)


def unscaled(match: Match) -> Alignment:
    """Its maps, without what `--scale` adds."""
    return replace(match.alignment, scales={}, shares={})


def with_maps(match: Match, source: Model, anchor: Model, maps: Alignment, recipe: Recipe) -> Match:
    """A match with other maps, measured and scaled."""
    spaces, layers = measure(source, anchor, maps, recipe, {})
    alignment = scale_maps(source, anchor, maps, recipe)
    return replace(match, alignment=alignment, spaces=spaces, layers=layers)


def same_maps(one: Alignment, other: Alignment) -> bool:
    """Whether two alignments have the same maps."""
    if one is other:
        return True
    for mine, theirs in pairs_of_maps(one, other):
        a, b = plan_of(mine), plan_of(theirs)
        if a.index_M is not None and b.index_M is not None:
            if not torch.equal(a.index_M, b.index_M):
                return False
        elif a is not b and not torch.equal(a.dense(), b.dense()):
            return False
    return True


def medoid(models: Sequence[Model], recipe: Recipe, runtime: Runtime) -> int:
    """The model with the least summed sweep cost from all others; the first among equals.

    The cost of a pair is the mean over spaces of the OT cost of its sweep; models of equal widths.
    """
    totals = [0.0] * len(models)
    pairs = [(s, a) for s in models for a in models if s is not a]
    work = _PairCost(recipe, runtime.inner())
    for (_, anchor), cost in zip(pairs, runtime.workers.each(work, pairs), strict=True):
        totals[anchor.index] += cost
    return min(range(len(models)), key=totals.__getitem__)


@dataclass(frozen=True)
class _PairCost:
    """What aligning one model to another costs, in the mean over spaces."""

    recipe: Recipe
    runtime: Runtime

    def __call__(self, item: tuple[Model, Model]) -> float:
        """By a sweep of the first onto the second."""
        source, anchor = item
        costs = [s.ot_cost for s in sweep(source, anchor, self.recipe, self.runtime).spaces]
        numbers = [c for c in costs if c is not None]
        return sum(numbers) / max(1, len(numbers))
