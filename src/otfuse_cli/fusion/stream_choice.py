"""Which heads and units of all parents write to the fused stream: those that explain most of it.

What all parents' units together would write, `W phi`, is known; a subset is as good as what of it
can be had from the units in the subset (least squares). No data but their covariance is needed.

Legend: U units of all parents (positions inside heads count one by one), M chosen, d stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb

import torch
from torch import Tensor

from ..errors import SolveFailed

# Which units, as a mask, and how many of them.
Quotas = Sequence[tuple[Tensor, int]]

# Up to so many subsets of heads are tried (12 of which 4 stay are 495), each a small solve; above,
# heads are taken one after another.
_MOST_SUBSETS = 1_000
# Relative to the mean power of a unit: what is left of units that others explain is rounding.
_RIDGE = 1e-5


def choose_heads(covariance_UU: Tensor, write_dU: Tensor, heads: int, most: int) -> tuple[int, ...]:
    """The heads that explain most, in ascending order.

    Args:
        covariance_UU: Of what heads put out, the positions of one head side by side; float64.
        write_dU: What each writes to the stream.
        heads: Of all parents.
        most: How many to take.

    Raises:
        SolveFailed: The covariance is none: not finite, or not positive.
    """
    ridge = _RIDGE * covariance_UU.diagonal().mean() + 1e-300
    wanted_Ud = covariance_UU @ write_dU.T
    places = torch.arange(len(covariance_UU), device=covariance_UU.device).view(heads, -1)

    def explained(chosen: tuple[int, ...]) -> Tensor:
        inside = torch.cat([places[head] for head in chosen])
        inner = covariance_UU[inside][:, inside].clone()
        inner.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(inner)
        half = torch.linalg.solve_triangular(factor, wanted_Ud[inside], upper=False)
        return torch.where(failed == 0, half.square().sum(), -1.0)

    def best(subsets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The first of those that explain most; a device is waited for once."""
        scores = torch.stack([explained(subset) for subset in subsets]).tolist()
        if min(scores) < 0:
            raise SolveFailed(
                "the covariance of heads can't be solved with",
                why="what they put out on the inputs is not finite",
                fix="look at the inputs and at the models with otfuse eval",
            )
        return subsets[max(range(len(subsets)), key=scores.__getitem__)]

    if comb(heads, most) <= _MOST_SUBSETS:
        return best(list(combinations(range(heads), most)))
    chosen: tuple[int, ...] = ()
    for _ in range(most):  # greedy: the best head beside those taken
        chosen = best([(*chosen, h) for h in range(heads) if h not in chosen])
    return tuple(sorted(chosen))


def choose_units(covariance_UU: Tensor, write_dU: Tensor, most: int, quotas: Quotas = ()) -> Tensor:
    """Greedy forward selection: again and again the unit that explains most of what is left.

    Args:
        covariance_UU: Of what the units do after their activation, float64.
        write_dU: What each writes to the stream.
        most: M.
        quotas: Units to choose among, and how many of them, one after the other; none: all, M.

    Returns:
        M indices in ascending order.
    """
    # What a unit explains of what is written, and both covariances less what chosen units explain,
    # need U x U numbers and one column of each for every choice: d may be ten times U.
    written_UU = covariance_UU @ (write_dU.T @ write_dU) @ covariance_UU
    worth_U, left_U = written_UU.diagonal().clone(), covariance_UU.diagonal().clone()
    ridge = _RIDGE * left_U.mean() + 1e-300
    free_U = torch.ones(len(left_U), dtype=torch.bool, device=left_U.device)
    columns_MU = covariance_UU.new_zeros(most, len(left_U))
    halves_MU = torch.zeros_like(columns_MU)
    for at, allowed_U in enumerate(turns(free_U, most, quotas)):
        power_U = left_U.clamp(min=0) + ridge
        # An index of one, never a number: a device would be waited for.
        best_1 = torch.where(free_U & allowed_U, worth_U / power_U, -1.0).argmax(keepdim=True)
        free_U.index_fill_(0, best_1, False)
        root = power_U.index_select(0, best_1).sqrt()
        before_MU, half_MU = columns_MU[:at], halves_MU[:at]
        there_M, half_M = (m.index_select(1, best_1)[:, 0] for m in (before_MU, half_MU))
        column_U = (covariance_UU.index_select(0, best_1)[0] - there_M @ before_MU) / root
        common_U = written_UU.index_select(0, best_1)[0] - there_M @ half_MU - half_M @ before_MU
        half_U = (common_U - 0.5 * common_U.index_select(0, best_1) / root * column_U) / root
        worth_U -= 2 * column_U * half_U
        left_U -= column_U.square()
        columns_MU[at], halves_MU[at] = column_U, half_U
    return (~free_U).nonzero().flatten()


def turns(free_U: Tensor, most: int, quotas: Quotas) -> Iterator[Tensor]:
    """For each unit that is taken in turn, which may be."""
    for allowed_U, count in quotas or ((torch.ones_like(free_U), most),):
        yield from [allowed_U.to(free_U.device)] * count


def read_from(covariance_UU: Tensor, chosen_M: Tensor) -> Tensor:
    """Every unit as a combination of the chosen ones by least squares, U x M."""
    inner_MM = covariance_UU[chosen_M][:, chosen_M]
    power = float(inner_MM.diagonal().mean())
    inner_MM = inner_MM + (1e-9 * power + 1e-300) * torch.eye(len(chosen_M)).to(inner_MM)
    read_UM: Tensor = torch.linalg.solve(inner_MM, covariance_UU[chosen_M]).T
    return read_UM
