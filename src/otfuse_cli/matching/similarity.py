"""What every tensor of a space says about its units, in and out: the objective of matching.

The objective of an alignment is the sum over tensors of `<anchor, aligned source>`, Git Re-Basin's
(Ainsworth et al. 2023): with hard maps `|anchor - aligned|^2` differs from it by constants. It is
linear in the plan of one space while the others stand, so that each step is a transport problem
whose benefit `S_NM` is a sum of products of unfoldings, one for each (tensor, axis) of the space.

With different widths nothing changes. For fixed marginals the squares in
`sum T_nm S_ij (alpha A_ni - B_mj)^2`, alpha = source over anchor width of the axis that is read,
are constants: the same objective is then co-optimal transport (Redko et al. 2020) between the
weights, outgoing ones scaled as the aligned model will have them.

Legend: N source units, M anchor units, H units of the index of a family, K what is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch

from ..graph.axes import axis_units
from ..graph.model import GraphTensor, LayerGraph, Role
from ..transport.maps import Coupling, Map
from .alignment import Alignment
from .apply import transport
from .features import moved_sizes
from .kept_benefits import KeptBenefits, Meeting, MovedUnits, Sides, neighbours
from .models import Model
from .unfold import unfold

# Models that fit in this are kept while they are compared, and so are their benefits; larger ones
# are read at each use.
_KEEP_BYTES = 1 << 29


class Similarity:
    """A source beside the anchor: objective, and benefit of each space given the other maps."""

    def __init__(self, source: Model, anchor: Model, *, paper_scale: bool = False) -> None:
        """Compare two models; `paper_scale` where maps consume by `T diag(1/b)` too."""
        self.source, self.anchor, self.paper_scale = source, anchor, paper_scale
        graph = anchor.graph
        self.tensors = tuple(t.name for t in graph.tensors.values() if _compared(t, graph, source))
        self._models = (source, anchor)
        numbers = sum(_numel(m.graph.tensors[n]) for m in self._models for n in self.tensors)
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = (
            {} if 4 * numbers <= _KEEP_BYTES else None
        )
        self._seen: dict[tuple[str, int, str], list[torch.Tensor]] = {}
        self.flop = 0.0

    @property
    def kept_bytes(self) -> int:
        """Memory for what is kept between steps; 0 where each use reads tensors."""
        if self._kept is None:
            return 0
        numbers = sum(_numel(m.graph.tensors[n]) for m in self._models for n in self.tensors)
        for space in self.anchor.graph.free():
            places = self.places[space.id]
            numbers += sum(_numel(self.anchor.graph.tensors[n]) for n, dim in places if dim)
        return 4 * numbers + (0 if self._benefits is None else self._benefit_bytes)

    @cached_property
    def _benefit_bytes(self) -> int:
        """Of both sides of all spaces."""
        total = 0
        for space in self.anchor.graph.free():
            sizes = self.source.graph.spaces[space.id].size, space.size
            many = 1 if space.per is None else self.anchor.graph.spaces[space.per].size
            total += 2 * 4 * many * sizes[0] * sizes[1]
        return total

    @cached_property
    def _benefits(self) -> KeptBenefits | None:
        """Those of the last step, where they are small beside the tensors that are kept."""
        if self._kept is None or self._benefit_bytes > _KEEP_BYTES:
            return None
        return KeptBenefits(self.anchor.graph, self.places, self._sides, self._update)

    def near(self, space: str) -> frozenset[str]:
        """Spaces whose maps the benefit of this one depends on."""
        return neighbours(self.anchor.graph, self.places[space], space)

    @cached_property
    def places(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Space to every (tensor, dimension) that is compared."""
        chosen = set(self.tensors)
        return {
            space: tuple((n, d) for n, d in where if n in chosen)
            for space, where in self.anchor.graph.members.items()
        }

    @cached_property
    def bound(self) -> float:
        """What no hard alignment can exceed: the sum of `|anchor| |source|`."""
        return float(
            sum(
                mine.norm(dtype=torch.float64) * theirs.norm(dtype=torch.float64)
                for mine, theirs in map(self.read, self.tensors)
            )
        )

    def twice(self, space: str) -> bool:
        """Whether a tensor has the space on two axes: the objective is not linear in its plan."""
        names = [n for n, _ in self.places[space]]
        return len(set(names)) < len(names)

    def degree(self, spaces: Iterable[str]) -> int:
        """Degree of the objective along a line on which all of `spaces` move."""
        moving = set(spaces)
        axes = (
            sum(
                not moving.isdisjoint(axis_units(a.expr)) for a in self.anchor.graph.tensors[n].axes
            )
            for n in self.tensors
        )
        return max(1, *axes) if self.tensors else 1

    def read(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The source's and the anchor's tensor, in one dtype."""
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        mine, theirs = self.source.read(name), self.anchor.read(name)
        wide = torch.promote_types(mine.dtype, theirs.dtype)
        pair = mine.to(wide), theirs.to(wide)
        if self._kept is not None:
            self._kept[name] = pair
        return pair

    def objective(self, alignment: Alignment, names: Iterable[str] | None = None) -> float:
        """`sum <anchor, aligned source>` over all compared tensors, or over `names`."""
        total: torch.Tensor | float = 0.0
        for name in self.tensors if names is None else dict.fromkeys(names):
            mine, theirs = self.read(name)
            moved = transport(mine, name, self.source.graph, alignment, anchor=theirs)
            # Rows in their own dtype: converting as they are summed takes many times as long.
            rows = (moved * theirs).flatten(min(1, moved.dim() - 1)).sum(-1)
            total = total + rows.double().sum()
        return float(total)  # once: a device is waited for here

    def benefit(self, space: str, alignment: Alignment) -> torch.Tensor:
        """How much the objective gains by unit n for anchor unit m, all other maps as they are.

        The derivative by M times the plan: for hard maps, what an assignment maximises. A tensor
        that has the space on two axes counts once for each, the other axis with its present map.

        Returns:
            benefit_NM, for a family benefit_HNM; float32, float64 if the tensors are.
        """
        if self._benefits is None or alignment.overrides or alignment.scales:
            sides = self._sides(space, alignment)
        else:
            sides = self._benefits.sides(space, alignment).copied()
        return _joined(sides.made, sides.read, alignment.maps.get(space), self.paper_scale)

    def _sides(self, space: str, alignment: Alignment) -> Sides:
        sides = Sides()
        for name, dim in self.places[space]:
            mine, theirs = self.read(name)
            # What is no view of the anchor's tensor is kept like it: it never changes.
            others = self._seen.get((name, dim, space))
            if others is None:
                others = self._unfolded(theirs, (name, dim), space)
            if self._kept is not None and dim:
                self._seen[name, dim, space] = others
            self._add_products(sides, (name, dim), space, (mine, theirs), others, alignment)
        return sides

    def _unfolded(
        self, theirs: torch.Tensor, place: tuple[str, int], space: str
    ) -> list[torch.Tensor]:
        """The anchor's tensor, seen from a space on one of its axes."""
        (name, dim), graph = place, self.anchor.graph
        index, sizes = graph.spaces[space].per, graph.sizes
        exprs = graph.tensors[name].exprs
        return unfold(theirs, exprs, dim, space, sizes, index=index)

    def _update(
        self, sides: Sides, places: tuple[Meeting, ...], space: str, change: MovedUnits
    ) -> None:
        """Add what a change of a neighbour changes: along its units that have changed, only."""
        for name, dim, at in places:
            mine, theirs = self.read(name)
            old, new, units = (
                i.to(mine.device) for i in (change.before, change.after, change.units)
            )
            difference = mine.index_select(at, new).sub_(mine.index_select(at, old))
            there = theirs.index_select(at, units)
            others = self._unfolded(there, (name, dim), space)
            pair = difference, there
            self._add_products(sides, (name, dim), space, pair, others, change.alignment)

    def _add_products(
        self,
        sides: Sides,
        place: tuple[str, int],
        space: str,
        pair: tuple[torch.Tensor, torch.Tensor],
        others: list[torch.Tensor],
        alignment: Alignment,
    ) -> None:
        """Add the products of one tensor's unfoldings along one axis; `others` are the anchor's."""
        (name, dim), (mine, theirs), graph = place, pair, self.source.graph
        axes = self.anchor.graph.tensors[name].axes
        exprs = [axis.expr for axis in axes]
        reads = Role.CONSUME in axes[dim].roles and Role.PRODUCE not in axes[dim].roles
        index = graph.spaces[space].per
        moved = transport(mine, name, graph, alignment, anchor=theirs, without=space, only=dim)
        sizes = moved_sizes(graph, alignment, without=space)
        ours = unfold(moved, exprs, dim, space, sizes, index=index)
        for one, other in zip(ours, others, strict=True):
            self.flop += 2.0 * one.numel() * other.shape[-2]
            sides.add(one @ other.mT, reads=reads)

    def pass_flop(self, spaces: Iterable[str]) -> float:
        """Estimate for one pass over `spaces`: products of unfoldings and assignments."""
        total = 0.0
        for space in spaces:
            n, m = self.source.graph.spaces[space].size, self.anchor.graph.spaces[space].size
            for name, _ in self.places[space]:
                total += 2.0 * _numel(self.anchor.graph.tensors[name]) * n
            total += float(max(n, m)) ** 3
        return total

    def dense_flop(self, spaces: Iterable[str]) -> float:
        """Estimate for moving every tensor once by full matrices on all axes but one, each axis."""
        moving = set(spaces)
        total = 0.0
        for name in self.tensors:
            node = self.anchor.graph.tensors[name]
            widths = [
                self.anchor.graph.spaces[u].size
                for a in node.axes
                for u in axis_units(a.expr)
                if u in moving
            ]
            total += 2.0 * _numel(node) * sum(widths) * max(0, len(widths) - 1)
        return total


def _joined(
    made: torch.Tensor | None, read: torch.Tensor | None, map: Map | None, paper_scale: bool
) -> torch.Tensor:
    """Benefits of the axes that make units and of those that read them, by the map's shares."""
    if isinstance(map, Coupling):
        mean_M = map.plan.mass_M * map.sizes[1]
        share_M = torch.where(mean_M > 0, 1.0 / mean_M, 0.0)
        if made is not None:
            made = made * share_M.to(made)
        if read is not None and paper_scale:
            read = read * share_M.to(read)
        elif read is not None:
            mean_N = map.plan.mass_N[:, None] * map.sizes[1]
            read = read * torch.where(mean_N > 0, 1.0 / mean_N, 0.0).to(read)
    if made is None or read is None:
        benefit = made if read is None else read
        if benefit is None:
            raise ValueError("no tensor is compared along this space")
        return benefit
    return made.add_(read)


def _compared(tensor: GraphTensor, graph: LayerGraph, source: Model) -> bool:
    """Weights, biases, gains that some free space moves; running statistics are none of them."""
    if tensor.name.rpartition(".")[2] in ("running_mean", "running_var"):
        return False
    if any({Role.VARIANCE, Role.DERIVED} & axis.roles for axis in tensor.axes):
        return False
    if not source.checkpoint.infos[tensor.name].dtype.is_floating_point:
        return False
    units = (u for axis in tensor.axes for u in axis_units(axis.expr))
    return any(graph.spaces[u].pinned is None for u in units)


def _numel(tensor: GraphTensor) -> int:
    return int(torch.Size(tensor.shape).numel())
