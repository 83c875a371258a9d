"""Repair without data: what an average of imperfectly matched units loses, from weights alone.

Where aligned rows differ, their mean is shorter than they are (DESIGN section 3, Repair). Layers
without a norm get their rows' length back. BatchNorm gets the variance that its input will have,
in closed form: `w_a^2 v_a + w_b^2 v_b + 2 w_a w_b rho sqrt(v_a v_b)`, rho = cosine of the matched
incoming rows (REPAIR, Jordan et al. 2023, with the correlation of white inputs).

Tensors are fused one at a time, and so they are repaired: a running variance reads the tensor that
feeds its norm again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..align.alignment import Alignment
from ..align.apply import transport
from ..align.models import Model
from ..graph.axes import Axis, axis_units
from ..graph.model import GraphTensor, LayerGraph, Op, OpKind, Role
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
        feeds: Running variance to (weight, axis) of the layer that feeds its norm.
        means: Running mean to that weight: a model counts as much in one as in the other.
        warnings: What could not be repaired, and why.
    """

    rows: Mapping[str, int] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    feeds: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    means: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def plan_repair(graph: LayerGraph) -> Repair:
    """Find what can be repaired: an operation that is not known is left alone and named.

    Rows of layers that no norm follows, where the activation is positively homogeneous (the space
    may be scaled); one factor for output layers; the variance of each BatchNorm whose feeding
    layer is known.
    """
    rows: dict[str, int] = {}
    outputs: set[str] = set()
    feeds: dict[str, tuple[str, int]] = {}
    means: dict[str, str] = {}
    warnings: list[str] = []
    left: list[str] = []
    normalised = {d.source for d in graph.derived}
    for at, op in enumerate(graph.ops):
        after = graph.ops[at + 1] if at + 1 < len(graph.ops) else None
        normed = after is not None and after.kind is OpKind.NORM and after.reads == (op.writes,)
        if op.kind is OpKind.NORM and op.detail == "batch" and "running_var" in op.tensors:
            before = graph.ops[at - 1] if at else None
            feed = _matrix(graph, before) if before and op.reads == (before.writes,) else None
            if feed is None:
                warnings.append(
                    f"{op.name}: the layer that feeds this BatchNorm is not known, its running "
                    "variance is the weighted mean"
                )
            else:
                feeds[op.tensors["running_var"]] = feed
                if "running_mean" in op.tensors:
                    means[op.tensors["running_mean"]] = feed[0]
        elif op.kind in (OpKind.LINEAR, OpKind.CONV) and not normed:
            found = _matrix(graph, op)
            if found is None or graph.tensors[found[0]].aliases or found[0] in normalised:
                continue
            if _is_output(graph, op.writes):
                outputs.add(found[0])
            elif _scales(graph, op.writes):
                rows[found[0]] = found[1]
            else:
                left.append(op.name)
    if left:
        names = ", ".join(left[:3]) + ", ..." * (len(left) > 3)
        warnings.append(
            f"the row norms of {len(left)} layers ({names}) are not restored: the activation after "
            "them is not known to be homogeneous"
        )
    known = set(feeds)
    for name in graph.tensors:
        if (
            name.endswith("running_var")
            and name not in known
            and not any(name in op.tensors.values() for op in graph.ops)
        ):
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
            scale = scale.view([-1 if d == self.dim else 1 for d in range(fused.dim())])
        return fused * scale.to(fused.dtype)


def length_scale(mean: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Factors that bring lengths `own` to `mean`; 1 for what is zero or differs by rounding."""
    scale = torch.where(own > 0, mean / own, 1.0)
    return torch.where((scale - 1).abs() > _NOTHING, scale, 1.0)


def row_norms(repair: Repair | None, name: str) -> RowNorms | None:
    """What to count while `name` is averaged; None if it is not a weight to restore."""
    if repair is None or (name not in repair.rows and name not in repair.outputs):
        return None
    return RowNorms(repair.rows.get(name))


def fused_variance(
    mean_M: torch.Tensor,
    variance: str,
    feed: tuple[str, int],
    models: Sequence[tuple[Model, Alignment | None, float]],
) -> torch.Tensor:
    """Running variance of the fused units, by the lengths and angles of what feeds them.

    `|| sum_k w_k sum_n produce_k[n, m] sqrt(v_kn) u_kn ||^2`, u = unit-norm incoming row, its
    inputs mapped. Units without incoming weights keep the mean.

    Args:
        mean_M: The produce-weighted mean of the variances.
        variance: Name of the running variance.
        feed: Weight and axis of the layer before the norm.
        models: Model, its maps (None: the anchor, in place) and its share; the anchor first.
    """
    weight, dim = feed
    if any(_keeps(alignment) for _, alignment, _ in models):
        return mean_M  # anchor units among the source's: there is no row for them to be read from
    total: torch.Tensor | None = None
    for model, alignment, share in models:
        node = model.graph.tensors[weight]
        rows = model.read(weight).double()
        # Reordered inputs leave the length of a row: all axes of a hard alignment move at once,
        # as they must where one axis is the index of another (grouped convolutions).
        soft = alignment if alignment is not None and not alignment.hard else None
        if soft is not None:
            inputs = [d for d in range(rows.dim()) if d != dim]
            rows = transport(rows, weight, model.graph, _on(soft, node, inputs))
        deviation = model.read(variance).double().clamp(min=0).sqrt()
        norms = _norms(rows, dim)
        gain = torch.where(norms > 0, deviation / norms, 0.0)
        rows = rows * gain.view([-1 if d == dim else 1 for d in range(rows.dim())])
        if alignment is not None:
            whole = alignment if soft is None else _on(soft, node, [dim])
            rows = transport(rows, weight, model.graph, whole)
        total = rows * share if total is None else total.add_(rows, alpha=share)
    assert total is not None
    found = _norms(total, dim).square().to(mean_M)
    same = (found - mean_M).abs() <= _NOTHING * mean_M
    return torch.where(same | (found == 0), mean_M, found)


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


def _matrix(graph: LayerGraph, op: Op | None) -> tuple[str, int] | None:
    """The weight of a layer and the axis that makes its units, a row for each.

    None for a grouped transposed convolution: its groups are on the axis that it reads.
    """
    if op is None or op.kind not in (OpKind.LINEAR, OpKind.CONV):
        return None
    for name in op.tensors.values():
        node = graph.tensors[name]
        if len(node.axes) > 1:
            for dim, axis in enumerate(node.axes):
                if Role.PRODUCE in axis.roles:
                    return (name, dim) if axis.expr == op.writes else None
    return None


def _is_output(graph: LayerGraph, axis: Axis | None) -> bool:
    units = list(axis_units(axis)) if axis is not None else []
    return bool(units) and all(graph.spaces[u].pinned == "output" for u in units)


def _scales(graph: LayerGraph, axis: Axis | None) -> bool:
    units = list(axis_units(axis)) if axis is not None else []
    return bool(units) and all("scale" in graph.spaces[u].exact for u in units)
