"""One source against the anchor, by the recipe's matcher."""

from __future__ import annotations

from ..errors import UsageError
from ..runtime import Runtime
from .alignment import Alignment
from .balance import balance
from .descent import Found
from .measure import measure
from .models import Model
from .portfolio import Portfolio
from .recipe import Recipe
from .residual_average import sweep_average
from .sweep import Match, stream_spaces, sweep


def match(
    source: Model, anchor: Model, recipe: Recipe, runtime: Runtime, *, random: bool = False
) -> Match:
    """Align `source` to `anchor`; with `align none` every unit stays in its place.

    With `random`, the records say what random maps would cost, too: one more cost matrix each.

    Raises:
        SolveFailed: A transport problem was not solved.
        UsageError: A matcher that looks for one map per space, with options that have no such map.
    """
    if recipe.align == "none":
        return Match(Alignment({}), (), ())
    average = recipe.residual == "average" and bool(stream_spaces(anchor.graph))
    first = (sweep_average if average else sweep)(source, anchor, recipe, runtime, random=random)
    errors = {s.id: s.marginal_error for s in first.spaces}
    swept = Found(first.alignment, 0.0, first.flop, errors=errors)
    portfolio = Portfolio(source, anchor, recipe, runtime, swept)
    only = _sweep_only(recipe, average=average)
    warnings: tuple[str, ...] = ()
    if recipe.matcher in ("descent", "frank-wolfe") and only is not None:
        raise UsageError(
            f"--matcher {recipe.matcher} can't be combined with {only}",
            where=f"--matcher {recipe.matcher}",
            why="it improves one objective over the maps of all spaces, which is not defined there",
            fix="use --matcher sweep",
        )
    if recipe.matcher == "auto" and only is not None:
        warnings = (f"--matcher auto is the sweep alone with {only}",)
    elif recipe.matcher == "auto":
        portfolio.auto()
    elif recipe.matcher != "sweep" and not (
        recipe.matcher == "frank-wolfe" and portfolio.frank_wolfe()
    ):
        portfolio.descent()
    outcome = portfolio.outcome()
    spaces, layers = first.spaces, first.layers
    if outcome.best is not portfolio.swept:
        chosen = outcome.best
        spaces, layers = measure(
            source, anchor, chosen.alignment, recipe, chosen.errors, random=random
        )
    alignment = outcome.best.alignment
    if recipe.scale == "balanced":
        alignment = balance(source, anchor, alignment)
    return Match(
        alignment,
        spaces,
        layers,
        outcome.best.flop,
        outcome.candidates,
        (*warnings, *outcome.warnings),
    )


def _sweep_only(recipe: Recipe, *, average: bool) -> str | None:
    """The option that leaves nothing but a sweep, if there is one."""
    if average:
        return "--residual average"
    return "--solver unbalanced" if recipe.solver == "unbalanced" else None
