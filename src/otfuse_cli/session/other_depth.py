"""Parents of other depths: what of each stands for what of the anchor, told by the inputs.

Only joint fusion takes them. It runs every parent whole, and asks it for what corresponds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import IncompatibleModels, UsageError
from ..graph.analysis.streams import PostNorm, TiedOutput, has_heads, normed_stream
from ..graph.axes import Unit
from ..graph.model import LayerGraph, Space
from ..graph.trace.program import Program
from ..matching.counterpart import Counterpart, Similar, counterpart
from ..matching.depth import as_rows, linear_cka, pooled
from ..matching.models import Model
from ..matching.stages import Staged, StagePlace, refused, staged, unlike
from ..matching.stream_blocks import Streamed, streamed
from ..matching.stream_counterpart import StreamCounterpart, stream_counterpart
from ..report.records import DepthPair, DepthRecord
from ..running.execute import Walk, flat_inputs
from .bench import Bench

# Positions along one axis that are told apart where layers are compared.
_GRID = 4


@dataclass
class Looks:
    """What models show at their places on the inputs that are judged; each is run once."""

    bench: Bench
    _networks: dict[int, Staged | Streamed] = field(default_factory=dict)
    _seen: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def network(self, model: Model) -> Staged | Streamed:
        """The stages of a model, or the blocks of a pre-norm transformer.

        Raises:
            IncompatibleModels: Its layers can't be compared.
        """
        if model.index not in self._networks:
            program = self.bench.programs[model.index]
            self._networks[model.index] = _read(program, model.graph, model.checkpoint.label)
        return self._networks[model.index]

    def counterpart(
        self, anchor: Model, source: Model
    ) -> tuple[Counterpart | StreamCounterpart, Program, LayerGraph]:
        """What of a source stands for what of the anchor; its program and graph to work with.

        Raises:
            IncompatibleModels: They differ in more than depth and widths.
        """
        ours, theirs = self.network(anchor), self.network(source)
        labels = (source.checkpoint.label, anchor.checkpoint.label)
        similar = self.similarity(anchor, source)
        if isinstance(ours, Streamed) and isinstance(theirs, Streamed):
            within = self.similarity(source, source)
            found = stream_counterpart(ours, theirs, similar, within, labels=labels)
            return found, theirs.program, theirs.graph
        if isinstance(ours, Staged) and isinstance(theirs, Staged):
            return counterpart(ours, theirs, similar, labels=labels)
        streams = labels[0 if isinstance(theirs, Streamed) else 1]
        raise unlike(
            labels, f"{streams} is a transformer, the other one is not", same="of one kind"
        )

    def similarity(self, anchor: Model, source: Model) -> Similar:
        """Linear CKA of two seen values, the anchor's first; each pair is computed once."""
        ours, theirs = self._features(anchor), self._features(source)
        known: dict[tuple[str, str], float] = {}

        def similar(one: str, other: str) -> float:
            if (one, other) not in known:
                known[one, other] = _alike(ours[one], theirs[other])
            return known[one, other]

        return similar

    def _features(self, model: Model) -> dict[str, Tensor]:
        """By seen value, what its units do: (inputs, units, *grid), float32."""
        if model.index in self._seen:
            return self._seen[model.index]
        bench, network = self.bench, self.network(model)
        batches: dict[str, list[Tensor]] = {place.seen: [] for place in network.places}
        for batch in bench.judged.batches(network.program.batch):
            inputs = flat_inputs(network.program, batch, bench.runtime.device)
            walk = Walk(network.program, bench.tensors[model.index], inputs)
            for place in network.places:
                value = _on_grid(walk.to(place.seen), place, network)
                batches[place.seen].append(value[: batch.count])
        self._seen[model.index] = {name: torch.cat(parts) for name, parts in batches.items()}
        return self._seen[model.index]


def _read(program: Program, graph: LayerGraph, label: str) -> Staged | Streamed:
    """A network as it is compared: a transformer by its blocks, another by its stages."""
    if not has_heads(graph):
        return staged(program, graph, label)
    try:
        stream = normed_stream(graph)
    except UsageError as error:
        why = f"its units move as heads or groups, and it has {error.what} ({error.where})"
        if isinstance(error, PostNorm | TiedOutput):
            why = f"{error.what} ({error.where})"
        raise refused(why, label) from error
    return streamed(program, graph, stream, label)


def correspond(bench: Bench) -> tuple[Bench, tuple[DepthRecord, ...]]:
    """The bench with every parent of another depth in the anchor's terms, and what stands for what.

    Raises:
        IncompatibleModels: A network whose layers can't be compared, or that differs in more.
    """
    parents = bench.parents
    models, programs = list(parents.models), dict(bench.programs)
    counterparts: dict[int, Counterpart | StreamCounterpart] = {}
    records = list[DepthRecord]()
    looks, anchor = Looks(bench), parents.anchor
    for index in sorted(parents.other_depth & programs.keys()):
        model = models[index]
        found, program, graph = looks.counterpart(anchor, model)
        counterparts[index] = found
        programs[index], models[index] = program, replace(model, graph=graph)
        records.append(_record(index, found))
    parents = replace(parents, models=tuple(models), counterparts=counterparts)
    with_share = [m for m in models if bench.weights[m.index] > 0]
    _require_units(parents.anchor, with_share, counterparts)
    return replace(bench, parents=parents, programs=programs), tuple(records)


def _require_units(
    anchor: Model,
    models: Sequence[Model],
    counterparts: Mapping[int, Counterpart | StreamCounterpart],
) -> None:
    """Refuse spaces for which all that have a share have too few units.

    Raises:
        IncompatibleModels: There is one: the anchor has no share.
    """
    for space in anchor.graph.free():
        if space.per is not None:
            continue  # inside heads, which go as wholes
        units = sum(_units(model, space, counterparts.get(model.index)) for model in models)
        if units < space.size:
            raise IncompatibleModels(
                "too few units for the anchor's shape",
                where=f"space {space.id} of {anchor.checkpoint.label}",
                why=f"it has {space.size} units, what has a share has {units} that could be them",
                fix="give the anchor a share (--weights), or take a shape with fewer layers",
            )


def _units(model: Model, space: Space, other: Counterpart | StreamCounterpart | None) -> int:
    """How many units of a model could be those of a space of the anchor."""
    if isinstance(other, StreamCounterpart):
        return other.sizes[space.id]
    return model.graph.spaces[space.id].size


def compare_depths(bench: Bench) -> tuple[DepthRecord, ...]:
    """How alike all layers of every source and of the anchor are, and what stands for what.

    Raises:
        IncompatibleModels: A network whose layers can't be compared, or that differs in more.
    """
    looks, anchor = Looks(bench), bench.parents.anchor
    ours, records = looks.network(anchor), list[DepthRecord]()
    for model in bench.parents.sources:
        found, _, _ = looks.counterpart(anchor, model)
        theirs, similar = looks.network(model), looks.similarity(anchor, model)
        rows = list[tuple[float, ...]]()
        for place in ours.places:
            rows.append(tuple(similar(place.seen, other.seen) for other in theirs.places))
        records.append(
            _record(model.index, found).replace(
                anchor_layers=tuple(place.layer for place in ours.places),
                source_layers=tuple(place.layer for place in theirs.places),
                matrix=tuple(rows),
            )
        )
    return tuple(records)


def _record(index: int, found: Counterpart | StreamCounterpart) -> DepthRecord:
    pairs = tuple(DepthPair(pair.anchor.layer, pair.source.layer, pair.cka) for pair in found.pairs)
    return DepthRecord(index, pairs)


def _on_grid(value: Tensor, place: StagePlace, network: Staged | Streamed) -> Tensor:
    """A value as (samples, units, *grid): positions averaged onto a few."""
    axes = network.program.axes[place.seen]
    units = next(d for d, axis in enumerate(axes) if isinstance(axis, Unit) and d)
    value = value.movedim(units, 1).float()
    grid = tuple(min(_GRID, n) for n in place.positions)
    return pooled(value, grid)


def _alike(one: Tensor, other: Tensor) -> float:
    """Linear CKA of two layers on the grid that both have."""
    grids = one.shape[2:], other.shape[2:]
    grid = tuple(map(min, *grids)) if len(grids[0]) == len(grids[1]) else ()
    return linear_cka(*(as_rows(pooled(f, grid)) for f in (one, other)))
