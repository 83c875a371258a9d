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
    nodes = graph.tensors
    all_differences = [
        Difference(source, "missing", name, None, node.shape)
        for name, node in nodes.items()
        if name not in shapes
    ]
    all_differences += [
        Difference(source, "extra", n, shapes[n], None) for n in shapes if n not in nodes
    ]
    even = {n: shapes[n] for n in nodes if n in shapes and len(shapes[n]) == len(nodes[n].shape)}
    all_differences += [
        Difference(source, "axes", n, shapes[n], nodes[n].shape)
        for n in nodes
        if n in shapes and n not in even
    ]
    sizes, misfits = solve_widths(graph, even)
    all_differences += [
        Difference(source, "size", m.name, shapes[m.name], nodes[m.name].shape, m.text)
        for m in misfits
    ]
    all_differences += [
        Difference(source, "width", s.id, (sizes[s.id],), (s.size,))
        for s in graph.free()
        if sizes.get(s.id, s.size) != s.size
    ]
    return tuple(all_differences)
