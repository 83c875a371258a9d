"""What a merge would take, in bytes and operations, from shapes alone: nothing is read or timed.

Operations are counted as the portfolio counts them, memory as the largest of what is in flight at
one time: the rows of a space with their copies, its cost and plan, tensors kept between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..report.records import Estimate
from ..requests.recipe import Recipe
from .features import producers
from .matchers.descent import movable
from .matchers.matcher import no_permutations
from .matchers.searches import FURTHER
from .models import Model
from .portfolio import FEW_PASSES, ORDERS, USUAL_PASSES
from .similarity import Similarity

# Rows as stored, moved, and at unit norm; float32.
_COPIES, _NUMBER = 3, 4
# A cost in float32, beside it float64 for the assignment.
_COST = 12


def estimate_merge(sources: Sequence[Model], anchor: Model, recipe: Recipe) -> Estimate:
    """Memory and operations of fusing `sources` into `anchor` with `--matcher auto`.

    Sources come one after another: operations add up, memory is that of the largest.
    """
    steps: dict[str, float] = {}
    skipped: dict[str, None] = {}
    rows = cost = kept = 0
    for source in sources:
        work = Similarity(source, anchor)
        kept = max(kept, work.kept_bytes)
        rows = max(rows, _rows_bytes(source, anchor))
        cost = max(cost, _cost_bytes(source, anchor))
        planned, left_out = _plan(work, recipe)
        for name, flop in planned.items():
            steps[name] = steps.get(name, 0.0) + flop
        skipped |= dict.fromkeys(left_out)
    return Estimate(
        memory_bytes=rows + cost + kept,
        tensor_bytes=rows,
        cost_bytes=cost,
        kept_bytes=kept,
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
    one = work.pass_flop(spaces)
    usual = USUAL_PASSES * one
    soft = recipe.solver != "exact"
    few = soft or steps["sweep"] + usual > recipe.effort
    steps["descent"] = (FEW_PASSES if few else USUAL_PASSES) * one
    left = recipe.effort - sum(steps.values())
    further: dict[str, float] = {}
    for matcher in FURTHER:
        if matcher.hindered(source, anchor, recipe) is None:
            further[matcher.name] = matcher.planned_flop(work, spaces) + usual
    if no_permutations(source, anchor, recipe) is None:
        further["identity + descent"] = usual
    if not soft:
        further |= {f"descent, order {order}": usual for order in range(1, ORDERS)}
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


def _rows_bytes(source: Model, anchor: Model) -> int:
    """The rows of the largest space, both models', in all copies that exist at one time."""
    largest = 0
    for space in anchor.graph.free():
        names = [p.weight for p in producers(anchor.graph, space.id)]
        pair = (prod(m.graph.tensors[n].shape) for m in (source, anchor) for n in names)
        largest = max(largest, sum(pair))
    return _COPIES * _NUMBER * largest


def _cost_bytes(source: Model, anchor: Model) -> int:
    """The largest cost with its assignment; beside it a plan for every space that moves."""
    sizes = [(source.graph.spaces[s.id].size, s.size) for s in anchor.graph.free()]
    areas = [n * m for n, m in sizes]
    return _COST * max(areas, default=0) + 2 * _NUMBER * sum(areas)
