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
from .alignment import Alignment
from .alignment_costs import measure
from .apply import transport
from .match import scale_maps
from .matchers.descent import descend
from .matchers.sweep import Match, sweep
from .models import Model
from .similarity import Similarity


@dataclass(frozen=True)
class Mean(Model):
    """The weighted mean of aligned models, read tensor by tensor, in the anchor's graph.

    Attributes:
        members: Model, its maps (None: in place) and its weight.
    """

    members: tuple[tuple[Model, Alignment | None, float], ...] = field(default=())

    def read(self, name: str) -> torch.Tensor:
        """The mean of one tensor, float32 or float64."""
        total = sum(weight for _, _, weight in self.members)
        mean: torch.Tensor | None = None
        before = Model.read(self, name)
        for model, alignment, weight in self.members:
            tensor = model.read(name)
            if alignment is not None and tensor.is_floating_point():
                tensor = transport(tensor, name, model.graph, alignment, anchor=before.to(tensor))
            term = tensor * (weight / total)
            mean = term if mean is None else mean + term
        assert mean is not None
        return mean


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
    maps = [replace(m.alignment, scales={}, shares={}) for m in improved]
    extra: list[list[Candidate]] = [[] for _ in sources]
    for number in range(2, recipe.passes + 1):
        moved = False
        for at, source in enumerate(sources):
            others: list[tuple[Model, Alignment | None, float]]
            others = [(anchor, None, weights[anchor.index])]
            others += [(m, maps[k], weights[m.index]) for k, m in enumerate(sources) if k != at]
            target = Mean(
                anchor.index,
                anchor.checkpoint,
                anchor.graph,
                anchor.device,
                members=tuple(o for o in others if o[2] > 0),
            )
            again, candidate = _again(source, target, maps[at], recipe, runtime, number)
            moved |= not _same(again, maps[at])
            maps[at] = again
            extra[at].append(candidate)
        if not moved:
            break
    for at, source in enumerate(sources):
        if extra[at] and not _same(maps[at], replace(improved[at].alignment, scales={}, shares={})):
            spaces, layers = measure(source, anchor, maps[at], recipe, {})
            alignment = scale_maps(source, anchor, maps[at], recipe)
            before = tuple(c.replace(chosen=False) for c in improved[at].candidates)
            extra[at][-1] = extra[at][-1].replace(chosen=True)
            improved[at] = replace(
                improved[at],
                alignment=alignment,
                spaces=spaces,
                layers=layers,
                candidates=before,
            )
        improved[at] = replace(improved[at], candidates=(*improved[at].candidates, *extra[at]))
    return improved


def _again(
    source: Model, target: Mean, maps: Alignment, recipe: Recipe, runtime: Runtime, number: int
) -> tuple[Alignment, Candidate]:
    work = Similarity(source, target, paper_scale=recipe.scale == "paper")
    if recipe.matcher == "sweep":
        swept = sweep(source, target, recipe, runtime)
        again, flop, value = swept.alignment, swept.flop, work.objective(swept.alignment)
    else:
        generator = runtime.generator(1000 * source.index + 100 * number)
        better = descend(work, maps, recipe, generator)
        again, flop, value = better.alignment, better.flop, better.objective
    return again, Candidate(f"pass {number}", source.index, value, None, flop, False)


def _same(one: Alignment, other: Alignment) -> bool:
    """Whether two alignments have the same maps."""
    if one is other:
        return True
    pairs = [(one.maps[s], other.maps[s]) for s in one.maps]
    pairs += [p for s in one.families for p in zip(one.families[s], other.families[s], strict=True)]
    for mine, theirs in pairs:
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
    for i, source in enumerate(models):
        for j, anchor in enumerate(models):
            if i != j:
                costs = [s.ot_cost for s in sweep(source, anchor, recipe, runtime).spaces]
                numbers = [c for c in costs if c is not None]
                totals[j] += sum(numbers) / max(1, len(numbers))
    return min(range(len(models)), key=totals.__getitem__)
