"""One source against the anchor, by the recipe's matcher."""

from __future__ import annotations

from dataclasses import replace

from ..errors import IncompatibleModels, UsageError
from ..graph.axes import axis_units
from ..report.records import Candidate
from ..requests.recipe import Recipe
from ..runtime import Runtime
from .alignment import Alignment
from .alignment_costs import measure
from .matchers.descent import Found
from .matchers.searches import DESCENT, SEARCHES
from .matchers.sweep import Match, stream_spaces, sweep
from .models import Model
from .portfolio import Judge, Portfolio, in_place_warning
from .rescale_units import balance
from .residual_average import sweep_average
from .width_weights import weigh


def match(
    source: Model,
    anchor: Model,
    recipe: Recipe,
    runtime: Runtime,
    judge: Judge | None = None,
    *,
    random: bool = False,
) -> Match:
    """Align `source` to `anchor`; with `align none` every unit stays in its place.

    A `judge` scores the candidates of `--matcher auto`; without one the objective decides. With
    `random`, the records say what random maps would cost, too: one more cost matrix each.

    Raises:
        SolveFailed: A transport problem was not solved.
        UsageError: A matcher that looks for one map per space, with options that have no such map.
        IncompatibleModels: A complex tensor that would have to be moved, or no alignment of
            different widths.
    """
    if recipe.align == "none":
        _require_same_sizes(source, anchor)
        return Match(Alignment({}), (), ())
    if recipe.residual == "orthogonal":
        raise only_merge_turns()
    _require_real(source)
    _require_real(anchor)
    average = recipe.residual == "average" and bool(stream_spaces(anchor.graph))
    first = (sweep_average if average else sweep)(source, anchor, recipe, runtime, random=random)
    only = _sweep_only(average=average)
    if recipe.matcher == "sweep" or (recipe.matcher == "auto" and only is not None):
        return _alone(source, anchor, recipe, first, only)
    if recipe.matcher in SEARCHES and only is not None:
        raise UsageError(
            f"--matcher {recipe.matcher} can't be combined with {only}",
            where=f"--matcher {recipe.matcher}",
            why="it improves one objective over the maps of all spaces, which is not defined there",
            fix="use --matcher sweep",
        )
    errors = {s.id: s.marginal_error for s in first.spaces}
    swept = Found(first.alignment, 0.0, first.flop, errors=errors)
    portfolio = Portfolio(source, anchor, recipe, runtime, swept, judge)
    if recipe.matcher == "auto":
        if source.observed and recipe.align == "wts" and recipe.solver == "exact":
            seen = sweep(source, anchor, replace(recipe, align="acts"), runtime)
            portfolio.observe(Found(seen.alignment, 0.0, seen.flop))
        portfolio.auto()
    elif not portfolio.search(SEARCHES[recipe.matcher]):
        portfolio.search(DESCENT)
    outcome = portfolio.outcome()
    spaces, layers = first.spaces, first.layers
    if outcome.best is not portfolio.swept:
        chosen = outcome.best
        spaces, layers = measure(
            source, anchor, chosen.alignment, recipe, chosen.errors, random=random
        )
    return Match(
        scale_maps(source, anchor, outcome.best.alignment, recipe),
        spaces,
        layers,
        outcome.best.flop,
        outcome.candidates,
        outcome.warnings,
    )


def _alone(source: Model, anchor: Model, recipe: Recipe, swept: Match, only: str | None) -> Match:
    """The sweep's answer; with nothing to compare it to, its objective is not computed."""
    alignment = swept.alignment
    warnings = in_place_warning(source, alignment)
    if recipe.matcher == "auto":
        warnings = (f"--matcher auto is the sweep alone with {only}", *warnings)
    return replace(
        swept,
        alignment=scale_maps(source, anchor, alignment, recipe),
        candidates=(Candidate("sweep", source.index, None, None, swept.flop, True),),
        warnings=warnings,
    )


def only_merge_turns() -> UsageError:
    """For everything that matches models without changing them."""
    return UsageError(
        "only merge turns residual streams",
        where="--residual orthogonal",
        why="the models themselves are changed before they are averaged",
        fix="use otfuse merge, or --residual shared",
    )


def _require_real(model: Model) -> None:
    """Complex tensors stay in place: no cost is defined for them."""
    for name, tensor in model.graph.tensors.items():
        units = [u for axis in tensor.axes for u in axis_units(axis.expr)]
        free = [u for u in units if model.graph.spaces[u].pinned is None]
        if free and model.checkpoint.infos[name].dtype.is_complex:
            raise IncompatibleModels(
                "a complex tensor with units to match",
                where=f"{model.checkpoint.label}, tensor {name}",
                why=f"space {free[0]} may move, and costs are defined for real weights only",
                fix="pin that space in a spec, or use --align none",
            )


def scale_maps(source: Model, anchor: Model, alignment: Alignment, recipe: Recipe) -> Alignment:
    """What `--scale` adds to maps between different widths, once they are found."""
    if recipe.scale == "balanced":
        return balance(source, anchor, alignment)
    return weigh(alignment) if recipe.scale == "auto" else alignment


def _require_same_sizes(source: Model, anchor: Model) -> None:
    """Units that stay in their places need the same places in both models."""
    for space in anchor.graph.spaces.values():
        size = source.graph.sizes.get(space.id, space.size)
        if size != space.size:
            raise IncompatibleModels(
                "models of different widths have no plain average",
                where=f"space {space.id}: {size} units in {source.checkpoint.label}, "
                f"{space.size} in {anchor.checkpoint.label}",
                why="with --align none every unit stays in its place",
                fix="use --align wts",
            )


def _sweep_only(*, average: bool) -> str | None:
    """The option that leaves nothing but a sweep, if there is one."""
    return "--residual average" if average else None
