"""Masked networks: pruned in place, with the shapes of the dense one.

`torch.nn.utils.prune` stores `weight_orig` and `weight_mask`; other tools leave rows of zeros.
Both are compacted: units whose incoming weights are all zero go, with everything that carries
them. Masked networks are held in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from ..checkpoint.finite import require_finite
from ..checkpoint.open import Checkpoint
from ..errors import IncompatibleModels, UnreadableInput
from ..graph.model import LayerGraph
from ..matching.features import producers
from ..matching.models import Model
from ..matching.unfold import unfold
from .compact import compact, expand, smaller

_ORIG, _MASK = "_orig", "_mask"


@dataclass(frozen=True)
class Masked:
    """A masked checkpoint, its masks multiplied into its weights.

    Attributes:
        checkpoint: Weights under their plain names, in the masked shapes.
        masks: Plain name to mask; empty where the zeros are in the weights themselves.
        stored: The checkpoint as it was opened.
    """

    checkpoint: Checkpoint
    masks: Mapping[str, torch.Tensor]
    stored: Checkpoint


@dataclass(frozen=True)
class Compacted:
    """A masked network without its pruned units.

    Attributes:
        checkpoint: In memory, compact.
        graph: Of the compact network.
        kept: By space, the units that stayed.
        masked: What it was made from.
        whole: The graph in the masked shapes.
        warnings: What was lost.
    """

    checkpoint: Checkpoint
    graph: LayerGraph
    kept: Mapping[str, torch.Tensor]
    masked: Masked
    whole: LayerGraph
    warnings: tuple[str, ...] = field(default=())

    def restored(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """A fused tensor as the masked file stores it: full shape, pruned units zero, with mask."""
        node = self.whole.tensors[name]
        full = expand(tensor, node, self.whole, self.kept)
        mask = self.masked.masks.get(name)
        if mask is None:
            return {name: full}
        return {name + _ORIG: full * mask.to(full.dtype), name + _MASK: mask}


def unmask(checkpoint: Checkpoint) -> Masked:
    """Multiply the masks of `torch.nn.utils.prune` into the weights that they belong to.

    Raises:
        UnreadableInput: A `_orig` without its mask, or of another shape, or not finite.
    """
    masked = [n.removesuffix(_ORIG) for n in checkpoint.infos if n.endswith(_ORIG)]
    masked = [n for n in masked if n + _MASK in checkpoint.infos]
    if not masked:
        return Masked(checkpoint, {}, checkpoint)
    masks: dict[str, torch.Tensor] = {}
    entries: dict[str, torch.Tensor] = {}
    for name, info in checkpoint.infos.items():
        plain = name.removesuffix(_ORIG).removesuffix(_MASK)
        if plain not in masked:
            entries[name] = checkpoint.read(name)
        elif name.endswith(_ORIG):
            mask = checkpoint.read(plain + _MASK)
            if tuple(mask.shape) != info.shape:
                raise UnreadableInput(
                    "a mask does not fit its tensor",
                    where=f"{checkpoint.label}, {name} {list(info.shape)} and {plain}{_MASK} "
                    f"{list(mask.shape)}",
                    fix="save the pruned model again",
                )
            weight = checkpoint.read(name)
            require_finite(checkpoint, name, weight)
            masks[plain] = mask
            entries[plain] = weight * mask.to(weight.dtype)
    return Masked(_in_memory(checkpoint, entries), masks, checkpoint)


def zero_units(model: Model) -> dict[str, torch.Tensor]:
    """By space, the units that stay, where some have nothing but zeros among incoming weights.

    Raises:
        IncompatibleModels: A space without a unit that is left.
    """
    graph = model.graph
    kept: dict[str, torch.Tensor] = {}
    for space in graph.free():
        if space.per is not None or not graph.producers(space.id):
            continue
        # A unit lives as long as one tensor that makes it has anything but zeros in its row.
        alive_N = torch.zeros(space.size, dtype=torch.bool)
        for name in graph.producers(space.id):
            node = graph.tensors[name]
            exprs = node.exprs
            tensor = model.stored(name)
            for dim in node.dims(space.id):
                if "produce" in node.axes[dim].roles:
                    for rows in unfold(tensor, exprs, dim, space.id, graph.sizes):
                        alive_N |= (rows != 0).any(-1)
        if not bool(alive_N.any()):
            raise IncompatibleModels(
                "a layer has no unit left",
                where=f"{model.checkpoint.label}: space {space.id}",
                why="all its incoming weights are zero",
                fix="prune less of it",
            )
        if not bool(alive_N.all()):
            kept[space.id] = alive_N.nonzero().flatten()
    return kept


def compacted(masked: Masked, model: Model, kept: Mapping[str, torch.Tensor]) -> Compacted:
    """Take the zero units out of a masked network, everywhere at once."""
    graph = model.graph
    entries: dict[str, torch.Tensor] = {}
    for name, node in graph.tensors.items():
        entries[name] = compact(model.stored(name), node, graph, kept)
    return Compacted(
        _in_memory(masked.checkpoint, entries),
        smaller(graph, kept),
        kept,
        masked,
        graph,
        _constants(model, kept),
    )


def _constants(model: Model, kept: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Units with a bias but no weights are constants, which go too: say so."""
    lost: list[str] = []
    for space, index in kept.items():
        gone = torch.ones(model.graph.spaces[space].size, dtype=torch.bool)
        gone[index] = False
        for producer in producers(model.graph, space):
            bias = producer.norm.get("bias") if producer.norm else producer.bias
            if bias is None:
                continue
            exprs = model.graph.tensors[bias].exprs
            values = unfold(model.stored(bias), exprs, 0, space, model.graph.sizes)
            if any(bool((rows[gone] != 0).any()) for rows in values):
                lost.append(bias)
    if not lost:
        return ()
    names = ", ".join(lost[:3]) + ", ..." * (len(lost) > 3)
    return (f"pruned units had a bias ({names}): what they added as constants is lost with them",)


def _in_memory(like: Checkpoint, entries: Mapping[str, torch.Tensor]) -> Checkpoint:
    """A checkpoint that is written where `like` would be."""
    keys: list[str] = []
    aliases = set(chain.from_iterable(like.aliases.values()))
    for key in like.container.keys:
        plain = key.removesuffix(_ORIG)
        name = key if key in entries or plain not in entries else plain
        if name in entries or key in aliases:
            keys.append(name)
    return Checkpoint(
        contents=like.contents,
        label=like.label,
        container=replace(like.container, keys=tuple(keys)),
        entries=entries,
        aliases={n: a for n, a in like.aliases.items() if n in entries},
    )
