"""Everything in which a checkpoint differs from the anchor's graph, fatal or not."""

from __future__ import annotations

from ...report.records import Difference
from ..model import LayerGraph, Shapes
from ..sizes import solve_widths

# Kinds that don't keep two models from being fused.
ALLOWED = frozenset({"width", "dtype"})


def differences(graph: LayerGraph, shapes: Shapes, *, source: int) -> tuple[Difference, ...]:
    """All differences of a model with `shapes` from the anchor's graph, in a stable order.

    Args:
        graph: The anchor's.
        shapes: The other model's tensors.
        source: Its position among the inputs.
    """
    missing: list[Difference] = []
    axes: list[Difference] = []
    even: dict[str, tuple[int, ...]] = {}
    for name, node in graph.tensors.items():
        if name not in shapes:
            missing.append(Difference(source, "missing", name, None, node.shape))
        elif len(shapes[name]) != len(node.shape):
            axes.append(Difference(source, "axes", name, shapes[name], node.shape))
        else:
            even[name] = shapes[name]
    extra: list[Difference] = []
    for name, shape in shapes.items():
        if name not in graph.tensors:
            extra.append(Difference(source, "extra", name, shape, None))
    # Sizes are solved from what has as many axes as the anchor's.
    solved, misfits = solve_widths(graph, even)
    sizes: list[Difference] = []
    for misfit in misfits:
        shape, anchor_shape = shapes[misfit.name], graph.tensors[misfit.name].shape
        sizes.append(Difference(source, "size", misfit.name, shape, anchor_shape, misfit.text))
    widths: list[Difference] = []
    for space in graph.free():
        size = solved.get(space.id, space.size)
        if size != space.size:
            widths.append(Difference(source, "width", space.id, (size,), (space.size,)))
    return (*missing, *extra, *axes, *sizes, *widths)
