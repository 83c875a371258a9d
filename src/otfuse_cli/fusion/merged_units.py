"""Chosen units that take in what nearly parallel units do, instead of these being dropped.

A chosen unit is a unit of one parent. Behind a ReLU nothing says that it has to be: what the ReLU
is given may be a combination of what all parents' units are given there. It starts as the chosen
unit and moves down the miss of what layers read, every other unit rebuilt by least squares
(docs/methods/joint.md, Merging).

Legend: U units of all parents, M chosen, n rows, d outputs of the layers that read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..matching.activations import Activations
from ..transport.basis import Basis
from .pivoted_cholesky import combinations

# Rows that are looked at, and steps: on the ResNet as good as 10,000 rows (docs/methods/joint.md).
_ROWS, _STEPS = 4_000, 12
# Where less than this share of what is read is missed there is nothing to be had.
_LITTLE = 2e-3
# Relative to the mean power of what ReLUs are given, and of what they give.
_PULL, _RIDGE = 1e-2, 1e-3
# The first step, how it grows after one that descends, and where it is given up.
_STEP, _GROW, _LEAST = 0.5, 1.2, 1e-2


@dataclass(frozen=True)
class Merged:
    """What chosen units become.

    Attributes:
        made_UM: Each as a combination of what all units' ReLUs are given.
        read_UM: Each unit's value as a combination of theirs.
    """

    made_UM: Tensor
    read_UM: Tensor

    def bases(self, counts: Sequence[int]) -> list[Basis]:
        """What each parent has of them."""
        made = torch.split_with_sizes(self.made_UM, list(counts))
        read = torch.split_with_sizes(self.read_UM, list(counts))
        return [Basis(m.T.float().cpu(), r.float().cpu()) for m, r in zip(made, read, strict=True)]


def given_to_relus(taps: Sequence[Sequence[Activations]]) -> Tensor | None:
    """What ReLUs are given by the units of all parents, n x U; None where others follow them.

    Args:
        taps: Of one space, by parent: where its units are seen.
    """
    if any(len(tap) != 1 for tap in taps):
        return None  # a stream: what a sum is given is read behind a ReLU, and added to again
    parts: list[Tensor] = []
    for (tap,) in taps:
        if tap.before_NF is None or not torch.equal(tap.before_NF.relu(), tap.features_NF):
            return None
        parts.append(tap.before_NF)
    given_UF = torch.cat(parts)
    if given_UF.shape[1] > _ROWS:
        order = torch.randperm(given_UF.shape[1], generator=torch.Generator().manual_seed(0))
        given_UF = given_UF[:, order[:_ROWS].sort().values.to(given_UF.device)]
    return given_UF.T.contiguous()


def merge_units(given_nU: Tensor, write_dU: Tensor, chosen_M: Tensor) -> Merged | None:
    """Descend from the chosen units; None where they miss next to nothing.

    Args:
        given_nU: What ReLUs are given, float32.
        write_dU: What is read of the units, float64.
        chosen_M: Indices of the chosen units.
    """
    work = _Descent(given_nU, (write_dU.T @ write_dU).float())
    if work.missed_by_choice(chosen_M) < _LITTLE:
        return None
    made_UM = given_nU.new_zeros(given_nU.shape[1], len(chosen_M))
    made_UM[chosen_M, torch.arange(len(chosen_M)).to(made_UM.device)] = 1.0
    made_UM = work.descend(made_UM)
    units_nA = torch.cat([work.units_nU, (given_nU @ made_UM).relu()], 1).double()
    gram_AA = units_nA.T @ units_nA / len(units_nA)
    count = given_nU.shape[1]
    merged_M = torch.arange(len(gram_AA))[count:].to(gram_AA.device)
    return Merged(made_UM, combinations(gram_AA, merged_M)[:count])


class _Descent:
    """The miss of what is read, and how it falls."""

    def __init__(self, given_nU: Tensor, read_UU: Tensor) -> None:
        self.given_nU, self.read_UU, self.rows = given_nU, read_UU, len(given_nU)
        self.units_nU = given_nU.relu()
        self.gram_UU = self.units_nU.T @ self.units_nU / self.rows
        self.total = (read_UU * self.gram_UU).sum().clamp(min=1e-30)
        given_UU = (given_nU.T @ given_nU / self.rows).double()
        given_UU.diagonal().add_(_PULL * given_UU.diagonal().mean() + 1e-30)
        self.factor_UU = torch.linalg.cholesky(given_UU).float()

    def missed_by_choice(self, chosen_M: Tensor) -> float:
        """The share that is missed by units as they are, duplicates rebuilt exactly."""
        gram_UU = self.gram_UU.double()
        read_UM = combinations(gram_UU, chosen_M)
        rest_UU = gram_UU - 2 * read_UM @ gram_UU[chosen_M]
        rest_UU += read_UM @ gram_UU[chosen_M][:, chosen_M] @ read_UM.T
        return float((self.read_UU.double() * rest_UU).sum() / self.total)

    def descend(self, made_UM: Tensor) -> Tensor:
        """Steps in what ReLUs are given, each as far as combinations of units can go it."""
        at = self._at(made_UM)
        step = _STEP
        for _ in range(_STEPS):
            down_UM = self._down(at)
            while step > _LEAST:
                tried = self._at(made_UM + step * down_UM)
                if tried.missed < at.missed:
                    break
                step *= 0.5
            else:
                return made_UM
            made_UM, at, step = made_UM + step * down_UM, tried, step * _GROW
        return made_UM

    def _at(self, made_UM: Tensor) -> _Place:
        units_nM = (self.given_nU @ made_UM).relu()
        inner_MM, cross_UM = (
            units_nM.T @ units_nM / self.rows,
            self.units_nU.T @ units_nM / self.rows,
        )
        system_MM = inner_MM.double()
        system_MM.diagonal().add_(_RIDGE * system_MM.diagonal().mean() + 1e-30)
        factor_MM = torch.linalg.cholesky(system_MM)
        read_UM = torch.cholesky_solve(cross_UM.double().T, factor_MM).T.float()
        counted_UM = self.read_UU @ read_UM
        had = 2 * (counted_UM * cross_UM).sum() - ((read_UM.T @ counted_UM) * inner_MM).sum()
        return _Place(units_nM, read_UM, counted_UM, float(1 - had / self.total))

    def _down(self, at: _Place) -> Tensor:
        """The step down the miss, in the curvature of each unit alone."""
        inner_MM = at.read_UM.T @ at.counted_UM
        curvature_M = inner_MM.diagonal()
        floor = 1e-6 * curvature_M.mean() + 1e-30
        fall_nM = self.units_nU @ at.counted_UM - at.units_nM @ inner_MM
        fall_nM = torch.where(at.units_nM > 0, fall_nM, 0.0) / curvature_M.clamp(min=floor)
        down_UM: Tensor = torch.cholesky_solve(
            self.given_nU.T @ fall_nM / self.rows, self.factor_UU
        )
        return down_UM


@dataclass(frozen=True)
class _Place:
    """What combinations give.

    Attributes:
        units_nM: Behind their ReLUs.
        read_UM: All units as combinations of them.
        counted_UM: The same, as it counts in what is read.
        missed: The share of what is read that they miss.
    """

    units_nM: Tensor
    read_UM: Tensor
    counted_UM: Tensor
    missed: float
