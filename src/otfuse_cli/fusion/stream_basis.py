"""A joint basis for the residual streams of several parents (docs/methods/joint.md).

The streams side by side need far fewer directions than they have together: the principal axes of
the stacked stream keep nearly all of each. A fixed linear map commutes with the additions, so that
the fused stream can be meant to be `sum_k made_k x_k` everywhere.

Legend: K parents, d width of the fused stream, N units of all parents' streams together, P
positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.analysis.streams import Stream
from ..matching.canonical import faces
from ..matching.matchers.orthogonal import complement
from ..matching.stream_counterpart import NormedSum
from ..running.execute import Walk, flat_inputs
from ..running.samples import Samples
from ..transport.basis import Basis
from .half_products import add_products, mirrored
from .lockstep import Parent

# Directions that no layer reads count this much beside the mean of those that are read.
_UNREAD = 0.3
# Means of positions, which hardly change from input to input, have this share of their power.
_MEANS = 0.01
# Directions with less than this share of the power are rounding.
_NOTHING = 1e-9


@dataclass(frozen=True)
class Place:
    """Values to look at, side by side, and how often their positions count.

    Attributes:
        node: In every parent the value of this name.
        counts_P: How often each position counts; None for all once.
        each: Centred at every position instead of over all.
        own: For each parent its values, where they are others.
    """

    node: str
    counts_P: Tensor | None = None
    each: bool = False
    own: tuple[tuple[str | NormedSum, ...], ...] | None = None

    def values(self, parent: int) -> tuple[str | NormedSum, ...]:
        """The values of a parent, by its number."""
        return (self.node,) if self.own is None else self.own[parent]

    def names(self, parent: int) -> Iterator[str]:
        """What has to be computed for them."""
        for value in self.values(parent):
            yield from (value,) if isinstance(value, str) else (name for name, _ in value.terms)

    def seen(self, parent: int, walk: Walk) -> list[Tensor]:
        """The values of a parent in a pass of it."""
        for name in self.names(parent):
            walk.to(name)
        return [walk[v] if isinstance(v, str) else v.value(walk) for v in self.values(parent)]


def covariances(
    parents: Sequence[Parent], places: Sequence[Place], samples: Samples, *, device: str
) -> Iterator[Tensor]:
    """Covariance of what the parents compute there side by side, N x N each, in float64.

    One pass; memory is that of the sums.
    """
    position = parents[0].program.position
    order = sorted(range(len(places)), key=lambda at: position[places[at].node])
    sums = [_Sums(place) for place in places]
    keep = [_kept(places, order, at) for at in range(len(parents))]
    for batch in samples.batches(parents[0].program.batch):
        walks: list[Walk] = []
        for parent, kept in zip(parents, keep, strict=True):
            inputs = flat_inputs(parent.program, batch, device)
            walks.append(Walk(parent.program, parent.tensors, inputs, kept))
        size = walks[0].program.batch
        for at in order:
            parts = list[Tensor]()
            for number, walk in enumerate(walks):
                values = places[at].seen(number, walk)
                parts += [v.reshape(size, -1, v.shape[-1]) for v in values]
            sums[at].add(torch.cat(parts, -1)[: batch.count])
            for walk, kept in zip(walks, keep, strict=True):
                for name in kept:
                    if kept[name] == at:
                        walk.release(name)
    return (total.covariance() for total in sums)


def _kept(places: Sequence[Place], order: Sequence[int], parent: int) -> dict[str, int]:
    """By value of a parent, the place at which it is asked for last."""
    last: dict[str, int] = {}
    for at in order:
        last |= dict.fromkeys(places[at].names(parent), at)
    return last


class _Sums:
    def __init__(self, place: Place) -> None:
        self.place = place
        self.samples = 0
        self.mean_PN: Tensor | float = 0.0
        self.gram_1NN: Tensor | None = None
        self.counts_P = torch.ones(1)

    def add(self, rows_BPN: Tensor) -> None:
        counts_P = self.place.counts_P
        if counts_P is None or len(counts_P) != rows_BPN.shape[1]:
            counts_P = torch.ones(rows_BPN.shape[1], dtype=torch.float64)
        self.counts_P = counts_P.to(rows_BPN.device, torch.float64)
        weighted = rows_BPN
        if not bool((counts_P == 1).all()):
            weighted = rows_BPN * self.counts_P.sqrt().to(rows_BPN)[:, None]
        if self.gram_1NN is None:
            width = rows_BPN.shape[-1]
            self.gram_1NN = self.counts_P.new_zeros(1, width, width)
        add_products(self.gram_1NN, weighted.flatten(0, 1).T[None])
        self.mean_PN = self.mean_PN + rows_BPN.sum(0).double()
        self.samples += len(rows_BPN)

    def covariance(self) -> Tensor:
        assert isinstance(self.mean_PN, Tensor)
        assert self.gram_1NN is not None
        mean_PN, share_P = self.mean_PN / self.samples, self.counts_P / self.counts_P.sum()
        gram_NN = mirrored(self.gram_1NN)[0] / (self.samples * float(self.counts_P.sum()))
        if self.place.each:
            share_P = (1.0 - _MEANS) * share_P
        else:
            mean_PN, share_P = (share_P @ mean_PN)[None], share_P.new_ones(1)
        return gram_NN - torch.einsum("p,pn,pm->nm", share_P, mean_PN, mean_PN)


def joint_basis(
    covariance_NN: Tensor,
    streams: Sequence[tuple[Stream, Mapping[str, Tensor], Collection[str]]],
    weights: Sequence[float],
    width: int,
) -> list[Basis]:
    """The basis of the fused stream: one map for each parent.

    Args:
        covariance_NN: Of the normalised streams side by side, over all places where they are read.
        streams: Of each parent, in canonical form: stream, tensors, and layers that read to no end.
        weights: Importance of each parent; they sum to 1.
        width: d.
    """
    device = covariance_NN.device
    count = len(streams)
    metrics = [_metric(*stream) for stream in streams]
    # Powers count by the parents' weights, which are 1 / count where all count alike.
    shares: list[Tensor] = []
    for metric, weight in zip(metrics, weights, strict=True):
        shares.append(torch.full((len(metric),), (weight * count) ** 0.5, dtype=torch.float64))
    share_N = torch.cat(shares).to(device)
    scaled_NN = share_N[:, None] * covariance_NN * share_N
    if streams[0][0].centred:
        scaled_NN = _without_means(scaled_NN, [len(m) for m in metrics])
    root_NN = torch.zeros_like(scaled_NN)
    start = 0
    for metric in metrics:
        stop = start + len(metric)
        root_NN[start:stop, start:stop] = _root(metric)
        start = stop
    whole = complement(width) if streams[0][0].centred else torch.eye(width, dtype=torch.float64)
    most = min(whole.shape[1], len(scaled_NN))
    spectrum = torch.linalg.eigh(root_NN @ scaled_NN @ root_NN)
    # In the metric of what is read the leading directions are orthogonal; in the stream they
    # are made so, and `made` is the projection onto them (docs/methods/joint.md).
    axes_Nr = torch.linalg.qr(root_NN @ spectrum.eigenvectors[:, -most:])[0]
    made_dN = whole[:, :most].to(device) @ axes_Nr.T / count**0.5
    sizes = [len(m) for m in metrics]
    if set(sizes) != {width}:
        # What a norm puts out has as much power as there are units: d, where the parents' have
        # their own numbers of them.
        power = sum(weight * size for weight, size in zip(weights, sizes, strict=True))
        made_dN = made_dN * (width / power) ** 0.5
    inner_dd = made_dN @ scaled_NN @ made_dN.T
    read_Nd = scaled_NN @ made_dN.T @ torch.linalg.pinv(inner_dd, rtol=_NOTHING, hermitian=True)
    made = torch.split_with_sizes(made_dN * share_N, sizes, 1)
    read = torch.split_with_sizes(read_Nd / share_N[:, None], sizes)
    bases: list[Basis] = []
    for made_dn, read_nd, weight in zip(made, read, weights, strict=True):
        if streams[0][0].centred:
            # The stream has no mean, but a shift that has to stay (GPT-2's last) may: it keeps it.
            made_dn, read_nd = made_dn + weight / len(read_nd), read_nd + 1.0 / width
        bases.append(Basis(made_dn, read_nd))
    return bases


def _metric(stream: Stream, tensors: Mapping[str, Tensor], silent: Collection[str]) -> Tensor:
    """How much each direction of a stream is read: mean 1, and a floor."""
    heard = [face for face in stream.readers if face.weight not in silent]
    readers = [faces(face, tensors).double() for face in heard or stream.readers]
    if stream.centred:
        readers = [r - r.mean(0) for r in readers]
    size = len(readers[0])
    total = torch.zeros(())
    for reader in readers:  # each at unit power: a layer counts by its directions, not by its size
        total = total + reader @ reader.T / reader.square().sum().clamp(min=1e-300)
    return size * total / len(readers) + _UNREAD * torch.eye(size).to(readers[0])


def _without_means(matrix_NN: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each parent's mean taken out on both sides: its norm does that to the stream."""
    parts = [p - p.mean(0) for p in torch.split_with_sizes(matrix_NN, list(sizes))]
    turned = torch.cat(parts).T
    return torch.cat([p - p.mean(0) for p in torch.split_with_sizes(turned, list(sizes))])


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root
