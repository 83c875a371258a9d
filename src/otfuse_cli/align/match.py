"""One source against the anchor, by the recipe's matcher."""

from __future__ import annotations

from ..runtime import Runtime
from .alignment import Alignment
from .models import Model
from .recipe import Recipe
from .residual_average import sweep_average
from .sweep import Match, stream_spaces, sweep


def match(source: Model, anchor: Model, recipe: Recipe, runtime: Runtime) -> Match:
    """Align `source` to `anchor`; with `align none` every unit stays in its place."""
    if recipe.align == "none":
        return Match(Alignment({}), (), ())
    if recipe.residual == "average" and stream_spaces(anchor.graph):
        return sweep_average(source, anchor, recipe, runtime)
    return sweep(source, anchor, recipe, runtime)
