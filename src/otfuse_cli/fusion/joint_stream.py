"""Joint fusion of pre-norm transformers: a joint basis for the stream, heads and units by choice.

The parents side by side are one network with a wide stream, all heads and all units. The stream is
projected onto the directions that both parents need, of heads and units as many are kept as the
anchor has, and every layer is fitted, on the fused network's own inputs, to what the parents
compute there (docs/methods/joint.md, Streams without axes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UsageError
from ..graph.analysis.attentions import Attention
from ..graph.analysis.fit_targets import Fit, Layer, fits, linear_layers
from ..graph.analysis.streams import Stream, normed_stream
from ..graph.model import LayerGraph, Role
from ..matching.alignment import Alignment
from ..matching.models import Model
from ..matching.stream_counterpart import NormedSum, StreamCounterpart
from ..running.samples import Samples
from ..transport.choice import Choice
from ..transport.maps import Map
from .joint import union
from .joint_heads import read_through, require_alike
from .lockstep import Parent
from .pivoted_cholesky import combinations, split_choice
from .positions import Positions, read_out
from .refit import Stress
from .stream_basis import Place, covariances, joint_basis
from .stream_choice import choose_heads, choose_units, read_from

# A layer with this many rows gets the ridge that was asked for; one with more needs less, since
# positions are rows here and the output layer has few (docs/methods/joint.md).
_ROWS, _POWER = 1_000.0, 0.8


@dataclass(frozen=True)
class StreamParent:
    """One parent in canonical form: its model, its stream, how it is run, its share."""

    model: Model
    stream: Stream
    run: Parent

    @property
    def other(self) -> StreamCounterpart | None:
        """What of it stands for what of the anchor, where its depth is another."""
        other = self.run.counterpart
        return other if isinstance(other, StreamCounterpart) else None

    def reads(self, value: str) -> tuple[str, ...]:
        """What its layers read that stand for those of the anchor that read `value`."""
        return (value,) if self.other is None else self.other.reads[value]

    def silent(self) -> frozenset[str]:
        """Tensors of layers that make heads or units which write nothing to the stream."""
        graph, made = self.model.graph, set[str]()
        inner = {attention.heads: attention.output.tensor for attention in self.stream.attentions}
        inner |= {space: _reader(graph, self.stream, space) for space in self.stream.units}
        for space, reader in inner.items():
            if not bool(self.run.tensors[reader].any()):
                made.update(graph.producers(space))
        return frozenset(made)

    def normed(self, value: str) -> str | NormedSum:
        """What of its stream stands for what layers of the anchor read behind a norm."""
        return value if self.other is None else self.other.normed[value]

    def attentions(self, at: int) -> tuple[Attention, ...]:
        """Its attention layers that stand for one of the anchor, by its number."""
        return (self.stream.attentions[at],) if self.other is None else self.other.attentions[at]

    def spaces(self, space: str) -> tuple[str, ...]:
        """Its spaces of units that stand for one of the anchor."""
        return (space,) if self.other is None else self.other.spaces[space]


@dataclass(frozen=True)
class Union:
    """The union of the parents, reduced but not fitted.

    Attributes:
        alignments: Of the parents.
        tensors: What the fits start from, float32.
        stress: What counts in the fits.
    """

    alignments: tuple[Alignment, ...]
    tensors: dict[str, Tensor]
    stress: Stress


def reduce_streams(
    anchor: Model,
    parts: Sequence[StreamParent],
    samples: Samples,
    ridge: float,
    *,
    device: str,
    named: Parent | None = None,
) -> Union:
    """Choose the basis, heads and units, and put the union of the parents into them.

    Args:
        anchor: Its graph has the widths of the result.
        parts: The parents, weights summing to 1.
        samples: What they are run on.
        ridge: Of a fit with 1,000 rows.
        device: Where.
        named: A network with the anchor's values and tensors, to try positions on; None where the
            first parent is one.

    Raises:
        UsageError: Heads of different widths, or units that write to more than the stream.
    """
    work = _Reduction(anchor, parts, samples, device, named or parts[0].run)
    alignments = work.alignments()
    tensors = {n: work.tensor(n, alignments) for n in anchor.checkpoint.infos}

    return Union(alignments, tensors, stress(work.counts, ridge))


def stress(counts: Mapping[str, Tensor | None], ridge: float) -> Stress:
    """How much positions count in each fit, and its ridge.

    Args:
        counts: By a layer's value, how often each position counts; None for all alike.
        ridge: Of a fit with 1,000 rows.
    """

    def weigh(fit: Fit, rows: int) -> tuple[Tensor | None, float]:
        return counts.get(fit.layer.node), ridge * min(1.0, (_ROWS / rows) ** _POWER)

    return weigh


@dataclass(frozen=True)
class _Supplier:
    """A layer whose heads or units can be chosen: the parent's number, their space, who reads."""

    part: int
    space: str
    reader: str
    attention: Attention | None = None


class _Reduction:
    def __init__(
        self,
        anchor: Model,
        parts: Sequence[StreamParent],
        samples: Samples,
        device: str,
        named: Parent,
    ) -> None:
        self.anchor, self.parts, self.samples, self.device = anchor, parts, samples, device
        self.graph, self.stream = anchor.graph, normed_stream(anchor.graph)
        self.runs = [part.run for part in parts]
        program = self.program = named.program
        self.layers: Mapping[str, Layer] = {layer.weight: layer for layer in linear_layers(program)}
        writers = [f.weight for f in self.stream.writers if f.weight in self.layers]
        self.last = max(writers, key=lambda n: program.position[self.layers[n].node])
        positions = Positions(program, named.tensors, samples, device=device)
        self.counts = read_out(positions, fits(program)[0], self.last)
        # Of heads by output weight: what reads which of all parents' heads, and whose they are.
        self.reads: dict[str, tuple[list[_Supplier], list[Tensor]]] = {}
        # By what reads heads or units, the layers of all parents that could give them.
        self.suppliers: dict[str, list[_Supplier]] = {}
        # How many of them are taken.
        self.most: dict[str, int] = {}

    def alignments(self) -> tuple[Alignment, ...]:
        readers = dict.fromkeys(self.layers[f.weight].input for f in self.stream.readers)
        self.suppliers = self._attention_suppliers()
        outputs = list(self.suppliers)
        spaces: dict[str, str] = {}  # of units, by the layer that reads them
        for space in self.stream.units:
            spaces.setdefault(_reader(self.graph, self.stream, space), space)
        self.suppliers |= {weight: self._unit_suppliers(s) for weight, s in spaces.items()}
        heads = {a.output.tensor: a.heads for a in self.stream.attentions}
        for weight, space in (heads | spaces).items():
            self.most[weight] = self.graph.spaces[space].size
        inner = [*outputs, *spaces]
        places = [self._normed(node) for node in readers]
        places += [self._inner(weight) for weight in inner]
        sums = list(covariances(self.runs, places, self.samples, device=self.device))
        total = sum(sums[: len(readers)], torch.zeros(()))
        weights = [p.run.weight for p in self.parts]
        streams = [(p.stream, p.run.tensors, p.silent()) for p in self.parts]
        width = self.graph.spaces[self.stream.space].size
        self.bases = joint_basis(total, streams, weights, width)
        maps: list[dict[str, Map]] = []
        for part, basis in zip(self.parts, self.bases, strict=True):
            maps.append({part.stream.space: basis})
        for weight, covariance in zip(inner, sums[len(readers) :], strict=True):
            choose = self._units if weight in spaces else self._heads
            chosen = choose(weight, covariance)
            for supplier, choice in zip(self.suppliers[weight], chosen, strict=True):
                maps[supplier.part][supplier.space] = choice
        return tuple(Alignment(m) for m in maps)

    def _attention_suppliers(self) -> dict[str, list[_Supplier]]:
        suppliers: dict[str, list[_Supplier]] = {}
        for at, attention in enumerate(self.stream.attentions):
            every = suppliers[attention.output.tensor] = list[_Supplier]()
            for number, part in enumerate(self.parts):
                for own in part.attentions(at):
                    every.append(_Supplier(number, own.heads, own.output.tensor, own))
            require_alike([[own.attention] for own in every if own.attention is not None])
        return suppliers

    def _unit_suppliers(self, space: str) -> list[_Supplier]:
        suppliers = list[_Supplier]()
        for number, part in enumerate(self.parts):
            for own in part.spaces(space):
                reader = _reader(part.model.graph, part.stream, own)
                suppliers.append(_Supplier(number, own, reader))
        return suppliers

    def _normed(self, node: str) -> Place:
        """Where the streams are seen that layers of the anchor read."""
        own = tuple((part.normed(node),) for part in self.parts)
        return Place(node, self._at(node), each=True, own=own)

    def _inner(self, weight: str) -> Place:
        """What the heads or units that a layer reads do, of all parents side by side."""
        layer = self.layers[weight]
        return Place(
            layer.input,
            self.counts[layer.node],
            own=tuple(part.reads(layer.input) for part in self.parts),
        )

    def _at(self, node: str) -> Tensor | None:
        """Positions that count where the stream is read: those that any reader needs."""
        readers = (layer for layer in self.layers.values() if layer.input == node)
        counts: list[Tensor] = []
        for layer in readers:
            layer_counts = self.counts.get(layer.node)
            if layer_counts is None:
                return None
            counts.append(layer_counts)
        needed_P = torch.stack(counts).amax(0) >= 1
        # Nobody needs what is read in a layer that adds nothing: all positions are alike there.
        return needed_P.double() if bool(needed_P.any()) else None

    def _write(self, suppliers: Sequence[_Supplier]) -> Tensor:
        """What the units of all parents write to the fused stream, d x U, weights included."""
        written = list[Tensor]()
        for supplier in suppliers:
            part, basis = self.parts[supplier.part], self.bases[supplier.part]
            face = next(f for f in part.stream.writers if f.weight == supplier.reader)
            matrix = part.run.tensors[supplier.reader].movedim(face.dim, 0).double()
            written.append(basis.made_MN.to(matrix) @ matrix)
        return torch.cat(written, 1)

    def _heads(self, weight: str, covariance: Tensor) -> list[Choice]:
        suppliers = self.suppliers[weight]
        counts = [s.attention.output.sizes[0] for s in suppliers if s.attention is not None]
        heads = sum(counts)
        write = self._write(suppliers)
        chosen = choose_heads(covariance, write, heads, self.most[weight])
        places = torch.arange(len(covariance)).view(heads, -1)
        inside = places[list(chosen)].flatten().to(covariance.device)
        widths = [c * places.shape[1] for c in counts]
        reads = torch.split_with_sizes(read_from(covariance, inside), widths)
        self.reads[weight] = suppliers, list(reads)
        return split_choice(torch.tensor(chosen), counts, None)

    def _units(self, weight: str, covariance: Tensor) -> list[Choice]:
        suppliers = self.suppliers[weight]
        counts = [self.parts[s.part].model.graph.spaces[s.space].size for s in suppliers]
        chosen_M = choose_units(covariance, self._write(suppliers), self.most[weight])
        read_UM = combinations(covariance, chosen_M)
        return split_choice(chosen_M.cpu(), counts, read_UM)

    def tensor(self, name: str, alignments: Sequence[Alignment]) -> Tensor:
        """One tensor of the union, reduced."""
        gains = {n.gain for n in self.stream.norms}
        anchor_tensor = self.anchor.read(name)
        if name in gains:
            return torch.ones_like(anchor_tensor, dtype=torch.float32)
        if name not in self.reads:
            if not anchor_tensor.is_floating_point():
                return anchor_tensor
            parts = []
            for part, alignment in zip(self.parts, alignments, strict=True):
                parts.append((part.model, alignment, part.run.weight))
            others = {p.model.index: p.other for p in self.parts if p.other is not None}
            return union(name, self.anchor, parts, others=others).float()
        suppliers, reads = self.reads[name]
        # The heads are chosen already: only the stream has to be moved.
        parents: list[Parent] = []
        for supplier in suppliers:
            part, basis = self.parts[supplier.part], self.bases[supplier.part]
            parents.append(replace(part.run, alignment=Alignment({part.stream.space: basis})))
        layers = [s.attention for s in suppliers if s.attention is not None]
        return read_through(layers, parents, reads)


def _reader(graph: LayerGraph, stream: Stream, space: str) -> str:
    """The one layer that reads the units of a space and writes to the stream.

    Raises:
        UsageError: There is none.
    """
    names: list[str] = []
    for name, dim in graph.members[space]:
        if Role.CONSUME in graph.tensors[name].axes[dim].roles:
            names.append(name)
    if len(names) != 1 or names[0] not in {f.weight for f in stream.writers}:
        raise UsageError(
            "joint fusion can't choose among some units",
            where=f"space {space}",
            why="they are not read by one layer that writes to the residual stream",
            fix="use --blend average",
        )
    return names[0]
