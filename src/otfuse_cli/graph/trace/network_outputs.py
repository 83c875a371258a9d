"""Outputs of a network: which of them count, and how much of it they hold in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...errors import few
from ..model import PINNED, LayerGraph
from ..sizes import matched_share

if TYPE_CHECKING:
    from torch.export import ExportedProgram

LOGITS = "logits"
# A share of the parameters that is worth a word.
_MUCH = 0.1


def pick_outputs(outputs: Any) -> list[torch.Tensor]:
    """The output tensors that matter: logits where there are any, else all of them."""
    chosen = getattr(outputs, LOGITS, None)
    if isinstance(outputs, Mapping):
        named = logits_among(outputs)
        chosen = [outputs[name] for name in named] if named else None
    leaves = pytree.tree_leaves(outputs if chosen is None else chosen)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def logits_among(names: Iterable[Any]) -> list[Any]:
    """Of an output's names `logits`, or where it has none of that name, all that contain it.

    A network of two towers has `logits_per_image`, one that finds answers `start_logits`.
    """
    every = list(names)
    if LOGITS in every:
        return [LOGITS]
    return [name for name in every if isinstance(name, str) and LOGITS in name]


def checked_outputs(program: ExportedProgram) -> Sequence[int] | None:
    """Positions of the logits among the flat outputs; None when there are none."""
    spec = program.call_spec.out_spec
    if spec is None:
        return None
    keys = spec.context if isinstance(spec.context, (list, tuple)) else None
    named = logits_among(keys or ())
    if keys is None or not named:
        return None
    positions: list[int] = []
    start = 0
    # A method in newer releases of torch, an attribute in older ones.
    children = spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    for key, child in zip(keys, children, strict=False):
        if key in named:
            positions += range(start, start + child.num_leaves)
        start += child.num_leaves
    return positions


def output_names(program: ExportedProgram) -> tuple[str, ...]:
    """What a program calls its outputs; none where they are a tensor or a tuple."""
    spec = program.call_spec.out_spec
    keys = None if spec is None else spec.context
    return tuple(map(str, keys)) if isinstance(keys, (list, tuple)) else ()


def may_be_held(graph: LayerGraph) -> bool:
    """Whether outputs may hold much of a network in place."""
    matched = matched_share(graph)
    if matched is None or matched > 1 - _MUCH:
        return False
    return any(space.pinned == PINNED["out"] for space in graph.spaces.values())


def with_outputs_told(graph: LayerGraph, freed: LayerGraph, names: Sequence[str]) -> LayerGraph:
    """`graph` with a warning, where its outputs hold much of it; `freed` is without their pins."""
    now, then = matched_share(graph), matched_share(freed)
    assert now is not None
    assert then is not None
    if then - now < _MUCH:
        return graph
    which = f"outputs ({few(names)})" if names else "outputs"
    warning = (
        f"its {which} keep their units in place: {100 * now:.0f} % of the parameters can be "
        f"matched, {100 * then:.0f} % with --free-outputs, where outputs come in the anchor's order"
    )
    return replace(graph, warnings=(*graph.warnings, warning))
