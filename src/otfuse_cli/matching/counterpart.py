"""What of a network of another depth stands for what of the anchor.

Inside a stage, the places of the two residual streams are matched so that every one of the anchor's
has one; layers between two of them are matched in order (docs/methods/depth.md). Of what the source
has beyond, nothing is asked; for what it lacks, it has nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor

from ..errors import IncompatibleModels
from ..graph.analysis.fit_targets import Fit, fits
from ..graph.axes import axis_units, rename_units
from ..graph.model import GraphTensor, LayerGraph, Role, Space, TensorAxis
from ..graph.trace.program import Axes, Program
from ..running.execute import Walk
from .activations import SeenPlace, made_for_one
from .depth import covering, ordered_pairs
from .stages import Inner, Stage, Staged, StagePlace, StreamTap, unlike

# How alike two seen values are, the anchor's first.
Similar = Callable[[str, str], float]
# Own values, each times a factor.
Terms = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class PlacePair:
    """A place of the anchor, the one of the source that stands for it, and how alike they are."""

    anchor: StagePlace
    source: StagePlace
    cka: float


@dataclass(frozen=True)
class Counterpart:
    """A network of another depth, in the anchor's terms.

    Attributes:
        pairs: Places that stand for one another, in the anchor's order.
        values: What stands for a value that layers of the anchor are fitted to.
        axes: Of that.
        released: By such a value, own values that nobody asks for after it.
        tensors: By tensor of the anchor, the own one that makes the same units from the same.
        outputs: By own tensor of an output layer, the anchor's.
        read_as: By space of the anchor, a later one in which the source's units in it are read.
        carried: By space for which the source has none, the one whose units it lets through.
        fresh: Layers of the anchor for which there is no such tensor, by their weight.
        places: Where to look at units, in the anchor's order.
    """

    pairs: tuple[PlacePair, ...]
    values: Mapping[str, Terms] = field(default_factory=dict)
    axes: Mapping[str, Axes] = field(default_factory=dict)
    released: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    read_as: Mapping[str, str] = field(default_factory=dict)
    carried: Mapping[str, str] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    places: tuple[SeenPlace, ...] = ()

    def value(self, name: str, walk: Walk) -> Tensor | None:
        """What stands for a value of the anchor in a pass; None where nothing does."""
        terms = self.values.get(name)
        return None if terms is None else summed(terms, walk)

    def parts(self, name: str, walk: Walk) -> list[tuple[Tensor, Axes]]:
        """The same with its axes; [] where nothing does."""
        value = self.value(name, walk)
        return [] if value is None else [(value, self.axes[name])]

    def own_values(self, names: Iterable[str]) -> tuple[str, ...]:
        """Own values that stand for some of the anchor's."""
        return tuple(own for name in names for own, _ in self.values.get(name, ()))

    def own_tensors(self, name: str) -> tuple[str, ...]:
        """The own tensor that does what one of the anchor does, if there is one."""
        own = self.tensors.get(name)
        return () if own is None else (own,)


def summed(terms: Terms, walk: Walk) -> Tensor:
    """The sum of own values, each times its factor, in a pass."""
    total: Tensor | None = None
    for own, factor in terms:
        term: Tensor = walk[own] if factor == 1 else factor * walk[own]
        total = term if total is None else total + term
    assert total is not None
    return total


@dataclass
class _Drawn:
    """What stands for what, as it is drawn up."""

    anchor: Staged
    source: Staged
    similar: Similar
    pairs: list[PlacePair] = field(default_factory=list)
    layers: list[tuple[Fit, Fit]] = field(default_factory=list)
    values: dict[str, Terms] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    carried: dict[str, Inner] = field(default_factory=dict)
    read_as: dict[str, str] = field(default_factory=dict)

    def pair(self, one: StagePlace, other: StagePlace) -> None:
        """Two places that stand for one another."""
        self.pairs.append(PlacePair(one, other, self.similar(one.seen, other.seen)))

    def layer(self, one: Fit, other: Fit | None) -> None:
        """Two layers that make the same units, from the same, if it turns out so."""
        if other is None:
            self.fresh.add(one.layer.weight)
        else:
            self.layers.append((one, other))

    def inner(self, ours: Sequence[Inner], theirs: Sequence[Inner]) -> None:
        """Layers one after another."""
        partners = dict(ordered_pairs(self._similarity(ours, theirs)))
        before: tuple[Inner, Inner] | None = None
        for a, one in enumerate(ours):
            if a in partners:
                other = theirs[partners[a]]
                self.pair(one, other)
                self.values[one.made] = ((other.made, 1.0),)
                self.layer(one.fit, other.fit)
                before = one, other
            elif before is not None and one.keeps and before[1].keeps:
                self.carry(one, *before)

    def carry(self, one: Inner, first: Inner, other: Inner) -> None:
        """A layer of the anchor behind the pair of others, for which the source has none.

        What the source's units did there they still do: it lets them through.
        """
        self.carried[one.space] = other
        for space, last in [(first.space, first.space), *self.read_as.items()]:
            if last in (first.space, self.read_as.get(first.space)):
                self.read_as[space] = one.space
        self.read_as[first.space] = one.space
        self.values[one.made] = ((other.seen, 1.0),)
        self.layer(one.fit, None)

    def stage(self, ours: Stage, theirs: Stage) -> None:
        """A stage: blocks between places of the stream, and what comes behind the last."""
        taps, their_taps = ours.taps, theirs.taps
        if taps:
            begins = taps[0].side is None
            chosen = covering(self._similarity(taps, their_taps), begin=begins)
            before = -1
            for at, (segment, last) in enumerate(zip(ours.segments, chosen, strict=False)):
                group = theirs.segments[before + 1 : last + 1]
                inner = [place for part in group for place in part.inner]
                self.inner(segment.inner, inner)
                self.block(taps[at], [t for part in group if (t := part.end)], their_taps[last])
                before = last
        self.inner(ours.rest, theirs.rest)

    def block(self, tap: StreamTap, group: Sequence[StreamTap], last: StreamTap) -> None:
        """The end of a block, where the source has the blocks of a group; the last may be before.

        Behind no block of its own, a stream is what it was: nothing is added to it.
        """
        self.pair(tap, last)
        if tap.side is None:
            self.values[tap.made] = ((last.made, 1.0),)
            self.layer(tap.branch, last.branch)
            return
        if not group:
            self.values[tap.made] = ((last.seen, 1.0),)
            self.values[tap.added] = ((last.seen, 0.0),)
            if tap.shortcut is not None:
                self.values[tap.side] = ((last.seen, 1.0),)
                self.layer(tap.shortcut, None)
            return
        first = group[0]
        assert first.side is not None
        self.values[tap.made] = ((last.made, 1.0),)
        alone = len(group) == 1
        self.values[tap.added] = (
            ((last.added, 1.0),) if alone else ((last.made, 1.0), (first.side, -1.0))
        )
        self.layer(tap.branch, last.branch if alone else None)
        if tap.shortcut is not None:
            self.values[tap.side] = ((first.side, 1.0),)
            self.layer(tap.shortcut, first.shortcut)

    def outputs(self) -> dict[str, str]:
        """Output layers, in order; the source's weight to the anchor's."""
        named = {}
        for one, other in zip(self.anchor.outputs, self.source.outputs, strict=True):
            self.values[one.target] = ((other.target, 1.0),)
            self.layer(one, other)
            named[other.layer.weight] = one.layer.weight
        return named

    def _similarity(self, ours: Sequence[StagePlace], theirs: Sequence[StagePlace]) -> Tensor:
        rows = [[self.similar(a.seen, s.seen) for s in theirs] for a in ours]
        return torch.tensor(rows, dtype=torch.float64).view(len(ours), len(theirs))


def counterpart(
    anchor: Staged, source: Staged, similar: Similar, *, labels: tuple[str, str]
) -> tuple[Counterpart, Program, LayerGraph]:
    """What of a source stands for what of the anchor; its program and graph in the anchor's names.

    Spaces that stand for one another get the anchor's name. Those that the source has beyond keep
    names that the anchor does not have; those that it lacks are there, without units.

    Args:
        anchor: Its stages.
        source: Those of the other network.
        similar: How alike two seen values are.
        labels: What messages call the source, and the anchor.

    Raises:
        IncompatibleModels: They have other stages, or outputs; names the first difference.
    """
    _require_same_stages(anchor, source, labels)
    drawn = _Drawn(anchor, source, similar)
    for ours, theirs in zip(anchor.stages, source.stages, strict=True):
        drawn.stage(ours, theirs)
    outputs = drawn.outputs()
    names = _names(drawn, labels)
    graph, program = _renamed(drawn, names)
    tensors: dict[str, str] = {}
    for one, other in drawn.layers:
        same = _same_layer(one, other, anchor.graph, graph)
        if same is None:
            drawn.fresh.add(one.layer.weight)
        else:
            tensors |= same
    found = Counterpart(
        tuple(drawn.pairs),
        drawn.values,
        _axes(drawn, program),
        released_with(fits(anchor.program)[0], drawn.values),
        tensors,
        outputs,
        drawn.read_as,
        {space: names[place.space] for space, place in drawn.carried.items()},
        frozenset(drawn.fresh),
        tuple(_seen_places(drawn)),
    )
    return found, program, graph


def _require_same_stages(anchor: Staged, source: Staged, labels: tuple[str, str]) -> None:
    label, anchor_label = labels
    difference = None
    for theirs, ours in zip_longest(source.stages, anchor.stages):
        if theirs is None or ours is None:
            only, holder = (ours, anchor_label) if theirs is None else (theirs, label)
            difference = f"{only.name} in {holder} only"
        elif theirs.name != ours.name:
            difference = f"{theirs.name} in {label}, {ours.name} in {anchor_label}"
        elif len({t.space for t in theirs.taps}) > 1 or len({t.space for t in ours.taps}) > 1:
            difference = f"two residual streams at one size: {ours.name}"
        elif ours.taps and (theirs.taps[0].side is None) is not (ours.taps[0].side is None):
            difference = f"{ours.name} begins with a block in one of them only"
        if difference is not None:
            break
    shapes = [[_shape(n, fit.target) for fit in n.outputs] for n in (source, anchor)]
    if difference is None and shapes[0] != shapes[1]:
        difference = f"outputs {shapes[0]} in {label}, {shapes[1]} in {anchor_label}"
    if difference is not None:
        raise unlike(labels, difference, same="with the same inputs, stages and outputs")


def _shape(network: Staged, value: str) -> list[int]:
    return list(network.program.node(value).meta["val"].shape[1:])


def _names(drawn: _Drawn, labels: tuple[str, str]) -> dict[str, str]:
    """The source's spaces to the anchor's; those that it has beyond to names of their own."""
    names: dict[str, str] = {}
    for pair in drawn.pairs:
        if names.setdefault(pair.source.space, pair.anchor.space) != pair.anchor.space:
            raise IncompatibleModels(
                "one residual stream in one network, two in the other",
                where=f"{labels[0]} and {labels[1]}",
                why=f"space {pair.source.space} stands for {names[pair.source.space]} and for "
                f"{pair.anchor.space}",
                fix="fuse networks with the same stages",
            )
    taken = drawn.anchor.graph.spaces
    for id, space in drawn.source.graph.spaces.items():
        if id not in names and id in taken and None in (space.pinned, taken[id].pinned):
            names[id] = f"{id} of the source"
    return names


def _renamed(drawn: _Drawn, names: Mapping[str, str]) -> tuple[LayerGraph, Program]:
    graph, program = drawn.source.graph, drawn.source.program
    read = {id: drawn.read_as.get(name, name) for id, name in names.items()}
    tensors = {}
    for name, tensor in graph.tensors.items():
        axes = list[TensorAxis]()
        for axis in tensor.axes:
            table = read if axis.roles == {Role.CONSUME} else names
            axes.append(TensorAxis(rename_units(axis.expr, table), axis.roles))
        tensors[name] = replace(tensor, axes=tuple(axes))
    spaces = {names.get(id, id): replace(s, id=names.get(id, id)) for id, s in graph.spaces.items()}
    for space, place in drawn.carried.items():
        spaces[space] = Space(space, graph.spaces[place.space].size)
    for free in drawn.anchor.graph.free():
        spaces.setdefault(free.id, Space(free.id, 0))
    labels: dict[str, Axes] = {}
    for node, of_value in program.axes.items():
        labels[node] = tuple(None if a is None else rename_units(a, names) for a in of_value)
    return replace(graph, tensors=tensors, spaces=spaces), replace(program, axes=labels)


def _axes(drawn: _Drawn, program: Program) -> dict[str, Axes]:
    """Axes of what stands for values of the anchor, in the anchor's names."""
    axes = {name: program.axes[terms[0][0]] for name, terms in drawn.values.items()}
    for place in drawn.anchor.places:
        if place.space in drawn.carried:
            axes[place.made] = drawn.anchor.program.axes[place.made]
    return axes


def _same_layer(
    one: Fit, other: Fit, anchor: LayerGraph, source: LayerGraph
) -> dict[str, str] | None:
    """The other layer's tensors by those of one that make the same units from the same.

    None where they read other units, or in another way.
    """
    ours, theirs = anchor.tensors[one.layer.weight], source.tensors[other.layer.weight]
    alike = (
        len(ours.axes) == len(theirs.axes)
        and all(_same_units(d, ours, theirs, anchor, source) for d in range(len(ours.axes)))
        and ours.shape[2:] == theirs.shape[2:]
        and one.layer.window == other.layer.window
        and one.layer.turned == other.layer.turned
        and (one.norm is None) is (other.norm is None)
    )
    if not alike:
        return None
    tensors = {one.layer.weight: other.layer.weight}
    if one.layer.bias is not None and other.layer.bias is not None:
        tensors[one.layer.bias] = other.layer.bias
    if one.norm is not None and other.norm is not None:
        tensors |= {name: other.norm.tensors[part] for part, name in one.norm.tensors.items()}
    return tensors


def _same_units(
    dim: int, ours: GraphTensor, theirs: GraphTensor, anchor: LayerGraph, source: LayerGraph
) -> bool:
    """Whether an axis carries the same units: equal names, or as many that stay in place."""
    one, other = ours.exprs[dim], theirs.exprs[dim]
    if one == other:
        return True
    in_place = all(anchor.spaces[u].pinned is not None for u in axis_units(one)) and all(
        source.spaces[u].pinned is not None for u in axis_units(other)
    )
    return in_place and ours.shape[dim] == theirs.shape[dim]


def released_with(layers: Iterable[Fit], values: Mapping[str, Terms]) -> dict[str, tuple[str, ...]]:
    """Own values by the last of the anchor's that they stand for, in the order of its layers."""
    last: dict[str, str] = {}
    for fit in layers:
        for own, _ in values.get(fit.target, ()):
            last[own] = fit.target
    released: dict[str, tuple[str, ...]] = {}
    for own, name in last.items():
        released[name] = (*released.get(name, ()), own)
    return released


def _seen_places(drawn: _Drawn) -> Iterator[SeenPlace]:
    """Where the source is looked at: everywhere but at the beginning of its streams."""
    for pair in drawn.pairs:
        if isinstance(pair.anchor, StreamTap) and pair.anchor.side is None:
            continue
        fit = pair.source.branch if isinstance(pair.source, StreamTap) else None
        if isinstance(pair.source, Inner):
            fit = pair.source.fit
        assert fit is not None
        weight, made = fit.layer.weight, pair.source.made
        node = drawn.source.program.node(made)
        before = made_for_one(node, pair.source.seen) if isinstance(pair.source, Inner) else None
        layer = weight.removesuffix(".weight")
        yield SeenPlace(pair.source.seen, pair.anchor.space, layer, weight, before)
