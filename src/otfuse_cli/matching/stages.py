"""A network as stages: where its spaces are seen and made, in the order of execution.

A stage is what lies at one size of the positions (images of 16 x 16, vectors). Inside it every
layer makes units of its own, or writes to a residual stream in blocks, each of which ends with an
addition. What is built otherwise is refused: which of its places could stand for those of a network
of another depth is not known (docs/methods/depth.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from torch.fx import Node

from ..errors import IncompatibleModels
from ..graph.analysis.fit_targets import Fit, fits
from ..graph.analysis.streams import has_heads
from ..graph.axes import Unit, axis_units
from ..graph.model import LayerGraph
from ..graph.trace.nodes import operator_name
from ..graph.trace.program import Program
from .activations import after_activation, seen_from

Positions = tuple[int, ...]

# Activations that change nothing the second time.
_KEEPING = frozenset({"relu", "relu_", "relu6"})
# Operations between a layer and the addition that it feeds which change nothing.
SAME = frozenset({"dropout", "alias", "clone", "contiguous", "detach"})


@dataclass(frozen=True)
class StagePlace:
    """Where the units of a space are.

    Attributes:
        space: Their space.
        made: The value that layers are fitted to: before the activation.
        seen: The value that is read: after it.
        positions: Sizes of its axes of positions.
        layer: What messages call it: the last layer before it.
    """

    space: str
    made: str
    seen: str
    positions: Positions
    layer: str


@dataclass(frozen=True)
class Inner(StagePlace):
    """A layer with units of its own.

    Attributes:
        fit: The layer.
        keeps: Its activation leaves alone what it has given: none, ReLU.
    """

    fit: Fit
    keeps: bool


@dataclass(frozen=True)
class StreamTap(StagePlace):
    """A residual stream where a block ends, or where the stream begins.

    Attributes:
        branch: The last layer of its block; at the beginning, the one that makes it.
        added: What that gives.
        side: What it is added to: the stream before, or what a layer makes of it; None at the
            beginning.
        shortcut: That layer.
    """

    branch: Fit
    added: str
    side: str | None
    shortcut: Fit | None


@dataclass(frozen=True)
class Segment:
    """Layers between two places of a stream, and the place behind them; None at the end."""

    inner: tuple[Inner, ...]
    end: StreamTap | None


@dataclass(frozen=True)
class Stage:
    """What lies at one size of the positions.

    Attributes:
        positions: That size.
        segments: In order; the stream's beginning is one with nothing in it.
    """

    positions: Positions
    segments: tuple[Segment, ...]

    @property
    def taps(self) -> tuple[StreamTap, ...]:
        """Places of the stream."""
        return tuple(s.end for s in self.segments if s.end is not None)

    @property
    def rest(self) -> tuple[Inner, ...]:
        """Layers behind the last of them."""
        last = self.segments[-1]
        return last.inner if last.end is None else ()

    @property
    def name(self) -> str:
        """What messages call it."""
        size = " x ".join(map(str, self.positions))
        kind = "a residual stream" if self.taps else "layers one after another"
        return f"{kind} at {size} positions" if size else f"{kind} without positions"


@dataclass(frozen=True)
class Staged:
    """A network and its stages.

    Attributes:
        program: To run it.
        graph: Its layer graph.
        stages: In order.
        outputs: Layers whose units are the network's outputs.
    """

    program: Program
    graph: LayerGraph
    stages: tuple[Stage, ...]
    outputs: tuple[Fit, ...]

    @property
    def places(self) -> tuple[StagePlace, ...]:
        """All places, in order."""
        places = list[StagePlace]()
        for stage in self.stages:
            for segment in stage.segments:
                places += (*segment.inner, *((segment.end,) if segment.end else ()))
        return tuple(places)


def staged(program: Program, graph: LayerGraph, label: str) -> Staged:
    """The stages of a network of convolutions and linear layers, residual or not.

    Raises:
        IncompatibleModels: It is built otherwise; names the first thing that is.
    """
    if has_heads(graph):
        raise refused("its units move as heads or groups", label)
    layers, shared = fits(program)
    if shared:
        raise refused(f"{shared[0]} is used twice or tied", label)
    reader = _Reader(program, graph, label, layers)
    reader.require_plain_tensors()
    places = list(reader.places())
    stages = list[Stage]()
    for positions, at in groupby(places, key=lambda place: place.positions):
        stages.append(Stage(positions, tuple(_segments(at))))
    sizes = [stage.positions for stage in stages]
    if len(set(sizes)) < len(sizes):
        raise refused("its positions become fewer and then more again", label)
    outputs = tuple(fit for fit in layers if reader.space(fit) is None)
    return Staged(program, graph, tuple(stages), outputs)


def _segments(places: Iterator[StagePlace]) -> Iterator[Segment]:
    inner = list[Inner]()
    for place in places:
        if isinstance(place, Inner):
            inner.append(place)
        else:
            assert isinstance(place, StreamTap)
            yield Segment(tuple(inner), place)
            inner = []
    if inner:
        yield Segment(tuple(inner), None)


def refused(why: str, label: str) -> IncompatibleModels:
    """Why the depth of a network can't be compared."""
    return IncompatibleModels(
        "networks of different depth that can't be fused",
        where=label,
        why=f"{why}; joint fusion over depth takes chains of convolutions and linear layers, "
        "residual blocks of them, and pre-norm transformers",
        fix="fuse networks of one depth",
    )


def unlike(labels: tuple[str, str], why: str, *, same: str) -> IncompatibleModels:
    """Two networks that can't stand for one another; `labels` of the source, and of the anchor."""
    return IncompatibleModels(
        "networks that differ in more than depth and widths",
        where=f"{labels[0]} and {labels[1]}",
        why=why,
        fix=f"fuse networks {same}",
    )


class _Reader:
    """Reads the places of a program off its values."""

    def __init__(
        self, program: Program, graph: LayerGraph, label: str, layers: tuple[Fit, ...]
    ) -> None:
        self.program, self.graph, self.label, self.layers = program, graph, label, layers
        self.own = {_output(fit): fit for fit in layers}
        self.sums = [node for node in program.nodes if self._adds(node)]
        self.streams = {space for node in self.sums if (space := self._space(node)) is not None}

    def space(self, fit: Fit) -> str | None:
        """The space of the units that a layer makes; None for outputs."""
        return self._space(self.program.node(fit.layer.node))

    def require_plain_tensors(self) -> None:
        """Refuse tensors that belong to no layer, and spaces that are made in several places."""
        covered = {name for fit in self.layers for name in fit.tensors}
        for name, tensor in self.graph.tensors.items():
            if name not in covered and tensor.axes:
                raise refused(f"{name} belongs to no layer that is fitted", self.label)
        makers: dict[str, int] = {}
        for fit in self.layers:
            made = self.space(fit)
            if made is not None and made not in self.streams:
                makers[made] = makers.get(made, 0) + 1
        for space in self.graph.free():
            if space.id not in self.streams and makers.get(space.id) != 1:
                raise refused(
                    f"the units of space {space.id} are not made by one layer", self.label
                )

    def places(self) -> Iterator[StagePlace]:
        """Every place, in the order of execution."""
        sums = {node.name: node for node in self.sums}
        operands = {n.name for node in self.sums for n in map(_behind, node.all_input_nodes)}
        for node in self.program.nodes:
            fit = self.own.get(node.name)
            space = None if fit is None else self.space(fit)
            if fit is not None and space is not None and node.name not in operands:
                yield self._made_by(fit, space, node)
            elif node.name in sums and self._space(node) is not None:
                yield self._tap(node)

    def _made_by(self, fit: Fit, space: str, node: Node) -> StagePlace:
        seen = seen_from(self.program, self.program.node(fit.layer.node), post=True)
        where = (space, node.name, seen, self._positions(seen), fit.name)
        if space not in self.streams:
            activation = operator_name(self.program.node(seen))
            return Inner(*where, fit, seen == node.name or activation in _KEEPING)
        return StreamTap(*where, branch=fit, added=node.name, side=None, shortcut=None)

    def _tap(self, node: Node) -> StreamTap:
        space = self._space(node)
        assert space is not None
        seen = after_activation(node).name
        operands = [_behind(operand) for operand in node.all_input_nodes]
        # What is added to a block is read before the block's own last layer is.
        operands.sort(key=self._read_at)
        side, added = operands
        branch, shortcut = self.own.get(added.name), self.own.get(side.name)
        if branch is None or self._read_at(side) == self._read_at(added):
            raise refused(f"{node.name} adds something else than a block to its stream", self.label)
        if shortcut is None and self._space(side) != space:
            raise refused(f"what {node.name} adds to is no stream", self.label)
        return StreamTap(
            space,
            node.name,
            seen,
            self._positions(seen),
            branch.name,
            branch,
            added.name,
            side.name,
            shortcut,
        )

    def _read_at(self, operand: Node) -> int:
        """When the layer that gives an operand of a sum reads; -1 where no layer does."""
        fit = self.own.get(operand.name)
        return -1 if fit is None else self.program.position[fit.layer.input]

    def _adds(self, node: Node) -> bool:
        if node.op != "call_function" or operator_name(node) != "add":
            return False
        return sum(n.name in self.program.data for n in node.all_input_nodes) == 2

    def _space(self, node: Node) -> str | None:
        """The one free space that a value has an axis of; None where it has none.

        Raises:
            IncompatibleModels: It has several, or some positions of an axis are others'.
        """
        axes = self.program.axes.get(node.name, ())
        free = [a for a in axes if a is not None and any(map(self._free, axis_units(a)))]
        if not free:
            return None
        if len(free) > 1 or not isinstance(free[0], Unit):
            raise refused(f"the units of {node.name} share an axis with others", self.label)
        return free[0].space

    def _free(self, space: str) -> bool:
        return space in self.graph.spaces and self.graph.spaces[space].pinned is None

    def _positions(self, name: str) -> Positions:
        """Sizes of the axes of a value but for those of samples and of units."""
        node = self.program.node(name)
        units = {d for d, axis in enumerate(self.program.axes[name]) if isinstance(axis, Unit)}
        shape = node.meta["val"].shape
        return tuple(int(n) for d, n in enumerate(shape) if d and d not in units)


def _output(fit: Fit) -> str:
    """What a layer itself gives, its BatchNorm included."""
    return fit.layer.node if fit.norm is None else fit.norm.node


def _behind(node: Node) -> Node:
    """The value that an operand is, through operations that change nothing."""
    while node.op == "call_function" and operator_name(node) in SAME:
        node = node.all_input_nodes[0]
    return node
