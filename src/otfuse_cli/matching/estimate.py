"""What a merge would take, in bytes and operations, from shapes alone: nothing is read or timed.

Operations are counted as the portfolio counts them, memory as `--max-memory` counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ..report.records import Estimate
from ..requests.recipe import Recipe
from .features import producers
from .matchers.descent import movable
from .memory import matching_memory
from .models import Model
from .search_plan import FEW_PASSES, USUAL_PASSES, further_steps, takes_few_passes, usual_flop
from .similarity import Similarity


def estimate_merge(sources: Sequence[Model], anchor: Model, recipe: Recipe) -> Estimate:
    """Memory and operations of fusing `sources` into `anchor` with `--matcher auto`.

    Sources come one after another: operations add up, memory is that of the largest.
    """
    steps: dict[str, float] = {}
    skipped: dict[str, None] = {}
    recipe = replace(recipe, matcher="auto")
    for source in sources:
        planned, left_out = _plan(Similarity(source, anchor), recipe)
        for name, flop in planned.items():
            steps[name] = steps.get(name, 0.0) + flop
        skipped |= dict.fromkeys(left_out)
    memories = [matching_memory(source, anchor, recipe) for source in sources]
    most = max(memories, key=lambda memory: memory.total)
    return Estimate(
        memory_bytes=most.total,
        tensor_bytes=most.rows,
        cost_bytes=most.cost,
        kept_bytes=most.kept,
        flop=sum(flop for name, flop in steps.items() if name not in skipped),
        effort=recipe.effort,
        steps=steps,
        skipped=tuple(skipped),
    )


def _plan(work: Similarity, recipe: Recipe) -> tuple[Mapping[str, float], Sequence[str]]:
    """Every search of the portfolio with its operations, and those that don't fit the effort."""
    source, anchor = work.source, work.anchor
    spaces = movable(work, recipe)
    steps = {"sweep": _sweep_flop(source, anchor)}
    if not spaces:
        return steps, ()
    usual = usual_flop(work, spaces)
    few = takes_few_passes(steps["sweep"], usual, recipe)
    steps["descent"] = usual * FEW_PASSES / USUAL_PASSES if few else usual
    left = recipe.effort - sum(steps.values())
    further: dict[str, float] = {}
    for step in further_steps(work, spaces, recipe):
        if step.matcher is None or step.matcher.hindered(source, anchor, recipe) is None:
            further[step.name] = step.flop
    skipped = []
    for name, flop in further.items():
        if flop <= left:
            left -= flop
        else:
            skipped.append(name)
    return steps | further, skipped


def _sweep_flop(source: Model, anchor: Model) -> float:
    total = 0.0
    for space in anchor.graph.free():
        if space.per is None:
            features = sum(
                prod(anchor.graph.tensors[p.weight].shape) / space.size
                + (p.bias is not None or p.norm is not None)
                for p in producers(anchor.graph, space.id)
            )
            total += 2.0 * source.graph.spaces[space.id].size * space.size * features
    return total
