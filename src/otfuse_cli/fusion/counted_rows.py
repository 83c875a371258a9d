"""Rows of a batch as what they add to a ridge fit: a function of the batch and of the prior alone.

So they can be counted anywhere, in any order, and be added up in theirs (`ridge`). Legend as there:
g groups, n rows, D inputs, O outputs. Products of a batch are taken in the dtype of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .half_products import add_panels, add_products, panels

# A smaller miss is found in float64: float32 products err by up to some 1e-6 of the target.
_IN_DOUBLE = 1e-4


@dataclass(frozen=True)
class Counted:
    """What the rows of one batch add to a fit.

    Attributes:
        rows: How many they count as.
        shift_gD: What was subtracted from the inputs.
        sum_gD: Of the inputs about the shift.
        rest_gO: Sum of what the prior misses.
        target: Sum of the target's squares.
        missed: Sum of the squares of what the prior misses.
        inputs: About the shift, g x n x D; None once they are multiplied.
        rest: What the prior misses, g x n x O; None likewise.
        root_n1: Roots of how often rows count.
        panels: Products of the inputs with themselves, by panels; None before.
        cross_gDO: Products of inputs and rest; None before.
    """

    rows: float
    shift_gD: Tensor
    sum_gD: Tensor
    rest_gO: Tensor
    target: float
    missed: float
    inputs: Tensor | None
    rest: Tensor | None
    root_n1: Tensor
    panels: Sequence[Tensor] | None = None
    cross_gDO: Tensor | None = None

    def multiplied(self) -> Counted:
        """The same with products in place of rows: what is left to do is to add them."""
        assert self.inputs is not None
        turned = self.inputs.transpose(1, 2)
        return replace(
            self, inputs=None, rest=None, panels=[*panels(turned)], cross_gDO=self._cross(turned)
        )

    def add_to(self, gram_gDD: Tensor, cross_gDO: Tensor) -> None:
        """Add the products to sums."""
        if self.panels is not None:
            assert self.cross_gDO is not None
            add_panels(gram_gDD, self.panels)
            cross_gDO += self.cross_gDO
            return
        assert self.inputs is not None
        turned = self.inputs.transpose(1, 2)
        add_products(gram_gDD, turned)
        cross_gDO += self._cross(turned)

    def _cross(self, turned: Tensor) -> Tensor:
        assert self.rest is not None
        return turned @ self.rest.to(turned)


@dataclass(frozen=True)
class Prior:
    """Where a fit begins, and how rows are counted toward it.

    Attributes:
        weight_gOD: W0, float64.
        bias_gO: b0; None if no bias is to be fitted.
        dual: Whether rows are kept instead of products.
        shift_gD: What is subtracted from inputs; None for the mean of those that come first.
    """

    weight_gOD: Tensor
    bias_gO: Tensor | None
    dual: bool
    shift_gD: Tensor | None = None

    def mean(self, inputs_gnD: Tensor) -> Tensor:
        """The shift that these inputs give, if they come first."""
        # Exactly what is subtracted below: the nearest number of the dtype of the rows.
        return inputs_gnD.mean(1).double()

    def counted(
        self, inputs_gnD: Tensor, target_gnO: Tensor, weights_n: Tensor | None = None
    ) -> Counted:
        """Rows of inputs and of what they should give; with `weights_n`, so often each."""
        shift_gD = self.mean(inputs_gnD) if self.shift_gD is None else self.shift_gD
        target, rest = target_gnO, self._missed(inputs_gnD, target_gnO)
        missed, wanted = _squares(rest, target)
        if missed < _IN_DOUBLE**2 * wanted:
            rest = self._missed(inputs_gnD.double(), target.double())
            missed, wanted = _squares(rest, target)
        inputs = inputs_gnD - shift_gD.to(inputs_gnD)[:, None]
        if weights_n is None:
            many_n = inputs.new_ones(inputs.shape[1])
            rows = float(len(many_n))
        else:
            # Counted as they are weighted: rounded to the dtype of the rows, wherever they lie.
            weights_n = weights_n.to(inputs.dtype)
            many_n = weights_n.to(inputs)
            rows = float(weights_n.sum(dtype=torch.float64))
        # Products, even with ones: the same as sums, in a fifth of the time.
        sum_gD, rest_gO = many_n @ inputs, many_n.to(rest) @ rest
        root_n1 = many_n[:, None].sqrt()
        if weights_n is not None:
            inputs, target, rest = inputs * root_n1, target * root_n1, rest * root_n1
            missed, wanted = _squares(rest, target)
        return Counted(rows, shift_gD, sum_gD, rest_gO, wanted, missed, inputs, rest, root_n1)

    def changed(
        self, inputs_gnD: Tensor, change_gnO: Tensor, weights_n: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sum of changes of targets, and what they do to the products (dual: the changes)."""
        assert self.shift_gD is not None
        inputs = inputs_gnD - self.shift_gD.to(inputs_gnD)[:, None]
        change = change_gnO
        if weights_n is not None:
            root_n1 = weights_n.to(inputs)[:, None].sqrt()
            total = weights_n.to(change) @ change
            inputs, change = inputs * root_n1, change * root_n1
        else:
            total = change.sum(1)
        return total, change if self.dual else inputs.transpose(1, 2) @ change

    def _missed(self, inputs_gnD: Tensor, target_gnO: Tensor) -> Tensor:
        """What the prior misses, in the dtype of the rows."""
        prior_gDO = self.weight_gOD.to(inputs_gnD).transpose(1, 2)
        rest = target_gnO.to(inputs_gnD) - inputs_gnD @ prior_gDO
        if self.bias_gO is not None:
            rest -= self.bias_gO.to(rest)[:, None]
        return rest


def _squares(*several: Tensor) -> list[float]:
    """Sums of squares, those of rows in float64; a device is waited for once."""
    # Each row in its own dtype: converting as it is summed takes fifteen times as long.
    norms = (torch.linalg.vector_norm(rows, dim=-1) for rows in several)
    sums: list[float] = torch.stack([norm.double().square().sum() for norm in norms]).tolist()
    return sums
