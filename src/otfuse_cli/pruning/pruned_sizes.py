"""What pruning did, as the report holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..graph.model import LayerGraph
from ..report.records import PrunedLayer, PrunedSpace, Pruning, RemovedBlock
from .choose_blocks import Removal
from .compact import parameters
from .survivors import Survivors


def pruning_record(
    before: LayerGraph,
    after: LayerGraph,
    *,
    criterion: str | None = None,
    survivors: Mapping[str, Survivors] | None = None,
    advice: Sequence[str] = (),
    removals: Sequence[Removal] = (),
) -> Pruning:
    """Sizes before and after, space by space and module by module, and overall.

    `after` may lack tensors: those of blocks that were removed.
    """
    old, new = _shapes(before), _shapes(after)
    modules: dict[str, list[str]] = {}
    for name in old:
        modules.setdefault(name.rpartition(".")[0] or name, []).append(name)
    layers = []
    for module, names in modules.items():
        whole = parameters({n: old[n] for n in names})
        left = parameters({n: new[n] for n in names if n in new})
        layers.append(PrunedLayer(module, whole, left, _share(whole, left)))
    spaces: list[PrunedSpace] = []
    for space in sorted(after.free(), key=lambda s: s.order):
        size = before.spaces[space.id].size
        # Where survivors were found, every space is told; of a pruning those that changed.
        if space.per is None and (criterion is None or size != space.size):
            same = None if survivors is None else len(survivors[space.id].pruned_S)
            spaces.append(PrunedSpace(space.id, size, space.size, same))
    whole, left = parameters(old), parameters(new)
    return Pruning(
        criterion,
        whole,
        left,
        _share(whole, left),
        tuple(spaces),
        tuple(layers),
        tuple(advice),
        tuple(RemovedBlock(removal.block.name, removal.miss) for removal in removals),
    )


def _shapes(graph: LayerGraph) -> dict[str, tuple[int, ...]]:
    return dict(graph.shapes)


def _share(whole: int, left: int) -> float:
    return round(1 - left / whole, 6) if whole else 0.0
