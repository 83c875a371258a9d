"""Two layers in, matched layers out: what `otfuse_cli.align(...)` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import IncompatibleModels, UnreadableInput
from ..requests.python_values import bad_value, options_of
from ..requests.recipe import Recipe
from ..transport.maps import Map
from .features import Producer
from .match_space import ProducerRows, identity_cost, solve_rows, to_map


@dataclass(frozen=True)
class AlignedLayer:
    """A layer on the anchor's units.

    Attributes:
        weight: The source's rows moved: anchor units x the source's other axes.
        map: Moves what belongs to the same units: `map.produce(bias, 0)`, and the next layer's
            columns: `map.consume(weight, 1)`.
        ot_cost: `<plan, cost>`.
        identity_cost: Cost of leaving every unit in its place; None for unequal sizes.
    """

    weight: torch.Tensor
    map: Map
    ot_cost: float
    identity_cost: float | None


def align_layers(source: Any, anchor: Any, **options: Any) -> AlignedLayer:
    """Match the units of one layer to another's: two weights in, the matched one out.

    Args:
        source: Weight, units on axis 0: a tensor, or what makes one (an array, nested lists).
        anchor: Weight with the same other axes.
        options: Fields of `Recipe`: metric, unit_norm, mass, solver, epsilon, scale.

    Raises:
        OtfuseError: Shapes that don't fit, values that aren't finite, a solve that failed.
    """
    recipe = Recipe(**options_of(Recipe, options))
    source, anchor = _tensor("source", source), _tensor("anchor", anchor)
    if source.dim() < 1 or source.shape[1:] != anchor.shape[1:]:
        raise IncompatibleModels(
            "the layers don't fit together",
            where=f"{list(source.shape)} and {list(anchor.shape)}",
            why="all axes but the first must agree",
            fix="move the source's inputs onto the anchor's first",
        )
    wide = torch.promote_types(torch.promote_types(source.dtype, anchor.dtype), torch.float32)
    rows = [t.to(wide).reshape(len(t), -1) for t in (source, anchor)]
    for side, values in zip(("source", "anchor"), rows, strict=True):
        if not torch.isfinite(values).all():
            raise UnreadableInput("a weight is not finite", where=side)
    pair = ProducerRows((Producer("layer", "weight", 0),), (rows[0],), (rows[1],))
    solution = solve_rows(pair, recipe)
    map = to_map(solution.plan, recipe)
    return AlignedLayer(map.produce(source, 0), map, solution.ot_cost, identity_cost(pair, recipe))


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise bad_value(name, value, "a weight is an array of numbers") from error
    if tensor.is_complex():
        raise bad_value(name, value, "a weight is an array of real numbers")
    return tensor if tensor.is_floating_point() else tensor.float()
