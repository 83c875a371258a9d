"""One place for each unit: transport in which no unit is split.

N units, M places. Each unit has the mass 1/N and goes to one place whole; how much a place receives
is free (semi-relaxed). With as many places as units it is a permutation, with more of them some
stay empty, with fewer every place takes the same number of units or one more. So it can be taken
back: a network carried to other widths by such a map and carried back is what it was. No names, no
files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .maps import Coupling, Map, Permutation
from .plan import Plan
from .solve import maximise


def single_places(benefit_NM: Tensor) -> Tensor:
    """The place of every unit that maximises the summed benefit; place_N, int64.

    Args:
        benefit_NM: Of unit n at place m; any floating dtype and device.

    Raises:
        SolveFailed: The benefit is not finite.
        ValueError: No matrix, or an empty one.
    """
    if benefit_NM.ndim != 2 or not benefit_NM.numel():
        raise ValueError(f"a benefit is a matrix, got shape {tuple(benefit_NM.shape)}")
    n, m = benefit_NM.shape
    benefit_NM = benefit_NM.detach().to("cpu", torch.float64)
    full, rest = divmod(n, m)
    # Every place as often as all take units, and once more for those that are left over.
    copies = full + (rest > 0)
    benefit_NC = benefit_NM.repeat(1, copies)
    blank = torch.zeros(copies * m - n, copies * m, dtype=torch.float64)
    if len(blank) and full:
        # What stands for no unit may be put where a place may stay empty, and nowhere else.
        spread = float(benefit_NM.max() - benefit_NM.min())
        blank[:, : full * m] = -(n + 1) * (spread or 1.0)
    plan = maximise(torch.cat([benefit_NC, blank]), proved=n == m)
    assert plan.index_M is not None
    return torch.argsort(plan.index_M)[:n] % m


def places_map(place_N: Tensor, places: int) -> Map:
    """The map onto `places` places: a permutation where every one is taken once.

    Raises:
        ValueError: A place out of range.
    """
    n = len(place_N)
    if n == places and torch.bincount(place_N, minlength=n).max() == 1:
        return Permutation(torch.argsort(place_N))
    mass_N = torch.full((n,), 1.0 / n, dtype=torch.float64)
    return Coupling(Plan.from_entries(torch.arange(n), place_N, mass_N, (n, places)))


def reversed_map(map: Map) -> Map:
    """The way back: a unit is copied to all that stood for it, its readers share it out.

    Raises:
        TypeError: A map that comes from no plan.
    """
    if isinstance(map, Permutation):
        return Permutation(torch.argsort(map.index_M))
    if not isinstance(map, Coupling):
        raise TypeError(f"a {type(map).__name__} has no way back")
    rows, cols, values = map.plan.entries()
    n, m = map.sizes
    return Coupling(Plan.from_entries(cols, rows, values, (m, n)))
