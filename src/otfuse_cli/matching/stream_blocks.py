"""A pre-norm transformer as blocks: what is added to its residual stream, one after another.

Between two places of the stream a norm reads it, and a layer writes to it once: an attention layer,
or an MLP. What comes again and again is a block. A network that isn't built so is refused: which of
its parts could stand for those of a network of another depth is not known (docs/methods/depth.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..graph.analysis.fit_targets import Fit, KernelWindow, fits
from ..graph.analysis.streams import Stream
from ..graph.axes import Unit, axis_units, rename_units
from ..graph.model import LayerGraph
from ..graph.trace.nodes import operator_name
from ..graph.trace.program import Program
from .activations import ACTIVATIONS
from .stages import SAME, StagePlace, refused

# Operations between a place of the stream and the addition that reads it which change no number.
_HANDED_ON = SAME | {"to", "_to_copy", "type_as"}


@dataclass(frozen=True)
class Section:
    """Part of a network: what its layers and tensors are, in the order of execution.

    Attributes:
        tensors: Names.
        fits: Its layers.
        spaces: Free spaces other than the stream, in the order in which its tensors name them.
        signature: What two sections have in common that differ in widths only.
    """

    tensors: tuple[str, ...]
    fits: tuple[Fit, ...]
    spaces: tuple[str, ...]
    signature: tuple[object, ...]


@dataclass(frozen=True)
class SubBlock(Section):
    """What is added to the stream once.

    Attributes:
        before: The stream that its norm reads.
        after: The sum.
    """

    before: str
    after: str


@dataclass(frozen=True)
class Streamed:
    """A pre-norm transformer and its blocks.

    Attributes:
        program: To run it.
        graph: Its layer graph.
        stream: Its stream.
        prelude: What makes the stream.
        blocks: In order; each has the same kinds of sub-blocks.
        coda: What reads the stream behind the last.
        places: The stream where it begins, and behind every block.
    """

    program: Program
    graph: LayerGraph
    stream: Stream
    prelude: Section
    blocks: tuple[tuple[SubBlock, ...], ...]
    coda: Section
    places: tuple[StagePlace, ...]

    def normed_before(self, section: Section) -> str:
        """What the layers of a section read of the stream, behind its norm."""
        readers = {face.weight for face in self.stream.readers}
        return next(f.layer.input for f in section.fits if f.layer.weight in readers)

    def normed(self, place: int) -> str:
        """What the norm that reads the stream at a place puts out, at every position of it."""
        section = self.blocks[place][0] if place < len(self.blocks) else self.coda
        value = self.program.node(self.normed_before(section))
        whole = self.program.node(self.places[place].seen).meta["val"].numel()
        while value.meta["val"].numel() != whole:  # some positions of it, or their mean
            value = next(n for n in value.all_input_nodes if n.name in self.program.data)
        return value.name


def streamed(program: Program, graph: LayerGraph, stream: Stream, label: str) -> Streamed:
    """The blocks of a pre-norm transformer.

    Args:
        program: Of the network.
        graph: Its layer graph.
        stream: What `normed_stream` found in it.
        label: What messages call it.

    Raises:
        IncompatibleModels: It is built otherwise; names the first thing that is.
    """
    layers, shared = fits(program)
    if shared:
        raise refused(f"{shared[0]} is used twice or tied", label)
    return _Reader(program, graph, stream, label, layers).network()


class _Reader:
    """Reads the blocks of a program off its values."""

    def __init__(
        self,
        program: Program,
        graph: LayerGraph,
        stream: Stream,
        label: str,
        layers: tuple[Fit, ...],
    ) -> None:
        self.program, self.graph, self.stream, self.label = program, graph, stream, label
        self.layers = layers
        self.gains = {norm.gain for norm in stream.norms}

    def network(self) -> Streamed:
        writers = self._writers()
        begin = self._behind(writers[0].minus)
        taps = [begin, *(fit.target for fit in writers)]
        used = {name: self._tensors(name, taps) for name in taps}
        parts = list[SubBlock]()
        for writer, before in zip(writers, taps, strict=False):
            if self._behind(writer.minus) != before:
                raise refused(f"{writer.name} adds to something else than its stream", self.label)
            parts.append(SubBlock(*self._section(used[writer.target]), before, writer.target))
        inside = {name for names in used.values() for name in names}
        if len(inside) < sum(map(len, used.values())):
            raise refused("blocks share tensors", self.label)
        rest = (name for name in self.graph.tensors if name not in inside)
        coda = Section(*self._section(sorted(rest, key=self._first_read)))
        blocks = _blocks(parts)
        ends = [begin, *(block[-1].after for block in blocks)]
        last = [self._made_by(begin), *(block[-1].fits[-1].name for block in blocks)]
        places = tuple(self._place(*place) for place in zip(ends, last, strict=True))
        prelude = Section(*self._section(used[begin]))
        self._require_readers([*parts, coda])
        return Streamed(self.program, self.graph, self.stream, prelude, blocks, coda, places)

    def _require_readers(self, sections: Iterable[Section]) -> None:
        readers = {face.weight for face in self.stream.readers}
        for section in sections:
            if readers.isdisjoint(fit.layer.weight for fit in section.fits):
                what = section.tensors[0] if section.tensors else "its end"
                raise refused(f"no layer that is fitted reads the stream at {what}", self.label)

    def _writers(self) -> list[Fit]:
        """Layers whose result is added to the stream, from the first behind a norm on."""
        writers = list[Fit]()
        for fit in self.layers:
            axes = self.program.axes.get(fit.target, ())
            if fit.minus is None or Unit(self.stream.space) not in axes:
                continue
            ends = [self._behind(fit.minus)]
            if writers or not self.gains.isdisjoint(self._tensors(fit.target, ends)):
                writers.append(fit)
        if not writers:
            raise refused("nothing is added to its stream", self.label)
        return writers

    def _tensors(self, value: str, taps: Collection[str]) -> tuple[str, ...]:
        """Tensors that a value is made of, in the order of reading, but for what lies at `taps`.

        Raises:
            IncompatibleModels: It is made of several of them.
        """
        first: dict[str, tuple[int, int]] = {}
        seen, left, read = {value}, [self.program.node(value)], set[str]()
        while left:
            node = left.pop()
            for place, used in enumerate(node.all_input_nodes):
                if used.name in self.program.tensors:
                    name, at = self.program.tensors[used.name], self.program.position[node.name]
                    first[name] = min((at, place), first.get(name, (at, place)))
                elif used.name in taps:
                    read.add(used.name)
                elif used.name not in seen:
                    seen.add(used.name)
                    left.append(used)
        if len(read) > 1:
            last = max((self.program.position[n], n) for n in read)[1]
            ends = [f.name for f in self.layers if f.target in (value, last)]
            where = " and ".join(ends) or value
            raise refused(f"several blocks read the same stream: {where}", self.label)
        return tuple(sorted(first, key=first.__getitem__))

    def _section(
        self, names: Iterable[str]
    ) -> tuple[tuple[str, ...], tuple[Fit, ...], tuple[str, ...], tuple[object, ...]]:
        tensors = tuple(names)
        own = tuple(fit for fit in self.layers if fit.layer.weight in tensors)
        spaces: dict[str, str] = {self.stream.space: "stream"}
        signature = list[object]()
        for name in tensors:
            signature.append(self._axes(name, spaces))
        signature += [(fit.norm is None, fit.layer.turned, _window(fit)) for fit in own]
        signature += self._activations(own)
        return tensors, own, tuple(spaces)[1:], tuple(signature)

    def _axes(self, name: str, spaces: dict[str, str]) -> tuple[object, ...]:
        """Axes of a tensor, with spaces by the order in which they are named."""
        alike = list[object]()
        for axis in self.graph.tensors[name].axes:
            table = dict[str, str]()
            for unit in axis_units(axis.expr):
                space = self.graph.spaces[unit]
                if space.pinned is None:
                    table[unit] = spaces.setdefault(unit, f"units {len(spaces)}")
                else:
                    table[unit] = f"{space.size} in place"
            alike.append((str(rename_units(axis.expr, table)), tuple(sorted(axis.roles))))
        return tuple(alike)

    def _activations(self, own: Iterable[Fit]) -> list[object]:
        """Activation functions behind layers that make units, in order."""
        found = list[object]()
        for fit in own:
            users = self.program.node(fit.layer.node).users
            found += sorted(n for n in map(operator_name, users) if n in ACTIVATIONS)
        return found

    def _behind(self, name: str | None) -> str:
        """The value that an operand is, through operations that hand it on."""
        assert name is not None
        node = self.program.node(name)
        while node.op == "call_function" and operator_name(node) in _HANDED_ON:
            node = node.all_input_nodes[0]
        return node.name

    def _first_read(self, tensor: str) -> tuple[int, int, str]:
        return *self._read_at.get(tensor, (len(self.program.nodes), 0)), tensor

    @cached_property
    def _read_at(self) -> Mapping[str, tuple[int, int]]:
        """When each tensor is read first: by which operation, in which place."""
        first: dict[str, tuple[int, int]] = {}
        for at, node in enumerate(self.program.nodes):
            for place, used in enumerate(node.all_input_nodes):
                if used.name in self.program.tensors:
                    first.setdefault(self.program.tensors[used.name], (at, place))
        return first

    def _made_by(self, begin: str) -> str:
        """What messages call the beginning: the first tensor that makes it."""
        names = self._tensors(begin, ())
        if not names:
            raise refused("its stream is made of no tensor", self.label)
        return names[0].removesuffix(".weight")

    def _place(self, value: str, layer: str) -> StagePlace:
        node = self.program.node(value)
        units = {d for d, a in enumerate(self.program.axes[value]) if isinstance(a, Unit)}
        positions = tuple(n for d, n in enumerate(node.meta["val"].shape) if d and d not in units)
        return StagePlace(self.stream.space, value, value, positions, layer)


def _blocks(parts: list[SubBlock]) -> tuple[tuple[SubBlock, ...], ...]:
    """Sub-blocks by the shortest sequence of kinds that comes again and again."""
    kinds = [part.signature for part in parts]
    lengths = [n for n in range(1, len(parts) + 1) if len(parts) % n == 0]
    length = next(n for n in lengths if kinds == kinds[:n] * (len(parts) // n))
    return tuple(tuple(parts[at : at + length]) for at in range(0, len(parts), length))


def _window(fit: Fit) -> KernelWindow | None:
    return fit.layer.window
