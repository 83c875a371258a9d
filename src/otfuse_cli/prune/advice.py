"""What has to change where the network is built, so that it takes the pruned weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..graph.axes import Prod, axis_units
from ..graph.model import LayerGraph

# Config keys of Hugging Face models by what they count: plain units, or heads and groups.
_WIDTHS = (
    *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"),
    *("ffn_hidden_size", "hidden_size", "d_model", "n_embd", "embedding_size", "dim"),
)
_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads", "n_heads")


def advice(
    before: LayerGraph,
    after: LayerGraph,
    *,
    config: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """What to change, in sentences.

    Args:
        before: Graph of the whole network.
        after: Of the pruned one.
        config: The config.json that the network is built from, if any.
        arguments: Arguments of the factory with their defaults, if there is one.
    """
    changed = {
        id: (space.size, after.spaces[id].size)
        for id, space in before.spaces.items()
        if space.size != after.spaces[id].size
    }
    if not changed:
        return ()
    found = [*_config(before, after, changed, config or {}), *_factory(changed, arguments or {})]
    widths = ", ".join(f"{id} {old} -> {new}" for id, (old, new) in changed.items())
    return (*found, f"build the network with its new widths: {widths}")


def _config(
    before: LayerGraph,
    after: LayerGraph,
    changed: Mapping[str, tuple[int, int]],
    config: Mapping[str, Any],
) -> Iterator[str]:
    heads = {s.per for s in before.spaces.values() if s.per is not None}
    plain = {id: sizes for id, sizes in changed.items() if id not in heads}
    groups = {id: sizes for id, sizes in changed.items() if id in heads}
    for key in _WIDTHS:
        own = {id: new for id, (old, new) in plain.items() if old == config.get(key)}
        if own:
            alike = [
                id for id, s in before.spaces.items() if s.size == config[key] and s.pinned is None
            ]
            yield _set(key, config[key], own, {id: after.spaces[id].size for id in alike})
    for key in _HEADS:
        sizes = {id: after.spaces[id].size * _inside(before, id, key) for id in heads}
        own = {id: sizes[id] for id in groups}
        if own and isinstance(config.get(key), int):
            yield _set(key, config[key], own, sizes)
    if groups and "head_dim" not in config and "num_attention_heads" in config:
        size, count = config.get("hidden_size"), config["num_attention_heads"]
        if isinstance(size, int) and isinstance(count, int) and count:
            yield f"config.json: set head_dim to {size // count}, which the heads keep"


def _inside(graph: LayerGraph, index: str, key: str) -> int:
    """Heads in each group, where `key` counts heads."""
    if key == "num_key_value_heads":
        return 1
    queries = [
        unit
        for node in graph.tensors.values()
        for axis in node.axes
        if "produce" in axis.roles and isinstance(axis.expr, Prod) and len(axis.expr.factors) > 2
        for unit in axis_units(axis.expr)
        if graph.spaces[unit].per == index
    ]
    return graph.spaces[queries[0]].size if queries else 1


def _set(key: str, old: Any, own: Mapping[str, int], every: Mapping[str, int]) -> str:
    sizes = set(every.values())
    if len(sizes) == 1:
        return f"config.json: set {key} from {old} to {sizes.pop()}"
    listed = ", ".join(f"{id} {size}" for id, size in own.items())
    return (
        f"config.json: {key} is {old} for all layers, which now differ ({listed}): give every "
        "layer the same amount, or build the network with a width for each"
    )


def _factory(changed: Mapping[str, tuple[int, int]], arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of a factory whose defaults are widths that changed."""
    by_size: dict[int, set[int]] = {}
    for old, new in changed.values():
        by_size.setdefault(old, set()).add(new)
    for name, default in arguments.items():
        numbers = default if isinstance(default, tuple | list) else (default,)
        hits = [n for n in numbers if type(n) is int and n in by_size]
        for old in dict.fromkeys(hits):
            sizes = " or ".join(map(str, sorted(by_size[old])))
            yield f"the factory's argument {name}: {old} -> {sizes}"
