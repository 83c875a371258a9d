"""What has to change where the network is built, so that it takes the pruned weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..graph.axes import Prod, axis_units
from ..graph.model import LayerGraph

# Config keys of Hugging Face models by what they count: plain units, or heads and groups.
_WIDTHS = (
    *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"),
    *("ffn_hidden_size", "hidden_size", "d_model", "n_embd", "embedding_size", "dim"),
)
# Groups of keys and values before heads of queries: the first that a class reads counts.
_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads", "n_heads")


@dataclass(frozen=True)
class Advice:
    """What has to change.

    Attributes:
        sentences: For people.
        config: What the config.json has to say, where that is enough: empty where layers of one
            key now differ in width.
    """

    sentences: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Key:
    """A key of config.json: what it says, what it should; None where one number can't say it."""

    name: str
    old: Any
    new: int | None
    widths: Mapping[str, int] = field(default_factory=dict)

    def sentence(self) -> str:
        if self.new is None:
            listed = ", ".join(f"{id} {size}" for id, size in self.widths.items())
            return (
                f"config.json: {self.name} is {self.old} for all layers, which now differ "
                f"({listed}): give every layer the same amount, or build the network with a width "
                "for each"
            )
        if self.name == "head_dim" and self.old is None:
            return (
                f"config.json: set head_dim to {self.new}, which the heads keep; a class that "
                "reads no head_dim can't take fewer heads"
            )
        return f"config.json: set {self.name} from {self.old} to {self.new}"


def advice(
    before: LayerGraph,
    after: LayerGraph,
    *,
    config: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Advice:
    """What to change where a network is built.

    Args:
        before: Graph of the whole network.
        after: Of the pruned one.
        config: The config.json that the network is built from, if any.
        arguments: Arguments of the factory with their defaults, if there is one.
    """
    changed: dict[str, tuple[int, int]] = {}
    for id, space in before.spaces.items():
        if space.size != after.spaces[id].size:
            changed[id] = space.size, after.spaces[id].size
    if not changed:
        return Advice()
    keys = list(_config(before, after, changed, config or {}))
    keys += _head_dim(before, changed, config or {}, {key.name: key.new for key in keys})
    sentences = [*(key.sentence() for key in keys), *_factory(changed, arguments or {})]
    widths = ", ".join(f"{id} {old} -> {new}" for id, (old, new) in changed.items())
    # A key that the file lacks is one that not every class of its kind reads.
    new_values = {k.name: k.new for k in keys if k.old is not None and k.new is not None}
    return Advice(
        (*sentences, f"build the network with its new widths: {widths}"),
        new_values if len(new_values) == len(keys) else {},
    )


def _config(
    before: LayerGraph,
    after: LayerGraph,
    changed: Mapping[str, tuple[int, int]],
    config: Mapping[str, Any],
) -> Iterator[_Key]:
    heads = {s.per for s in before.spaces.values() if s.per is not None}
    plain = {id: sizes for id, sizes in changed.items() if id not in heads}
    groups = {id: sizes for id, sizes in changed.items() if id in heads}
    if isinstance(config.get("n_embd"), int) and config.get("n_inner") is None:
        config = {**config, "n_inner": 4 * config["n_embd"]}  # what GPT-2 takes it to be
    for key in _WIDTHS:
        widths = {id: new for id, (old, new) in plain.items() if old == config.get(key)}
        if widths:
            # One number stands for all spaces of this size, those that stayed included.
            every: dict[str, int] = {}
            for id, space in before.spaces.items():
                if space.size == config[key] and space.pinned is None:
                    every[id] = after.spaces[id].size
            yield _set(key, config[key], widths, every)
    for key in _HEADS:
        sizes = {id: after.spaces[id].size * _inside(before, id, key) for id in heads}
        widths = {id: sizes[id] for id in groups}
        if widths and isinstance(config.get(key), int):
            yield _set(key, config[key], widths, sizes)


def _head_dim(
    before: LayerGraph,
    changed: Mapping[str, tuple[int, int]],
    config: Mapping[str, Any],
    new: Mapping[str, int | None],
) -> Iterator[_Key]:
    """A class without head_dim divides its width by its heads: one of the two has changed."""
    if "head_dim" in config:
        return
    groups = changed.keys() & {s.per for s in before.spaces.values() if s.per is not None}
    for width, heads in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head")):
        if not groups and config.get(width) not in {old for old, _ in changed.values()}:
            continue
        size, count = config.get(width), config.get(heads)
        if not (isinstance(size, int) and isinstance(count, int) and count):
            continue
        new_size, new_count = new.get(width, size), new.get(heads, count)
        # Where both have changed alike, the quotient is what the heads have.
        if new_count is None or new_size != new_count * (size // count):
            yield _Key("head_dim", None, size // count)


def _inside(graph: LayerGraph, index: str, key: str) -> int:
    """Heads in each group, where `key` counts heads."""
    if key == "num_key_value_heads":
        return 1
    # Rows of grouped queries are group * head in the group * inside.
    for node in graph.tensors.values():
        for axis in node.axes:
            factors = axis.expr.factors if isinstance(axis.expr, Prod) else ()
            if "produce" not in axis.roles or len(factors) <= 2:
                continue
            for unit in axis_units(axis.expr):
                if graph.spaces[unit].per == index:
                    return graph.spaces[unit].size
    return 1


def _set(key: str, old: Any, widths: Mapping[str, int], every: Mapping[str, int]) -> _Key:
    sizes = set(every.values())
    return _Key(key, old, sizes.pop() if len(sizes) == 1 else None, widths)


def _factory(changed: Mapping[str, tuple[int, int]], arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of a factory whose defaults are widths that changed."""
    by_size: dict[int, set[int]] = {}
    for old, new in changed.values():
        by_size.setdefault(old, set()).add(new)
    for name, default in arguments.items():
        numbers = default if isinstance(default, tuple | list) else (default,)
        # `type`, for a flag is an integer to Python, and 1 may be a width.
        hits = [n for n in numbers if type(n) is int and n in by_size]
        for old in dict.fromkeys(hits):
            sizes = " or ".join(map(str, sorted(by_size[old])))
            yield f"the factory's argument {name}: {old} -> {sizes}"
