"""Maps: what a transport plan does to the tensors of the source.

N source units, M anchor units, E stored entries; rows = source, columns = anchor. A map carries
the axis of a tensor from N source units to M anchor units, two ways: `produce` for axes that make
the units, `consume` for axes that read them. No names, no files.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from .plan import Plan

Scale = Literal["preserve", "paper"]

# A unit with less than this share of the mean mass counts as having none: what is left of it is
# an entropic solver's rounding.
_EMPTY = 1e-9


class Map(Protocol):
    """What carries an axis from the units of a source to those of the anchor."""

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, M)."""

    @property
    def hard(self) -> bool:
        """Whether it only reorders units: exact in every dtype, produce = consume."""

    @property
    def kept(self) -> Tensor | None:
        """Anchor units that receive no mass and keep their own slices; None when all do."""

    def produce(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """`W' = einsum('nm,n...->m...', produce, W)` along `dim`.

        Args:
            tensor: Size N along `dim`.
            dim: The axis that makes the units.
            anchor: The anchor's tensor; where no mass arrives, its slice is kept.
        """

    def consume(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """`W' = einsum('...n,nm->...m', W, consume)` along `dim`; see `produce`."""


def plan_of(map: Map) -> Plan:
    """The plan that a map comes from.

    Raises:
        TypeError: It comes from none: a choice, a basis or a relaxed map moves no mass.
    """
    if not isinstance(map, Permutation | Coupling):
        raise TypeError(f"a {type(map).__name__} has no transport plan")
    return map.plan


def as_map(plan: Plan, *, scale: Scale = "preserve") -> Map:
    """The map of a plan: a `Permutation` if it is hard, otherwise a `Coupling`."""
    if plan.index_M is not None:
        return Permutation(plan.index_M)
    return Coupling(plan, scale=scale)


class Permutation:
    """A hard map: an index, never a product, so that every bit of every dtype is kept."""

    hard = True
    kept = None

    def __init__(self, index_M: Tensor) -> None:
        """Take `index_M[m]`, the source unit of anchor unit m; ValueError if not a permutation."""
        self.plan = Plan.from_index(index_M)
        assert self.plan.index_M is not None
        self.index_M = self.plan.index_M
        self.identity = torch.equal(self.index_M, torch.arange(len(self.index_M)))

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, N)."""
        return self.plan.shape

    def produce(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """Reorder `dim`, in the tensor's own dtype; the identity returns the tensor itself.

        Raises:
            ValueError: The axis has another size.
        """
        dim = _axis(tensor, dim, self.sizes[0])
        if self.identity:
            return tensor
        return _reordered(tensor, dim, self.index_M.to(tensor.device))

    def consume(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """The same as `produce`: columns of a permutation move with its rows."""
        return self.produce(tensor, dim, anchor)


class Coupling:
    """A soft or rectangular map, normalised by the plan's own row and column sums.

    `produce = T diag(1/b)`: an anchor unit is the mean of what arrives. `consume = diag(1/a) T`:
    a source unit's outgoing weights are divided among its images, so that duplicated or merged
    duplicates keep the function. `scale="paper"` consumes by `T diag(1/b)` too (the paper's
    Eq. 2), which multiplies every layer by M/N when sizes differ.

    Computed in float32 (float64 for float64 input) and returned so; half and 8-bit types are
    returned in float32. Where no mass arrives the anchor's slice is kept; a source unit without
    mass is dropped.
    """

    hard = False

    def __init__(self, plan: Plan, *, scale: Scale = "preserve") -> None:
        """Take a plan of any kind; ValueError for an unknown scale."""
        if scale not in ("preserve", "paper"):
            raise ValueError(f"scale is preserve or paper, not {scale!r}")
        self.plan = plan
        self.scale = scale
        self._filled_N, self._share_N = _inverse(plan.mass_N)
        self._filled_M, self._share_M = _inverse(plan.mass_M)

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, M)."""
        return self.plan.shape

    @property
    def kept(self) -> Tensor | None:
        """Anchor units without mass, as an index; None when there are none."""
        return None if bool(self._filled_M.all()) else (~self._filled_M).nonzero().flatten()

    def produce(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """Convex combinations of source slices along `dim`.

        Raises:
            ValueError: Wrong size along `dim`, not floating, or a unit without mass and no anchor
                tensor of the right shape to keep it from.
        """
        return self._apply(tensor, dim, anchor, by_anchor=True)

    def consume(self, tensor: Tensor, dim: int, anchor: Tensor | None = None) -> Tensor:
        """Source slices divided among their images along `dim`; see `produce`."""
        return self._apply(tensor, dim, anchor, by_anchor=self.scale == "paper")

    def _apply(self, tensor: Tensor, dim: int, anchor: Tensor | None, *, by_anchor: bool) -> Tensor:
        dim = _axis(tensor, dim, self.sizes[0])
        if not tensor.is_floating_point():
            raise ValueError(f"a soft map averages, which {tensor.dtype} tensors don't allow")
        tensor = tensor.to(torch.promote_types(torch.float32, _wide(tensor.dtype)))
        if self.plan.sparse:
            result = self._gather(tensor, dim, by_anchor)
        else:
            result = self._multiply(tensor, dim, by_anchor)
        if not bool(self._filled_M.all()):
            _keep(result, dim, anchor, (~self._filled_M).nonzero().flatten())
        return result

    def _multiply(self, tensor: Tensor, dim: int, by_anchor: bool) -> Tensor:
        share = self._share_M if by_anchor else self._share_N[:, None]
        weights_NM = (self.plan.dense() * share).to(tensor)
        result: Tensor = torch.tensordot(weights_NM, tensor, dims=([0], [dim]))
        return result.movedim(0, dim).contiguous()

    def _gather(self, tensor: Tensor, dim: int, by_anchor: bool) -> Tensor:
        """Add the k-th contribution of every anchor unit, k = 0, 1, ...

        No target occurs twice within one addition, so that the sum is deterministic on every
        device, and no temporary is larger than the result.
        """
        rows_E, cols_E, values_E = self.plan.entries()
        share_E = self._share_M[cols_E] if by_anchor else self._share_N[rows_E]
        weights_E = values_E * share_E
        order = torch.argsort(cols_E, stable=True)
        counts_M = torch.bincount(cols_E, minlength=self.sizes[1])
        first_M = counts_M.cumsum(0) - counts_M
        shape = list(tensor.shape)
        shape[dim] = self.sizes[1]
        result = tensor.new_zeros(shape)
        spread = [-1 if axis == dim else 1 for axis in range(tensor.ndim)]
        for k in range(int(counts_M.max())):
            targets = (counts_M > k).nonzero().flatten()
            picked = order[first_M[targets] + k]
            part = tensor.index_select(dim, rows_E[picked].to(tensor.device))
            part.mul_(weights_E[picked].to(tensor).view(spread))
            result.index_add_(dim, targets.to(tensor.device), part)
        return result


def _axis(tensor: Tensor, dim: int, size: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] != size:
        raise ValueError(f"a map of {size} source units on axis {dim} of {tuple(tensor.shape)}")
    return dim % tensor.ndim


def _wide(dtype: torch.dtype) -> torch.dtype:
    """8-bit floats take part in no promotion."""
    return torch.float32 if dtype.itemsize == 1 else dtype


def _inverse(mass: Tensor) -> tuple[Tensor, Tensor]:
    """Which units have mass, and 1 / mass there, 0 elsewhere."""
    filled = mass > _EMPTY * mass.mean()
    return filled, torch.where(filled, 1.0 / mass, 0.0)


def _reordered(tensor: Tensor, dim: int, index_M: Tensor) -> Tensor:
    """`index_select`, of any dtype, with torch's slow cases taken out: the same bits."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        # Gathering is not implemented for every 8-bit float on every device; bytes are bytes.
        return tensor.view(torch.uint8).index_select(dim, index_M).view(tensor.dtype)
    if tensor.element_size() == 2 and dim and tensor.device.type == "cpu" and tensor.numel():
        # torch moves the columns of half precision one number at a time; NumPy five times as fast.
        bits = tensor.detach().contiguous().view(torch.int16).numpy()
        return torch.from_numpy(np.take(bits, index_M.numpy(), axis=dim)).view(tensor.dtype)
    return tensor.index_select(dim, index_M)


def _keep(result: Tensor, dim: int, anchor: Tensor | None, empty: Tensor) -> None:
    if anchor is None or anchor.shape != result.shape:
        shape = None if anchor is None else tuple(anchor.shape)
        raise ValueError(
            f"{len(empty)} anchor units receive no mass: an anchor tensor of shape "
            f"{tuple(result.shape)} is needed to keep them, got {shape}"
        )
    empty = empty.to(result.device)
    result.index_copy_(dim, empty, anchor.index_select(dim, empty.to(anchor.device)).to(result))
