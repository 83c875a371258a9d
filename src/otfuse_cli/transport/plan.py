"""Transport plans: how much mass goes from each source unit to each anchor unit.

N source units, M anchor units, E stored entries; rows = source, columns = anchor. A plan is held
as an index (hard), as entries (sparse) or as a matrix (dense), whichever is smallest; on the CPU,
in float64. No names, no files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_BLOCK = 1 << 22


@dataclass(frozen=True, eq=False)
class Plan:
    """A transport plan T of shape (N, M), total mass 1.

    Make one with `from_index`, `identity`, `from_entries`, `from_dense` or `blend`; exactly one of
    the three representations is set.

    Attributes:
        shape: (N, M).
        index_M: Hard plan: for each anchor unit its source unit, int64; mass 1/N each.
    """

    shape: tuple[int, int]
    index_M: Tensor | None = None
    _entries: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)
    _dense: Tensor | None = field(default=None, repr=False)

    @staticmethod
    def from_index(index_M: Tensor) -> Plan:
        """Hard plan from a permutation: `index_M[m]` is the source unit that lands on anchor m.

        Raises:
            ValueError: Not a permutation of 0..M-1, M >= 1.
        """
        index_M = torch.as_tensor(index_M).detach().to("cpu", torch.int64).clone()
        m = index_M.numel()
        if index_M.ndim != 1 or not m or not torch.equal(index_M.sort().values, torch.arange(m)):
            raise ValueError(f"not a permutation: shape {tuple(index_M.shape)}")
        return Plan((m, m), index_M=index_M)

    @staticmethod
    def identity(n: int) -> Plan:
        """The plan that leaves every unit where it is."""
        return Plan.from_index(torch.arange(n))

    @staticmethod
    def from_entries(rows: Tensor, cols: Tensor, values: Tensor, shape: tuple[int, int]) -> Plan:
        """Sparse plan; entries at one place are added, zeros dropped, order by row then column.

        Raises:
            ValueError: Ragged entries, an index out of range, a negative or non-finite mass.
        """
        rows, cols = rows.to("cpu", torch.int64), cols.to("cpu", torch.int64)
        values = values.detach().to("cpu", torch.float64)
        if not rows.shape == cols.shape == values.shape or rows.ndim != 1:
            raise ValueError("entries of a plan must be three vectors of equal length")
        if rows.numel():
            inside = min(rows.min(), cols.min()) >= 0 and rows.max() < shape[0]
            if not inside or cols.max() >= shape[1]:
                raise ValueError(f"plan entries outside the shape {shape}")
        _check_mass(values)
        kept = values > 0
        code, slot = torch.unique(rows[kept] * shape[1] + cols[kept], return_inverse=True)
        summed = torch.zeros(code.shape, dtype=torch.float64).index_add_(0, slot, values[kept])
        return Plan(shape, _entries=(code // shape[1], code % shape[1], summed))

    @staticmethod
    def from_dense(plan_NM: Tensor) -> Plan:
        """Plan from a matrix; kept sparse when at most 4 (N + M) entries are positive.

        Raises:
            ValueError: Not a matrix, or a negative or non-finite mass.
        """
        if plan_NM.ndim != 2:
            raise ValueError(f"a plan is a matrix, got shape {tuple(plan_NM.shape)}")
        plan_NM = plan_NM.detach().to("cpu", torch.float64)
        _check_mass(plan_NM)
        n, m = plan_NM.shape
        if int(torch.count_nonzero(plan_NM)) <= 4 * (n + m):
            rows, cols = plan_NM.nonzero(as_tuple=True)
            return Plan.from_entries(rows, cols, plan_NM[rows, cols], (n, m))
        return Plan((n, m), _dense=plan_NM.clone())

    @staticmethod
    def blend(first: Plan, second: Plan, beta: float) -> Plan:
        """`beta * first + (1 - beta) * second`; equal plans and beta 0 or 1 come back unchanged.

        Raises:
            ValueError: Different shapes, or beta outside [0, 1].
        """
        if first.shape != second.shape:
            raise ValueError(f"plans differ in shape: {first.shape}, {second.shape}")
        if not 0 <= beta <= 1:
            raise ValueError(f"beta must lie in [0, 1], got {beta}")
        if beta == 0:
            return second
        if beta == 1 or first._same_index(second):
            return first
        if first._dense is not None or second._dense is not None:
            return Plan.from_dense(beta * first.dense() + (1 - beta) * second.dense())
        a, b = first.entries(), second.entries()
        values = torch.cat([beta * a[2], (1 - beta) * b[2]])
        rows, cols = torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])
        return Plan.from_entries(rows, cols, values, first.shape)

    @property
    def hard(self) -> bool:
        """Whether the plan is a permutation."""
        return self.index_M is not None

    @property
    def sparse(self) -> bool:
        """Whether `entries` are stored as such: hard and sparse plans, not dense ones."""
        return self._dense is None

    @property
    def mass_N(self) -> Tensor:
        """The plan's own row sums, float64."""
        return self._sums(0)

    @property
    def mass_M(self) -> Tensor:
        """The plan's own column sums, float64."""
        return self._sums(1)

    @property
    def total(self) -> float:
        """Sum of the plan: 1 but for rounding."""
        return float(self.mass_N.sum())

    @property
    def moved_fraction(self) -> float | None:
        """Share of the mass off the diagonal (hard: of units that move); None for N != M."""
        if self.shape[0] != self.shape[1]:
            return None
        if self.index_M is not None:
            moved = self.index_M != torch.arange(self.shape[1])
            return float(moved.double().mean())
        total = self.total
        return min(1.0, max(0.0, 1 - self.trace() / total)) if total else None

    def trace(self) -> float:
        """Mass that stays: the sum of T[i, i] over i < min(N, M)."""
        if self._dense is not None:
            return float(self._dense.diagonal().sum())
        rows, cols, values = self.entries()
        return float(values[rows == cols].sum())

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positive entries: rows_E, cols_E (int64), values_E (float64), by row, then column."""
        if self.index_M is not None:
            cols = torch.argsort(self.index_M)
            m = cols.numel()
            return torch.arange(m), cols, torch.full((m,), 1.0 / m, dtype=torch.float64)
        if self._entries is not None:
            return self._entries
        assert self._dense is not None
        rows, cols = self._dense.nonzero(as_tuple=True)
        return rows, cols, self._dense[rows, cols]

    def dense(self) -> Tensor:
        """The plan as a new matrix plan_NM, float64."""
        if self._dense is not None:
            return self._dense.clone()
        plan_NM = torch.zeros(self.shape, dtype=torch.float64)
        rows, cols, values = self.entries()
        plan_NM[rows, cols] = values
        return plan_NM

    def binned(self, most: int) -> Tensor:
        """The plan as at most `most` x `most` sums of mass, for the eye; float64.

        Source unit n falls into row `n * rows // N`, an anchor unit into a column likewise.
        """
        n, m = self.shape
        rows, cols = min(n, most), min(m, most)
        source, anchor, mass = self.entries()
        flat = torch.zeros(rows * cols, dtype=torch.float64)
        flat.index_add_(0, (source * rows // n) * cols + anchor * cols // m, mass)
        return flat.view(rows, cols)

    def cost(self, cost_NM: Tensor) -> float:
        """`<T, cost>` in float64; the cost may be of any floating dtype, on any device.

        Raises:
            ValueError: The cost has another shape.
        """
        if tuple(cost_NM.shape) != self.shape:
            raise ValueError(f"cost of shape {tuple(cost_NM.shape)} for a plan of {self.shape}")
        if self._dense is None:
            rows, cols, values = self.entries()
            picked = cost_NM[rows.to(cost_NM.device), cols.to(cost_NM.device)]
            return float(picked.to("cpu", torch.float64) @ values)
        total, step = 0.0, max(1, _BLOCK // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            block = cost_NM[start : start + step].to("cpu", torch.float64)
            total += float((block * self._dense[start : start + step]).sum())
        return total

    def _same_index(self, other: Plan) -> bool:
        return (
            self.index_M is not None
            and other.index_M is not None
            and torch.equal(self.index_M, other.index_M)
        )

    def _sums(self, axis: int) -> Tensor:
        if self._dense is not None:
            return self._dense.sum(1 - axis)
        entries = self.entries()
        sums = torch.zeros(self.shape[axis], dtype=torch.float64)
        return sums.index_add_(0, entries[axis], entries[2])


def _check_mass(values: Tensor) -> None:
    if values.numel() and not (values.min() >= 0 and torch.isfinite(values.max())):
        raise ValueError("a plan must be finite and not negative")
