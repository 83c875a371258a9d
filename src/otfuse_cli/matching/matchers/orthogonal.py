"""One rotation for the whole residual stream, with heads, their insides and MLP units.

The objective is the sum over layers of `<anchor, moved source>`, each layer at unit norm. Every
step has a closed form: a polar factor for the stream and for the insides of heads, an assignment
for heads and for units. No data, no labels (docs/methods/streams.md, Turning).
Legend: N source units, M anchor units, d width of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...graph.analysis.blocks import blocks
from ...graph.analysis.streams import Face, Stream
from ...graph.model import LayerGraph, OpKind, Role
from ...transport.solve import maximise
from ..canonical import Tensors, faces, view
from ..heads import HeadMoves, match_heads, move_heads

_MOST_ROUNDS = 30
# A rotation that moves less than this, per unit of the stream, has come to rest.
_STILL = 1e-6


@dataclass(frozen=True)
class Moves:
    """How a source moves onto the anchor.

    Attributes:
        stream_dd: The rotation of its stream, anchor x source; None to leave it.
        heads: By the space of the heads.
        units: By space, the source unit of each anchor unit.
    """

    stream_dd: Tensor | None
    heads: Mapping[str, HeadMoves] = field(default_factory=dict)
    units: Mapping[str, Tensor] = field(default_factory=dict)


def match_rotated(
    source: Tensors,
    anchor: Tensors,
    graph: LayerGraph,
    stream: Stream,
    *,
    pairs: Mapping[str, Tensor] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Moves:
    """Match two networks in canonical form, of the same widths.

    Args:
        source: Tensors in float64.
        anchor: Tensors in float64.
        graph: Of both.
        stream: Of both.
        pairs: For heads with rotary positions, which positions inside turn together.
        progress: Told after every round.
    """
    mine, theirs = (_scaled(t, graph, stream) for t in (source, anchor))
    ends = [f for f in (*stream.readers, *stream.writers) if _is_end(graph, f, stream.space)]
    turn_dd = _polar(mine, theirs, ends, centred=stream.centred)
    heads: dict[str, HeadMoves] = {}
    units = {s: torch.arange(graph.spaces[s].size) for s in stream.units}
    for done in range(_MOST_ROUNDS):
        progress(done, _MOST_ROUNDS)
        turned = move(mine, graph, stream, Moves(turn_dd))
        heads = {
            a.heads: match_heads(turned, theirs, a, (pairs or {}).get(a.heads))
            for a in stream.attentions
        }
        for space in stream.units:
            others = {s: index for s, index in units.items() if s != space}
            moved = move(turned, graph, stream, Moves(None, heads, others))
            units[space] = _units(moved, theirs, graph, space)
        moved = move(mine, graph, stream, Moves(None, heads, units))
        every = (*stream.readers, *stream.writers, *stream.vectors, *_shifts(stream))
        after_dd = _polar(moved, theirs, every, centred=stream.centred)
        still = float((after_dd - turn_dd).norm()) <= _STILL * len(turn_dd) ** 0.5
        turn_dd = after_dd
        if still:
            break
    progress(_MOST_ROUNDS, _MOST_ROUNDS)
    return Moves(turn_dd, heads, units)


def move(tensors: Mapping[str, Tensor], graph: LayerGraph, stream: Stream, moves: Moves) -> Tensors:
    """A network whose stream is turned, and whose heads and units are moved; same function."""
    moved = {n: t.clone() for n, t in tensors.items()}
    if moves.stream_dd is not None:
        for face in (*stream.readers, *stream.writers, *stream.vectors, *_shifts(stream)):
            weight = moved[face.weight]
            turned = torch.tensordot(moves.stream_dd.to(weight), weight, dims=([1], [face.dim]))
            moved[face.weight] = turned.movedim(0, face.dim).contiguous()
    for attention in stream.attentions:
        if attention.heads in moves.heads:
            move_heads(moved, attention, moves.heads[attention.heads])
    for space, index_M in moves.units.items():
        for held, at in _places(moved, graph, space):
            held.copy_(held.index_select(at, index_M.to(held.device)))
    return moved


def restored(graph: LayerGraph, stream: Stream) -> dict[str, int]:
    """Weights whose rows an average shortens, and the axis: those that make units of MLPs."""
    return {
        name: dim
        for space in stream.units
        for name, dim in graph.members[space]
        if Role.PRODUCE in graph.tensors[name].axes[dim].roles
    }


def _shifts(stream: Stream) -> tuple[Face, ...]:
    return tuple(Face(n.shift, 0) for n in stream.norms if n.shift is not None)


def _is_end(graph: LayerGraph, face: Face, stream: str) -> bool:
    """Whether nothing but the stream can move there: embeddings, patches, classes."""
    units = {
        u
        for d in range(len(graph.tensors[face.weight].axes))
        if d != face.dim
        for block in blocks(graph.tensors[face.weight], d, graph.sizes)
        for u in block.spaces
        if u is not None
    }
    return all(graph.spaces[u].pinned is not None for u in units)


def _scaled(tensors: Tensors, graph: LayerGraph, stream: Stream) -> Tensors:
    """Every layer at unit norm, its bias along with it; heads' queries, keys and values apart."""
    scaled = {n: t.clone() for n, t in tensors.items() if t.is_floating_point()}
    done: set[str] = set()
    for attention in stream.attentions:
        for part in (*attention.queries, attention.values):
            held = [view(b, scaled[b.tensor]) for b in (part.weight, part.bias) if b is not None]
            _to_unit_norm(held)
            done |= {b.tensor for b in (part.weight, part.bias) if b is not None}
    for op in graph.ops:
        names = [n for n in op.tensors.values() if n in scaled and n not in done]
        if op.kind is OpKind.NORM:
            names = [n for n in names if bool(scaled[n].any()) and n != op.tensors.get("weight")]
        _to_unit_norm([scaled[n] for n in names])
        done |= set(names)
    for name in scaled.keys() - done:
        if name not in {n.gain for n in stream.norms}:
            _to_unit_norm([scaled[name]])
    return scaled


def _to_unit_norm(held: Sequence[Tensor]) -> None:
    total = sum(float(t.square().sum()) for t in held) ** 0.5
    if total > 0:
        for tensor in held:
            tensor.div_(total)


def _polar(source: Tensors, anchor: Tensors, places: Sequence[Face], *, centred: bool) -> Tensor:
    """The rotation that brings the source's faces nearest to the anchor's, anchor x source.

    A centred stream never has a mean: the mean stays where it is.
    """
    first = anchor[places[0].weight]
    size = first.shape[places[0].dim]
    cross_dd = first.new_zeros(size, size)
    for face in places:
        cross_dd += faces(face, anchor) @ faces(face, source).T
    if not centred:
        left, _, right = torch.linalg.svd(cross_dd)
        turn: Tensor = left @ right
        return turn
    basis = complement(size).to(cross_dd)
    left, _, right = torch.linalg.svd(basis.T @ cross_dd @ basis)
    inner: Tensor = basis @ left @ right @ basis.T
    return inner + 1.0 / size


def complement(size: int) -> Tensor:
    """An orthonormal basis, size x (size - 1), of what has no mean (Helmert's)."""
    steps = torch.arange(1, size, dtype=torch.float64)
    basis = torch.triu(torch.ones(size, size - 1, dtype=torch.float64))
    basis[1:].diagonal().copy_(-steps)
    return basis / (steps * (steps + 1)).sqrt()


def _places(
    tensors: Mapping[str, Tensor], graph: LayerGraph, space: str
) -> list[tuple[Tensor, int]]:
    """Every block that carries a space, as a view, with the axis of the space in it."""
    places = []
    for name, dim in graph.members[space]:
        for block in blocks(graph.tensors[name], dim, graph.sizes):
            if name in tensors and space in block.spaces:
                places.append((view(block, tensors[name]), block.spaces.index(space)))
    return places


def _units(source: Tensors, anchor: Tensors, graph: LayerGraph, space: str) -> Tensor:
    benefit: Tensor | None = None
    for (mine, at), (theirs, _) in zip(
        _places(source, graph, space), _places(anchor, graph, space), strict=True
    ):
        rows_N, rows_M = (t.movedim(at, 0).reshape(t.shape[at], -1) for t in (mine, theirs))
        part = rows_N @ rows_M.T
        benefit = part if benefit is None else benefit + part
    assert benefit is not None
    index_M = maximise(benefit).index_M
    assert index_M is not None
    return index_M
