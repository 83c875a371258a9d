"""What units are compared by when there are inputs: what they do on them (`--align acts`).

Pre-activations over samples in eval mode, unscaled; positions count as samples. A residual stream
is seen after each addition. Legend: N units, F samples times positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.analysis.batch_norms import norm_after
from ..graph.analysis.fit_targets import Layer, linear_layers
from ..graph.axes import Fixed, Unit, axis_units
from ..graph.model import LayerGraph
from ..graph.trace.nodes import operator_name
from ..graph.trace.program import Program
from ..running.execute import Walk, flat_inputs
from ..running.samples import Samples
from ..runtime import Here, Workers
from .unfold import unfold

# Columns of one tap's features: more positions than this say nothing new.
_MOST_COLUMNS = 10_000
ACTIVATIONS = frozenset(
    {
        *("relu", "relu_", "relu6", "prelu", "leaky_relu", "elu", "celu", "selu", "gelu"),
        *("silu", "silu_", "mish", "softplus", "tanh", "sigmoid"),
        *("hardswish", "hardtanh", "hardsigmoid"),
    }
)


@dataclass(frozen=True)
class Activations:
    """What the units of one space do, at one place: features N x F, float32.

    Attributes:
        layer: What makes the units.
        weight: Its tensor.
        features_NF: Of the units.
        before_NF: What nothing but their activation function reads, where that was asked for.
    """

    layer: str
    weight: str
    features_NF: Tensor
    before_NF: Tensor | None = None

    def without_units(self) -> Activations:
        """The same place in a network that has none there."""
        before = None if self.before_NF is None else self.before_NF[:0]
        return replace(self, features_NF=self.features_NF[:0], before_NF=before)


Observed = Mapping[str, tuple[Activations, ...]]


def observe(
    program: Program,
    tensors: Mapping[str, Tensor],
    graph: LayerGraph,
    samples: Samples,
    *,
    device: str,
    post: bool,
    seed: int,
    before: bool = False,
    places: Sequence[SeenPlace] | None = None,
) -> Observed:
    """Features of every space whose units are seen as they are, by space.

    Spaces that index heads or groups, or lie inside them, are left to the weights.

    Args:
        program: Of this model.
        tensors: Its tensors, float32.
        graph: Its layer graph.
        samples: What it is run on; the same for every model that is compared.
        device: Where.
        post: After the activation function instead of before.
        seed: Decides which positions count where there are many.
        before: Look before the activation function as well, at the same positions.
        places: Where to look; None for everywhere.
    """
    where = tuple(seen_places(program, graph, post=post) if places is None else places)
    look = Looking(program, tensors, graph, where, before, samples.count, seed, device)
    return observe_by(look, samples, Here(), hear=0)[0]


def observe_by(
    look: Looking, samples: Samples, workers: Workers, *, hear: int
) -> tuple[Observed, Tensor | None]:
    """The same by workers, and what the network returns on the first `hear` samples."""
    batches: dict[tuple[int, bool], list[Tensor]] = {}
    said: list[Tensor] = []
    items: list[tuple[Samples, int]] = []
    left = hear
    for batch in samples.batches(look.program.batch):
        items.append((batch, min(left, batch.count)))
        left -= items[-1][1]
    for seen_batch, returned in workers.each(look, items):
        for key, features in seen_batch.items():
            batches.setdefault(key, []).append(features)
        if returned is not None:
            said.append(returned)
    spaces: dict[str, list[Activations]] = {}
    for at, place in enumerate(look.places):
        whole_NF = torch.cat(batches.pop((at, False)), 1)
        given_batches = batches.pop((at, True), [])
        before_NF = torch.cat(given_batches, 1) if given_batches else None
        seen = Activations(place.layer, place.weight, whole_NF, before_NF)
        spaces.setdefault(place.space, []).append(seen)
    observed = {space: tuple(seen) for space, seen in spaces.items()}
    return observed, torch.cat(said) if said else None


@dataclass(frozen=True)
class Looking:
    """Runs a network on batches and looks at its units.

    Attributes:
        program: See `observe`.
        tensors: See `observe`.
        graph: See `observe`.
        places: Where to look.
        before: See `observe`.
        count: Samples in all batches.
        seed: See `observe`.
        device: See `observe`.
    """

    program: Program
    tensors: Mapping[str, Tensor]
    graph: LayerGraph
    places: tuple[SeenPlace, ...]
    before: bool
    count: int
    seed: int
    device: str

    def __call__(
        self, item: tuple[Samples, int]
    ) -> tuple[dict[tuple[int, bool], Tensor], Tensor | None]:
        """Features by place, and whether before the activation function; what is returned."""
        batch, hear = item
        walk = Walk(self.program, self.tensors, flat_inputs(self.program, batch, self.device))
        seen: dict[tuple[int, bool], Tensor] = {}
        for at, place in enumerate(self.places):
            if self.before and place.before is not None:
                # A copy: the activation function may work in place.
                seen[at, True] = self._look(walk, batch, place.before, place).clone()
            seen[at, False] = self._look(walk, batch, place.node, place)
        return seen, walk.said(hear) if hear else None

    def _look(self, walk: Walk, batch: Samples, node: str, place: SeenPlace) -> Tensor:
        # N, samples of the batch, *positions
        features = _features(walk.to(node), replace(place, node=node), self.program, self.graph)
        kept = features[:, : features.shape[1] * batch.count // self.program.batch]
        return _few(kept, self.count, self.seed)


@dataclass(frozen=True)
class SeenPlace:
    """A value that shows the units of a space, and the layer that made them last."""

    node: str
    space: str
    layer: str
    weight: str
    before: str | None = None


def seen_places(program: Program, graph: LayerGraph, *, post: bool) -> Iterator[SeenPlace]:
    """Where to look, in execution order: sums for streams, layers for everything else."""
    indices = {s.per for s in graph.free()}
    plain = {s.id for s in graph.free() if s.per is None and s.id not in indices}
    made_by = {layer.node: layer for layer in linear_layers(program)}
    sums = {
        node.name: [s for s in _units(program, node) if s in plain]
        for node in program.nodes
        if node.op == "call_function"
        and operator_name(node) == "add"
        and sum(n.name in program.data for n in node.all_input_nodes) == 2
    }
    streams = {space for spaces in sums.values() for space in spaces}
    last: dict[str, Layer] = {}
    for node in program.nodes:
        layer = made_by.get(node.name)
        made = [s for s in _units(program, node) if s in plain] if layer else []
        for space in made:
            assert layer is not None
            last[space] = layer
            if space not in streams:
                seen = seen_from(program, node, post=post)
                before = made_for_one(_normed(program, node), seen)
                name = layer.weight.removesuffix(".weight")
                yield SeenPlace(seen, space, name, layer.weight, before)
        for space in sums.get(node.name, ()):
            if space in last:
                weight = last[space].weight
                seen = after_activation(node).name if post else node.name
                yield SeenPlace(seen, space, weight.removesuffix(".weight"), weight)


def _units(program: Program, node: Node) -> Sequence[str]:
    if node.name not in program.data:
        return ()
    axes = program.axes.get(node.name, ())
    return tuple(dict.fromkeys(u for axis in axes if axis is not None for u in axis_units(axis)))


def seen_from(program: Program, node: Node, *, post: bool) -> str:
    """The value before the activation, after a BatchNorm; with `post` after the activation.

    Behind an activation, too, a BatchNorm belongs to it: what is read is what the norm makes.
    """
    node = _normed(program, node)
    if not post:
        return node.name
    after = after_activation(node)
    return (after if after is node else _normed(program, after)).name


def made_for_one(node: Node, seen: str) -> str | None:
    """A value before the activation function behind which it is seen, where only that reads it."""
    return node.name if len(node.users) == 1 and node.name != seen else None


def _normed(program: Program, node: Node) -> Node:
    norm = norm_after(program, node)
    return node if norm is None else next(n for n in node.users if n.name == norm.node)


def after_activation(node: Node) -> Node:
    """The activation function of a value, or the value itself where there is none."""
    readers = [n for n in node.users if operator_name(n) in ACTIVATIONS]
    return readers[0] if readers else node


def _features(value: Tensor, place: SeenPlace, program: Program, graph: LayerGraph) -> Tensor:
    axes = [Fixed(1) if a is None else a for a in program.axes[place.node]]
    dim = next(d for d, axis in enumerate(axes) if place.space in axis_units(axis))
    if dim and isinstance(axes[dim], Unit):
        return value.movedim(dim, 0)  # as it lies: most of its positions are not taken
    rows = unfold(value, axes, dim, place.space, graph.sizes)
    whole = torch.cat(rows, -1) if len(rows) > 1 else rows[0]
    return whole.reshape(len(whole), value.shape[0] if dim else 1, -1)


def _few(features: Tensor, count: int, seed: int) -> Tensor:
    """Some positions of every sample, the same for all samples and models: N x F."""
    shape, most = features.shape[2:], max(1, _MOST_COLUMNS // count)
    if shape.numel() <= most:
        return features.flatten(1)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(shape.numel(), generator=generator)[:most].sort().values
    index = torch.unravel_index(places.to(features.device), list(shape))
    picked = features[(slice(None), slice(None), *index)]  # type: ignore[index]
    return picked.flatten(1)
