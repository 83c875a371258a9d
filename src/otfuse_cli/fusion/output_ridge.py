"""Ridge regression of the layer that scores classes, where a score counts by its chance to matter.

Most scores of most inputs are far from being the best, and a plain fit spends itself on how far.
Here a score counts by the square root of its probability: about the deviation of whether it is the
class. The larger of two probabilities counts, of what is aimed at and of what the network says
now: where inputs hardly tell classes apart, wrong classes matter most. So every output has weights,
and a system, of its own.

Legend: n rows, D inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ridge import Ridge, RidgeFit

# What the least likely score counts, where the surest counts 1: nothing is left wholly unsaid.
_LEAST = 0.01
# Multiplications for all systems: with more (vocabularies), all scores count alike.
_MOST_WORK = 2e11


def affordable(rows: int, inputs: int, outputs: int) -> bool:
    """Whether every output can have a system of its own; of one output there is no choice."""
    return outputs > 1 and rows * inputs * min(rows, inputs) * outputs <= _MOST_WORK


class OutputRidge:
    """Collects rows as `Ridge` does, then solves for one output after another."""

    def __init__(self, weight_1OD: Tensor, bias_1O: Tensor | None) -> None:
        """Begin at a prior."""
        self.weight_OD = weight_1OD[0].double()
        self.bias_O = None if bias_1O is None else bias_1O[0].double()
        self._inputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._counts: list[Tensor] = []

    def add(self, inputs_1nD: Tensor, target_1nO: Tensor, weights_n: Tensor | None = None) -> None:
        """Count rows of inputs and of the scores they should give; with `weights_n`, so often."""
        inputs_nD, target_nO = inputs_1nD[0], target_1nO[0]
        prior_nO = inputs_nD.double() @ self.weight_OD.T
        if self.bias_O is not None:
            prior_nO = prior_nO + self.bias_O
        # The larger of the two: a score is not settled before target and network agree on it.
        chance_nO = torch.maximum(target_nO.double().softmax(-1), prior_nO.softmax(-1))
        counts_nO = chance_nO.sqrt() + _LEAST
        if weights_n is not None:
            counts_nO = counts_nO * weights_n.to(counts_nO)[:, None]
        self._inputs.append(inputs_nD)
        self._targets.append(target_nO)
        self._counts.append(counts_nO)

    def solve(
        self,
        ridge: float,
        *,
        where: str,
        changes: bool = False,
        fresh_gO: Tensor | None = None,
    ) -> RidgeFit | None:
        """The fit, without moments of outputs; None where the prior is right already.

        Args:
            ridge: As for `Ridge.solve`, relative to the inputs of each output.
            where: The layer, for messages.
            changes: As for `Ridge.solve`; scores don't change.
            fresh_gO: As for `Ridge.solve`.

        Raises:
            SolveFailed: A matrix is singular.
        """
        inputs_1nD, target_nO = torch.cat(self._inputs)[None].double(), torch.cat(self._targets)
        counts_nO = torch.cat(self._counts)
        weight_OD = self.weight_OD.clone()
        bias_O = None if self.bias_O is None else self.bias_O.clone()
        missed = left = total = 0.0
        fitted = False
        for o in range(target_nO.shape[1]):
            one = slice(o, o + 1)
            bias = None if self.bias_O is None else self.bias_O[None, one]
            sums = Ridge(self.weight_OD[None, one], bias, rows=inputs_1nD.shape[1])
            sums.add(inputs_1nD, target_nO[None, :, one], counts_nO[:, o])
            fresh_g1 = None if fresh_gO is None else fresh_gO[:, one]
            solution = sums.solve(ridge, where=where, fresh_gO=fresh_g1)
            total, missed = total + sums.target, missed + sums.missed
            if solution is None:
                left += sums.missed
                continue
            fitted = True
            left += solution.after**2 * sums.target
            weight_OD[one] = solution.weight_gOD[0]
            if bias_O is not None:
                assert solution.bias_gO is not None
                bias_O[one] = solution.bias_gO[0]
        if not fitted:
            return None
        unknown = torch.full_like(weight_OD[None, :, 0], torch.nan)
        before, after = ((part / total) ** 0.5 if total else 0.0 for part in (missed, left))
        bias_1O = None if bias_O is None else bias_O[None]
        return RidgeFit(weight_OD[None], bias_1O, unknown, unknown, before, after)
