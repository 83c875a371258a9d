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
from ..graph.analysis.fit_targets import Fit, Layer, fits, linear_layers
from ..graph.analysis.streams import Face, Stream
from ..graph.model import Role
from ..matching.alignment import Alignment
from ..matching.models import Model
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
    anchor: Model, parts: Sequence[StreamParent], samples: Samples, ridge: float, *, device: str
) -> Union:
    """Choose the basis, heads and units, and put the union of the parents into them.

    Args:
        anchor: Its graph has the widths of the result.
        parts: The parents, weights summing to 1.
        samples: What they are run on.
        ridge: Of a fit with 1,000 rows.
        device: Where.

    Raises:
        UsageError: Heads of different widths, or units that write to more than the stream.
    """
    work = _Reduction(anchor, parts, samples, device)
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


class _Reduction:
    def __init__(
        self, anchor: Model, parts: Sequence[StreamParent], samples: Samples, device: str
    ) -> None:
        self.anchor, self.parts, self.samples, self.device = anchor, parts, samples, device
        self.graph = anchor.graph
        self.stream = parts[0].stream
        self.runs = [part.run for part in parts]
        program = self.runs[0].program
        self.layers: Mapping[str, Layer] = {layer.weight: layer for layer in linear_layers(program)}
        writers = [f.weight for f in self.stream.writers if f.weight in self.layers]
        self.last = max(writers, key=lambda n: program.position[self.layers[n].node])
        positions = Positions(program, self.runs[0].tensors, samples, device=device)
        self.counts = read_out(positions, fits(program)[0], self.last)
        # Of heads by output weight, of units by space: what reads which of all parents' units.
        self.reads: dict[str, list[Tensor]] = {}
        require_alike([p.stream.attentions for p in parts])

    def alignments(self) -> tuple[Alignment, ...]:
        readers = dict.fromkeys(self.layers[f.weight].input for f in self.stream.readers)
        outputs = [a.output.tensor for a in self.stream.attentions]
        spaces: dict[str, str] = {}  # of units, by the layer that reads them
        for space in self.stream.units:
            spaces.setdefault(self._reader(space), space)
        inner = [*outputs, *spaces]
        places = [Place(node, self._at(node), each=True) for node in readers]
        for weight in inner:
            layer = self.layers[weight]
            places.append(Place(layer.input, self.counts[layer.node]))
        sums = list(covariances(self.runs, places, self.samples, device=self.device))
        total = sum(sums[: len(readers)], torch.zeros(()))
        weights = [p.run.weight for p in self.parts]
        streams = [(p.stream, p.run.tensors) for p in self.parts]
        width = self.graph.spaces[self.stream.space].size
        self.bases = joint_basis(total, streams, weights, width)
        maps: list[dict[str, Map]] = [{self.stream.space: b} for b in self.bases]
        for weight, covariance in zip(inner, sums[len(readers) :], strict=True):
            if weight in spaces:
                chosen = self._units(spaces[weight], weight, covariance)
            else:
                chosen = self._heads(weight, covariance)
            for parent_maps, (name, choice) in zip(maps, chosen, strict=True):
                parent_maps[name] = choice
        return tuple(Alignment(m) for m in maps)

    def _at(self, node: str) -> Tensor | None:
        """Positions that count where the stream is read: those that any reader needs."""
        readers = (layer for layer in self.layers.values() if layer.input == node)
        counts: list[Tensor] = []
        for layer in readers:
            layer_counts = self.counts.get(layer.node)
            if layer_counts is None:
                return None
            counts.append(layer_counts)
        counts_P = torch.stack(counts).amax(0)
        return (counts_P >= 1).double()

    def _reader(self, space: str) -> str:
        """The one layer that reads the units of a space and writes to the stream."""
        graph = self.graph
        names: list[str] = []
        for name, dim in graph.members[space]:
            if Role.CONSUME in graph.tensors[name].axes[dim].roles:
                names.append(name)
        if len(names) != 1 or names[0] not in {f.weight for f in self.stream.writers}:
            raise UsageError(
                "joint fusion can't choose among some units",
                where=f"space {space}",
                why="they are not read by one layer that writes to the residual stream",
                fix="use --blend average",
            )
        return names[0]

    def _face(self, weight: str) -> Face:
        return next(f for f in self.stream.writers if f.weight == weight)

    def _write(self, weight: str) -> Tensor:
        """What the units of all parents write to the fused stream, d x U, weights included."""
        face = self._face(weight)
        parts = []
        for part, basis in zip(self.parts, self.bases, strict=True):
            matrix = part.run.tensors[weight].movedim(face.dim, 0).double()
            parts.append(basis.made_MN.to(matrix) @ matrix)
        return torch.cat(parts, 1)

    def _heads(self, weight: str, covariance: Tensor) -> list[tuple[str, Choice]]:
        at = next(i for i, a in enumerate(self.stream.attentions) if a.output.tensor == weight)
        attentions = [p.stream.attentions[at] for p in self.parts]
        space, counts = attentions[0].heads, [a.output.sizes[0] for a in attentions]
        most = self.graph.spaces[space].size
        heads = sum(counts)
        chosen = choose_heads(covariance, self._write(weight), heads, most)
        places = torch.arange(len(covariance)).view(heads, -1)
        inside = places[list(chosen)].flatten().to(covariance.device)
        widths = [c * places.shape[1] for c in counts]
        self.reads[weight] = list(torch.split_with_sizes(read_from(covariance, inside), widths))
        return [(space, c) for c in split_choice(torch.tensor(chosen), counts, None)]

    def _units(self, space: str, weight: str, covariance: Tensor) -> list[tuple[str, Choice]]:
        counts = [p.model.graph.spaces[space].size for p in self.parts]
        chosen_M = choose_units(covariance, self._write(weight), self.graph.spaces[space].size)
        read_UM = combinations(covariance, chosen_M)
        return [(space, c) for c in split_choice(chosen_M.cpu(), counts, read_UM)]

    def tensor(self, name: str, alignments: Sequence[Alignment]) -> Tensor:
        """One tensor of the union, reduced."""
        gains = {n.gain for n in self.stream.norms}
        anchor_tensor = self.anchor.read(name)
        if name in gains:
            return torch.ones_like(anchor_tensor, dtype=torch.float32)
        shares = [p.run.weight for p in self.parts]
        if name not in self.reads:
            if not anchor_tensor.is_floating_point():
                return anchor_tensor
            models = [part.model for part in self.parts]
            parts = list(zip(models, alignments, shares, strict=True))
            return union(name, self.anchor, parts).float()
        at = next(i for i, a in enumerate(self.stream.attentions) if a.output.tensor == name)
        attentions = [p.stream.attentions[at] for p in self.parts]
        # The heads are chosen already: only the stream has to be moved.
        parents: list[Parent] = []
        for part, basis in zip(self.parts, self.bases, strict=True):
            alignment = Alignment({self.stream.space: basis})
            parents.append(replace(part.run, alignment=alignment))
        return read_through(attentions, parents, self.reads[name])
