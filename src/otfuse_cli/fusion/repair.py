"""Repair without data: what an average of imperfectly matched units loses, from weights alone.

Where aligned rows differ, their mean is shorter than they are (docs/methods/average.md, Repair).
Layers without a norm get their rows' length back. BatchNorm gets the variance that its input will
have, in closed form: `w_a^2 v_a + w_b^2 v_b + 2 w_a w_b rho sqrt(v_a v_b)`, rho = cosine of the
matched incoming rows (REPAIR, Jordan et al. 2023, with the correlation of white inputs).

Tensors are fused one at a time, and so they are repaired: a running variance reads the tensor that
feeds its norm again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from ..graph.analysis.batch_norms import keeps_statistics
from ..graph.analysis.norm_sources import Feed, is_normed, norm_feeds, weight_rows
from ..graph.axes import Axis, axis_size, axis_units
from ..graph.model import GraphTensor, LayerGraph, OpKind
from ..matching.alignment import Alignment
from ..matching.apply import transport
from ..matching.models import Model
from ..transport.maps import Map

# A correction smaller than this is rounding of float32 sums; values are left as they are.
_NOTHING = 1e-6
_IN_PLACE: Mapping[str, Map] = {}


@dataclass(frozen=True)
class Repair:
    """What is repaired in which tensor, from the anchor's graph.

    Attributes:
        rows: Weight to the axis whose rows get their length back.
        outputs: Weights of output layers, which get one factor.
        feeds: Running variance to what feeds its norm, part by part.
        means: Running mean to a weight of those: a model counts as much in one as in the other.
        warnings: What could not be repaired, and why.
    """

    rows: Mapping[str, int] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    feeds: Mapping[str, tuple[Feed, ...]] = field(default_factory=dict)
    means: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def plan_repair(graph: LayerGraph) -> Repair:
    """Find what can be repaired: an operation that is not known is left alone and named.

    Rows of layers that no norm follows, where the activation is positively homogeneous (the space
    may be scaled); one factor for output layers; the variance of each BatchNorm whose feeding
    layers are known: it may stand behind a layer, behind its activation, or on a sum of layers.
    """
    rows: dict[str, int] = {}
    outputs: set[str] = set()
    feeds: dict[str, tuple[Feed, ...]] = {}
    means: dict[str, str] = {}
    warnings: list[str] = []
    left: list[str] = []
    normalised = {d.source for d in graph.derived}
    for at, op in enumerate(graph.ops):
        if keeps_statistics(op):
            norm_feeding = norm_feeds(graph, at)
            before = list(chain.from_iterable(feed.rows for feed in norm_feeding))
            if not all(feed.rows for feed in norm_feeding):
                part = " in part" if before else ""
                warnings.append(
                    f"{op.name}: the layer that feeds this BatchNorm is not known, its running "
                    f"variance is the weighted mean{part}"
                )
            if before:
                feeds[op.tensors["running_var"]] = norm_feeding
                means[op.tensors.get("running_mean", "")] = before[0][0]
        elif op.kind in (OpKind.LINEAR, OpKind.CONV) and not is_normed(graph, at):
            weight = weight_rows(graph, op)
            if weight is None or graph.tensors[weight[0]].aliases or weight[0] in normalised:
                continue
            if _is_output(graph, op.writes):
                outputs.add(weight[0])
            elif _scales(graph, op.writes):
                rows[weight[0]] = weight[1]
            else:
                left.append(op.name)
    if left:
        names = ", ".join(left[:3]) + ", ..." * (len(left) > 3)
        warnings.append(
            f"the row norms of {len(left)} layers ({names}) are not restored: the activation after "
            "them is not known to be homogeneous"
        )
    seen = set(chain.from_iterable(op.tensors.values() for op in graph.ops))
    for name in graph.tensors:
        if name.endswith("running_var") and name not in seen:
            warnings.append(f"{name}: no operation is known for it, it is the weighted mean")
    return Repair(rows, frozenset(outputs), feeds, means, tuple(warnings))


class RowNorms:
    """Row norms of a weight over the models of an average, while it is being summed."""

    def __init__(self, dim: int | None) -> None:
        """Norms along `dim`; None for one norm of the whole tensor."""
        self.dim = dim
        self.mean: torch.Tensor | None = None

    def add(self, weight: float, tensor: torch.Tensor) -> None:
        """Count one model's aligned tensor."""
        term = _norms(tensor, self.dim) * weight
        self.mean = term if self.mean is None else self.mean + term

    def restore(self, fused: torch.Tensor) -> torch.Tensor:
        """Scale rows to the mean of the models' norms; equal rows keep their bits."""
        assert self.mean is not None
        scale = length_scale(self.mean, _norms(fused, self.dim))
        if bool((scale == 1).all()):
            return fused
        if self.dim is not None:
            scale = _along(scale, self.dim, fused.dim())
        return fused * scale.to(fused.dtype)


def _along(values: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """One number for every position of axis `dim`, to multiply a tensor of `rank` axes with."""
    shape = [1] * rank
    shape[dim] = -1
    return values.view(shape)


def length_scale(mean: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Factors that bring `lengths` to `mean`; 1 for what is zero or differs by rounding."""
    scale = torch.where(lengths > 0, mean / lengths, 1.0)
    return torch.where((scale - 1).abs() > _NOTHING, scale, 1.0)


def row_norms(repair: Repair | None, name: str) -> RowNorms | None:
    """What to count while `name` is averaged; None if it is not a weight to restore."""
    if repair is None or (name not in repair.rows and name not in repair.outputs):
        return None
    return RowNorms(repair.rows.get(name))


# Who counts how much in the average of a tensor: model, maps (None: the anchor), share.
Models = Sequence[tuple[Model, Alignment | None, float]]


def fused_variance(
    mean_M: torch.Tensor,
    variance: str,
    feeds: Sequence[Feed],
    models: Callable[[str], Models],
    *,
    restored: Collection[str] = (),
) -> torch.Tensor:
    """Running variance of the fused units, by the lengths and angles of what feeds them.

    `|| sum_k w_k sum_n produce_k[n, m] sqrt(v_kn) u_kn ||^2`, u = incoming row, its inputs mapped,
    of unit length over all layers that add up to the unit. Rows that get their length back count
    with the mean of their lengths instead of the length of their mean. Units without incoming
    weights, or whose layers are not known, keep the mean.

    Args:
        mean_M: The produce-weighted mean of the variances.
        variance: Name of the running variance.
        feeds: What feeds the norm; the parts of its axis in order.
        models: By the name of a weight before the norm; the anchor first.
        restored: Weights whose rows get their length back.
    """
    every: list[tuple[Model, Alignment | None, float]] = []
    for feed in feeds:
        for weight, _ in feed.rows:
            every.extend(models(weight))
    if any(_keeps(alignment) for _, alignment, _ in every):
        return mean_M  # anchor units among the source's: there is no row for them to be read from
    if len(feeds) == 1:
        return _part_variance(mean_M, variance, feeds, 0, models, restored)
    model, alignment, _ = every[0]  # the anchor, whose sizes the parts have
    sizes = {**model.graph.sizes, **_sizes(alignment)}
    parts = torch.split_with_sizes(mean_M, [axis_size(feed.axis, sizes) for feed in feeds])
    variances: list[torch.Tensor] = []
    for at, mean in enumerate(parts):
        variances.append(_part_variance(mean, variance, feeds, at, models, restored))
    return torch.cat(variances)


def _part_variance(
    mean_M: torch.Tensor,
    variance: str,
    feeds: Sequence[Feed],
    at: int,
    models: Callable[[str], Models],
    restored: Collection[str],
) -> torch.Tensor:
    """The same for the units of one part of the norm's axis."""
    if not feeds[at].rows:
        return mean_M
    gains: dict[int, torch.Tensor] = {}
    square_M: torch.Tensor | float = 0.0
    for weight, dim in feeds[at].rows:
        length = RowNorms(dim)
        total: torch.Tensor | None = None
        for model, alignment, share in models(weight):
            if model.index not in gains:
                gains[model.index] = _per_length(model, alignment, variance, feeds, at)
            rows = _reading(model, weight, dim, alignment)
            rows = rows * _along(gains[model.index], dim, rows.dim())
            rows = _made(model, weight, dim, alignment, rows)
            length.add(share, rows)
            total = rows * share if total is None else total.add_(rows, alpha=share)
        assert total is not None
        assert length.mean is not None
        own_M = length.mean if weight in restored else _norms(total, dim)
        square_M = square_M + own_M.square()
    assert isinstance(square_M, torch.Tensor)
    new = square_M.to(mean_M)
    same = (new - mean_M).abs() <= _NOTHING * mean_M
    return torch.where(same | (new == 0), mean_M, new)


def _per_length(
    model: Model, alignment: Alignment | None, variance: str, feeds: Sequence[Feed], at: int
) -> torch.Tensor:
    """Deviation of a model's units per length of the rows that make them."""
    sizes = [axis_size(f.axis, model.graph.sizes) for f in feeds]
    part = torch.split_with_sizes(model.read(variance), sizes)[at]
    deviation = part.double().clamp(min=0).sqrt()
    squares: list[torch.Tensor] = []
    for weight, dim in feeds[at].rows:
        squares.append(_norms(_reading(model, weight, dim, alignment), dim).square())
    norms = torch.stack(squares).sum(0).sqrt()
    return torch.where(norms > 0, deviation / norms, 0.0)


def _reading(model: Model, weight: str, dim: int, alignment: Alignment | None) -> torch.Tensor:
    """A model's rows, float64, as they read the anchor's units.

    Reordered inputs leave the length of a row: all axes of a hard alignment move at once later,
    as they must where one axis is the index of another (grouped convolutions).
    """
    rows = model.read(weight).double()
    if alignment is None or alignment.hard:
        return rows
    inputs = [d for d in range(rows.dim()) if d != dim]
    on_inputs = _on(alignment, model.graph.tensors[weight], inputs)
    return transport(rows, weight, model.graph, on_inputs)


def _made(
    model: Model, weight: str, dim: int, alignment: Alignment | None, rows: torch.Tensor
) -> torch.Tensor:
    """Rows from `_reading` as they make the anchor's units."""
    if alignment is None:
        return rows
    node = model.graph.tensors[weight]
    rest = alignment if alignment.hard else _on(alignment, node, [dim])
    return transport(rows, weight, model.graph, rest)


def _sizes(alignment: Alignment | None) -> Mapping[str, int]:
    """Sizes of spaces after their maps."""
    return {} if alignment is None else {s: m.sizes[1] for s, m in alignment.maps.items()}


def _keeps(alignment: Alignment | None) -> bool:
    return alignment is not None and any(m.kept is not None for m in alignment.maps.values())


def _on(alignment: Alignment, node: GraphTensor, dims: Sequence[int]) -> Alignment:
    """The alignment on some axes of one tensor only."""
    still = {(node.name, d): _IN_PLACE for d in range(len(node.axes)) if d not in dims}
    return replace(alignment, overrides={**alignment.overrides, **still})


def _norms(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    if dim is None:
        return tensor.double().square().sum().sqrt()
    rest = [d for d in range(tensor.dim()) if d != dim]
    if not rest:
        return tensor.abs().double()
    return tensor.double().square().sum(rest).sqrt()


def _is_output(graph: LayerGraph, axis: Axis | None) -> bool:
    units = list(axis_units(axis)) if axis is not None else []
    return bool(units) and all(graph.spaces[u].pinned == "output" for u in units)


def _scales(graph: LayerGraph, axis: Axis | None) -> bool:
    units = list(axis_units(axis)) if axis is not None else []
    return bool(units) and all("scale" in graph.spaces[u].exact for u in units)
