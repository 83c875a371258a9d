"""The residual stream of a pre-norm transformer: who writes to it, who reads it, and its heads.

A stream that only LayerNorms or RMSNorms read, and only linear maps write to, has no preferred
axes: any rotation that the norm commutes with can be undone by its readers and writers. What is
found here is read off the data flow of a traced graph. Names and sizes; no numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from ...errors import UsageError
from ..axes import Unit, axis_units, units_of
from ..model import LayerGraph, Op, OpKind, Role
from .attentions import Attention, attentions, turn_refusal

# Operations that treat all units alike, position by position or over positions.
_ALIKE = frozenset({"mean"})
_MATRICES = (OpKind.LINEAR, OpKind.CONV)


class PostNorm(UsageError):
    """A norm stands on the stream itself: its units keep their axes, only permutations remain."""


class TiedOutput(UsageError):
    """One tensor writes to the stream and, as the output layer, reads it."""


@dataclass(frozen=True)
class Face:
    """A tensor that meets the stream on one axis, and the bias of its layer, if there is one."""

    weight: str
    dim: int
    bias: str | None = None


@dataclass(frozen=True)
class NormSite:
    """A norm of the stream: gain, shift (None for RMSNorm), and the layers that read it."""

    gain: str
    shift: str | None
    readers: tuple[Face, ...]


@dataclass(frozen=True)
class Stream:
    """A stream without preferred axes.

    Attributes:
        space: Its space.
        centred: Whether its norm takes the mean away (LayerNorm).
        norms: Its norms.
        writers: Matrices and embeddings that write to it, by the axis that does.
        vectors: Tensors that are added to it or stand on it: biases, positions, class tokens.
        attentions: In execution order.
        units: Spaces of units between two layers, which have axes of their own.
    """

    space: str
    centred: bool
    norms: tuple[NormSite, ...]
    writers: tuple[Face, ...]
    vectors: tuple[Face, ...]
    attentions: tuple[Attention, ...]
    units: tuple[str, ...]

    @property
    def readers(self) -> tuple[Face, ...]:
        """Layers that read it, behind its norms."""
        faces: list[Face] = []
        for norm in self.norms:
            faces.extend(norm.readers)
        return tuple(faces)


def normed_stream(graph: LayerGraph) -> Stream:
    """The one stream of a pre-norm transformer.

    Raises:
        PostNorm: Norms stand on the stream itself.
        TiedOutput: The output layer is tied to the embedding.
        UsageError: There is no such stream, or something on it works unit by unit.
    """
    norms: dict[int, Op] = {}
    spaces: set[str] = set()
    for at, op in enumerate(graph.ops):
        if op.kind is not OpKind.NORM or op.detail not in ("layer", "rms"):
            continue
        # A norm inside every head (of queries and keys) stands on a family, not on the stream.
        if isinstance(op.writes, Unit) and graph.spaces[op.writes.space].per is None:
            norms[at] = op
            spaces.add(op.writes.space)
    if len(spaces) != 1:
        raise turn_refusal(
            "no single residual stream with a LayerNorm or RMSNorm",
            f"{len(spaces)} spaces behind such norms",
        )
    space = spaces.pop()
    # Numbers of operations; a graph from names and shapes has none.
    if not any(any(chain.from_iterable(op.inputs)) for op in graph.ops):
        raise turn_refusal(
            "the data flow of the network is not known",
            graph.source,
            fix="give the network to trace: --arch file.py:factory, hf:DIR or graph.pt2",
        )
    pinned = graph.spaces[space].pinned
    if pinned is not None:
        raise turn_refusal(f"the residual stream can't move ({pinned})", space)
    if len({op.detail for op in norms.values()}) > 1:
        raise turn_refusal("LayerNorm and RMSNorm on one stream", space)
    _require_pre_norm(graph, space, norms)
    require_untied(graph)
    return _Search(graph, space, norms).stream()


def has_heads(graph: LayerGraph) -> bool:
    """Whether units move as a whole: heads, groups."""
    return bool(graph.indices)


def in_heads(graph: LayerGraph) -> frozenset[str]:
    """Spaces of heads and of what lies inside them."""
    inside = {s.id: s.per for s in graph.free() if s.per is not None}
    return frozenset(inside) | frozenset(inside.values())


def require_untied(graph: LayerGraph) -> None:
    """Refuse a tensor that makes units as an embedding and reads them as the output layer.

    Raises:
        TiedOutput: There is one.
    """
    looked_up: set[str] = set()
    for op in graph.ops:
        if op.detail == "embedding":
            looked_up.update(op.tensors.values())
    for tensor in graph.tensors.values():
        # As an embedding it makes the units of the stream, as an output layer it reads them.
        both = any({Role.CONSUME, Role.PRODUCE} <= axis.roles for axis in tensor.axes)
        if both and tensor.name in looked_up:
            way = "add --untie, which gives the output layer a weight of its own"
            if not tensor.aliases:
                way = "give the network an output layer with a weight of its own"
            raise TiedOutput(
                "the embedding is tied to the output layer",
                where=tensor.name,
                why="what becomes of the output layer must not become of the embedding",
                fix=f"{way}, or use --residual shared",
            )


def _require_pre_norm(graph: LayerGraph, space: str, norms: Mapping[int, Op]) -> None:
    for op in graph.ops:
        if op.kind is not OpKind.ADD or op.writes is None or space not in axis_units(op.writes):
            continue
        if not norms.keys().isdisjoint(chain.from_iterable(op.inputs)):
            raise PostNorm(
                "a norm stands on the stream itself (post-norm)",
                where=op.name,
                why="what it writes is added to: its gain gives every unit its own axis",
                fix="use --residual shared",
            )


class _Search:
    """Reads one graph."""

    def __init__(self, graph: LayerGraph, space: str, norms: dict[int, Op]) -> None:
        self.graph, self.space, self.norms = graph, space, norms
        self.writers: list[Face] = []
        self.seen: set[str] = set()

    def stream(self) -> Stream:
        for at, op in enumerate(self.graph.ops):
            self._look(at, op)
        sites = tuple(self._site(at, op) for at, op in self.norms.items())
        heads = in_heads(self.graph)
        units = [s.id for s in self.graph.free() if s.id not in heads and s.id != self.space]
        return Stream(
            self.space,
            next(iter(self.norms.values())).detail == "layer",
            sites,
            tuple(self.writers),
            self._vectors(),
            attentions(self.graph),
            tuple(units),
        )

    def _look(self, at: int, op: Op) -> None:
        """Refuse what works on the units of the stream one by one; note who writes to it."""
        axes = op.reads if op.writes is None else (*op.reads, op.writes)
        if self.space not in units_of(axes) or at in self.norms:
            return
        if op.kind in _MATRICES or op.detail == "embedding":
            face = self._face(op)
            roles = self.graph.tensors[face.weight].axes[face.dim].roles
            if Role.CONSUME in roles and op.kind in _MATRICES:
                sources = self._behind(chain.from_iterable(op.inputs))
                if not sources or not sources <= set(self.norms):
                    raise turn_refusal("a layer reads the stream before its norm", op.name)
            else:
                self.writers.append(face)
            return
        if op.kind is OpKind.ADD:
            return
        # An activation, a gain, a slice: whatever tells units apart gives the stream its axes.
        if op.detail not in _ALIKE:
            raise turn_refusal(f"{op.detail or op.kind} works on each unit of the stream", op.name)

    def _behind(self, made: Iterable[int]) -> set[int]:
        """Operations that wrote a value, seen through those that treat all units alike."""
        writers: set[int] = set()
        for at in made:
            op = self.graph.ops[at]
            if op.detail in _ALIKE:
                writers |= self._behind(chain.from_iterable(op.inputs))
            else:
                writers.add(at)
        return writers

    def _face(self, op: Op) -> Face:
        weights = [n for n in op.tensors.values() if len(self.graph.tensors[n].axes) > 1]
        places: list[tuple[str, int]] = []
        for name in weights:
            places.extend((name, dim) for dim in self.graph.tensors[name].dims(self.space))
        if len(places) != 1:
            raise turn_refusal("a layer meets the stream on more than one axis", op.name)
        name, dim = places[0]
        if self.graph.tensors[name].axes[dim].expr != Unit(self.space):
            raise turn_refusal("a layer reads the stream together with something else", op.name)
        self.seen.add(name)
        return Face(name, dim, op.tensors.get("bias"))

    def _site(self, at: int, op: Op) -> NormSite:
        readers = []
        for other in self.graph.ops:
            if at in self._behind(chain.from_iterable(other.inputs)):
                if other.detail in _ALIKE:
                    continue
                if other.kind not in _MATRICES:
                    raise turn_refusal("what a norm writes is not read by a layer", other.name)
                readers.append(self._face(other))
        self.seen |= set(op.tensors.values())
        if "weight" not in op.tensors:
            raise turn_refusal("a norm without a gain in the checkpoint", op.name)
        return NormSite(op.tensors["weight"], op.tensors.get("bias"), tuple(readers))

    def _vectors(self) -> tuple[Face, ...]:
        vectors = []
        for name, dim in self.graph.members[self.space]:
            if name in self.seen:
                continue
            axis = self.graph.tensors[name].axes[dim]
            if axis.expr != Unit(self.space) or not axis.roles <= {Role.VECTOR, Role.PRODUCE}:
                raise turn_refusal("a tensor scales the units of the stream", name)
            vectors.append(Face(name, dim))
        return tuple(vectors)
