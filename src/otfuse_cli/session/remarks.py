"""What a reader of the result must know of the maps that made it: what they can't keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import few
from ..fusion.average import Aligned
from ..fusion.repair import Repair
from ..graph.axes import axis_units
from ..graph.model import LayerGraph, Role
from ..matching.models import Model
from ..requests.recipe import Recipe

# From widths that differ by more than this factor, an average mostly loses.
_WIDTHS = 2


def remarks_on_maps(
    graph: LayerGraph, recipe: Recipe, aligned: Sequence[Aligned], repair: Repair | None
) -> tuple[str, ...]:
    """Warnings of the anchor's graph, of what is repaired, and of maps that are no permutations."""
    remarks = list(graph.warnings)
    if repair is not None:
        remarks += repair.warnings
    soft = [a for a in aligned if not a.alignment.hard]
    has_statistics = any(n.endswith("running_var") for n in graph.tensors)
    if repair is None and soft and has_statistics:
        remarks.append(
            "BatchNorm statistics went through maps that are not permutations: running variances "
            "are weighted means, exact for duplicated units only"
        )
    if recipe.residual == "average" and any(a.alignment.overrides for a in aligned):
        remarks.append("--residual average does not keep the function of the aligned sources")
    merged = {s for a in soft for s, map in a.alignment.maps.items() if not map.hard}
    if made := list(_scaled_matrices(graph, merged)):
        remarks.append(
            f"{few(made)}: multiplied by what the network computes before it is read, so that "
            "merged units are averages there, where weights that read them should add up: a "
            "source of another width loses more than elsewhere"
        )
    return tuple(remarks)


def unlike_widths(anchor: Model, aligned: Sequence[Aligned]) -> tuple[str, ...]:
    """Without inputs, an average across very different widths is mostly a loss."""
    remarks = []
    for source in aligned:
        if source.weight >= 1:
            continue
        sizes = [(s.size, source.model.graph.sizes[s.id]) for s in anchor.graph.free()]
        anchor_width, source_width = max(
            sizes, key=lambda pair: max(pair) / min(pair), default=(1, 1)
        )
        if max(anchor_width, source_width) > _WIDTHS * min(anchor_width, source_width):
            remarks.append(
                f"widths of checkpoint {source.model.index} and the anchor differ by more than a "
                f"factor of {_WIDTHS} ({source_width} units beside {anchor_width}): the anchor "
                "alone is probably better than this average. Inputs help: --arch with --samples "
                "FILE or --synthetic"
            )
    return tuple(remarks)


def _scaled_matrices(graph: LayerGraph, merged: set[str]) -> Iterator[str]:
    """Matrices on whose axes units are neither made nor read, but scaled, and merged.

    A convolution that is modulated by each input multiplies its weight first: which axis makes
    units and which reads them can't be seen any more, and only permutations are exact.
    """
    for name, tensor in graph.tensors.items():
        axes = [(set(axis_units(a.expr)), a.roles) for a in tensor.axes]
        several = sum(bool(units) for units, _ in axes) > 1
        if several and any(Role.SCALE in roles and units & merged for units, roles in axes):
            yield name
