"""How much a model counts where widths differ (`--scale auto`): by how many units stand for one.

Of k unrelated units their mean explains a k-th. Averaged half and half with an anchor's unit that
stands for itself alone, such a blur spoils more than it brings. The other way round, where one
source unit stands beside several of the anchor's, the blur would be the anchor's. So the weight
of a source of N units is multiplied by M/N on each axis that is moved to M, and weights are made
to sum to 1 again. Equal models fuse to themselves whatever the weights, and so do a network and
its widened twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ..graph.axes import Axis, Cat, axis_units
from ..graph.model import LayerGraph
from .alignment import Alignment


def weigh(alignment: Alignment) -> Alignment:
    """Give `alignment` a share for each space whose widths differ.

    Maps that keep anchor units, and what is inside heads, count in full.
    """
    shares = {
        space: map.sizes[1] / map.sizes[0]
        for space, map in alignment.maps.items()
        if map.sizes[0] != map.sizes[1] and map.kept is None
    }
    return replace(alignment, shares=shares)


def effective(
    name: str, graph: LayerGraph, sources: Sequence[tuple[Alignment, float]]
) -> list[float]:
    """Weights of the sources in the average of one tensor; the anchor has what they leave.

    Args:
        name: The tensor.
        graph: The anchor's graph.
        sources: Alignment and weight of each source; weights sum to 1 with the anchor's.
    """
    weights = [w for _, w in sources]
    if not any(a.shares for a, _ in sources):
        return weights
    rest = 1.0 - sum(weights)
    axes = [axis.expr for axis in graph.tensors[name].axes]
    scaled = [w * prod(_on_axis(a, expr) for expr in axes) for a, w in sources]
    total = rest + sum(scaled)
    return [w / total for w in scaled]


def _on_axis(alignment: Alignment, expr: Axis) -> float:
    """The share along an axis: one number, so none where several spaces lie side by side."""
    units = set(axis_units(expr))
    if isinstance(expr, Cat) and len(units) > 1:
        return 1.0
    return prod(alignment.shares.get(u, 1.0) for u in units)
