"""One network reduced to smaller widths by what its units do (`--criterion reconstruct`).

Joint fusion with one parent (docs/methods/pruning.md, By reconstruction): of every space those
units stay that explain the others best on the inputs, and what read the others reads what is made
of them from those that stay. Nothing is fitted here. Spaces that are not pruned keep all units in
their order.

Legend: U units, M of them stay, d outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoint.replaced import Replaced
from ..errors import UsageError, few
from ..fusion.choose_by_readers import choose_written
from ..fusion.joint import union
from ..fusion.joint_stream import StreamParent, reduce_streams, stress
from ..fusion.lockstep import Parent
from ..fusion.pivoted_cholesky import combinations
from ..fusion.positions import reconstruction_counts
from ..fusion.refit import Stress
from ..fusion.stream_basis import Place, covariances
from ..fusion.stream_choice import choose_heads, choose_units, read_from
from ..graph.analysis.attentions import attention
from ..graph.analysis.fit_targets import Layer, linear_layers
from ..graph.analysis.streams import Stream, has_heads, normed_stream
from ..graph.axes import Unit, axis_size
from ..graph.model import LayerGraph, Role
from ..matching.activations import observe
from ..matching.alignment import Alignment
from ..matching.canonical import canonical
from ..matching.models import Model
from ..running.samples import Samples
from ..transport.choice import Choice
from .amounts import held_together

_LEAVE = "leave these units whole (--layer NAME=0, or --only), or use another --criterion"


@dataclass(frozen=True)
class Reduced:
    """A network at smaller widths, before its layers are fitted.

    Attributes:
        whole: What it was made from, as it is run, with what stays of it.
        tensors: What the fits start from, float32 by name.
        stress: What counts in the fits; None for all alike.
        remarks: What could not be done as usual.
    """

    whole: Parent
    tensors: dict[str, Tensor]
    stress: Stress | None = None
    remarks: tuple[str, ...] = ()


def reduce(
    model: Model,
    small: Model,
    run: Parent,
    samples: Samples,
    *,
    ridge: float,
    seed: int,
    device: str,
) -> Reduced:
    """Choose the units that stay, and let everything read what is made of them.

    Args:
        model: The network.
        small: At the widths to reach; of its values only those of integer tensors count.
        run: `model` as it is run.
        samples: What it is run on.
        ridge: Of the fits.
        seed: Decides which positions are looked at where there are many.
        device: Where.

    Raises:
        UsageError: Units that can't be chosen among.
    """
    before, after = model.graph.sizes, small.graph.sizes
    work = _Reduction(model, small, run, samples, seed, device)
    spaces = [s.id for s in model.graph.free() if after[s.id] != before[s.id]]
    try:
        # Plain units first; then a stream that keeps its axes; turned only where it is pruned.
        if not has_heads(model.graph):
            return work.by_activations(spaces)
        if set(spaces).isdisjoint(held_together(model.graph)):
            return work.in_place(spaces, ridge)
        try:
            stream = normed_stream(model.graph)
        except UsageError as error:
            remark = f"the stream keeps its axes, units of it were chosen: {error.what}"
            return replace(work.in_place(spaces, ridge), remarks=(remark,))
        return work.turned(stream, ridge)
    except UsageError as error:
        raise UsageError(
            f"--criterion reconstruct can't prune this: {error.what}",
            where=error.where,
            why=error.why,
            fix=_LEAVE,
        ) from error


@dataclass(frozen=True)
class _Reduction:
    model: Model
    small: Model
    run: Parent
    samples: Samples
    seed: int
    device: str

    @property
    def graph(self) -> LayerGraph:
        return self.model.graph

    def by_activations(self, spaces: Collection[str]) -> Reduced:
        """Plain units and channels, streams among them: one choice from all places of a space."""
        return self._reduced(self._seen(spaces), {})

    def turned(self, stream: Stream, ridge: float) -> Reduced:
        """A stream without axes of its own gets a basis; heads and units are chosen."""
        settled = canonical(self.run.tensors, self.graph, stream)
        canonical_model = replace(self.model, checkpoint=Replaced(self.model.checkpoint, settled))
        run = replace(self.run, tensors={n: _float32(t) for n, t in settled.items()})
        part = StreamParent(canonical_model, stream, run)
        reduced = reduce_streams(self.small, [part], self.samples, ridge, device=self.device)
        return Reduced(
            replace(run, alignment=reduced.alignments[0]), reduced.tensors, reduced.stress
        )

    def in_place(self, spaces: Collection[str], ridge: float) -> Reduced:
        """Heads and units by what they write to what is added up; the stream stays as it is."""
        run = self.run
        counts = reconstruction_counts(run.program, run.tensors, self.samples, device=self.device)
        by_weight = {layer.weight: layer for layer in linear_layers(self.run.program)}
        readers: dict[str, tuple[str, int]] = {}
        for space in spaces:
            reader = self._reader(space, by_weight)
            if reader is not None:
                readers[space] = reader
        maps = self._seen([s for s in spaces if s not in readers])
        reads: dict[str, tuple[int, Tensor]] = {}
        inputs = [by_weight[weight] for weight, _ in readers.values()]
        places = [Place(layer.input, counts.get(layer.node)) for layer in inputs]
        sums = covariances([self.run], places, self.samples, device=self.device)
        for (space, (weight, dim)), covariance_UU in zip(readers.items(), sums, strict=True):
            write_dU = self.run.tensors[weight].movedim(dim, -1).double()
            if space in self.graph.indices:
                maps[space], read_UM = self._heads(space, covariance_UU, write_dU)
                reads[weight] = dim, read_UM
            else:
                chosen_M = choose_units(covariance_UU, write_dU, self._most(space))
                maps[space] = _choice(chosen_M, combinations(covariance_UU, chosen_M))
        return replace(self._reduced(maps, reads), stress=stress(counts, ridge))

    def _reduced(
        self, maps: Mapping[str, Choice], reads: Mapping[str, tuple[int, Tensor]]
    ) -> Reduced:
        alignment = Alignment(dict(maps))
        tensors = {}
        for name in self.small.checkpoint.infos:
            if name in reads:
                dim, read_UM = reads[name]
                whole = self.run.tensors[name].double()
                tensor = torch.tensordot(whole, read_UM.to(whole), dims=([dim], [0]))
                tensor = tensor.movedim(-1, dim)
            else:
                tensor = union(name, self.small, [(self.model, alignment, 1.0)])
            tensors[name] = _float32(tensor).contiguous().to(self.device)
        return Reduced(replace(self.run, alignment=alignment), tensors)

    def _seen(self, spaces: Collection[str]) -> dict[str, Choice]:
        """Chosen by what units do after their activation, and what is made of that.

        Raises:
            UsageError: Nothing shows them one by one.
        """
        if not spaces:
            return {}
        run = self.run
        seen = observe(
            run.program,
            run.tensors,
            self.graph,
            self.samples,
            device=self.device,
            post=True,
            seed=self.seed,
        )
        unseen = [space for space in spaces if space not in seen]
        if unseen:
            raise UsageError(
                "nothing shows its units one by one",
                where=f"space {few(unseen)}",
                why="it is made or read in a way that is not known here",
            )
        maps = {}
        for space in spaces:
            taps = [tap.features_NF.double() for tap in seen[space]]
            gram_UU = torch.zeros(())
            for tap_UF in taps:
                gram_UU = gram_UU + tap_UF @ tap_UF.T / tap_UF.shape[1]
            chosen_M = choose_written([self.run], space, gram_UU, self._most(space))
            maps[space] = _choice(chosen_M, combinations(gram_UU, chosen_M))
        return maps

    def _heads(self, space: str, covariance_UU: Tensor, write_dU: Tensor) -> tuple[Choice, Tensor]:
        """Heads that stay, and what all make of the positions inside those."""
        size, most = self.graph.spaces[space].size, self._most(space)
        chosen_M = torch.tensor(choose_heads(covariance_UU, write_dU, size, most))
        inside = torch.arange(len(covariance_UU)).view(size, -1)[chosen_M].flatten()
        read_UM = read_from(covariance_UU, inside.to(covariance_UU.device))
        # The one layer that reads heads reads them through `read_UM`, position by position.
        return _choice(chosen_M, torch.zeros(size, most)), read_UM

    def _reader(self, space: str, by_weight: Mapping[str, Layer]) -> tuple[str, int] | None:
        """The layer that alone reads heads or units, and on which axis; None for other units.

        Raises:
            UsageError: Heads that are read in another way.
        """
        graph = self.graph
        if space in self.graph.indices:
            output = attention(graph, space).output
            whole = axis_size(graph.tensors[output.tensor].axes[output.dim].expr, graph.sizes)
            if output.tensor not in by_weight or output.length != whole:
                raise UsageError(
                    "heads are read together with something else", where=f"space {space}"
                )
            return output.tensor, output.dim
        readers: list[tuple[str, int]] = []
        for tensor, axis in graph.members[space]:
            if Role.CONSUME in graph.tensors[tensor].axes[axis].roles:
                readers.append((tensor, axis))
        if len(readers) != 1:
            return None
        name, dim = readers[0]
        layer = by_weight.get(name)
        if layer is None or layer.window is not None:
            return None
        axes = (graph.tensors[name].axes[dim].expr, self.run.program.axes[layer.input][-1])
        return (name, dim) if axes == (Unit(space), Unit(space)) else None

    def _most(self, space: str) -> int:
        return self.small.graph.spaces[space].size


def _choice(chosen_M: Tensor, read_UM: Tensor) -> Choice:
    return Choice(chosen_M.cpu(), torch.ones(len(chosen_M), dtype=torch.bool), read_UM)


def _float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
