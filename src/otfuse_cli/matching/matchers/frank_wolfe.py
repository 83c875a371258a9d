"""Frank-Wolfe over all spaces at once (C2M3, Crisostomi et al. 2024, for one source).

The maps are relaxed to doubly stochastic matrices, all of which move together along the line
towards the vertex that the gradient points to; the end point is rounded to permutations. Equal
widths and hard maps only.

Legend: N units of a space, source or anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ...transport.maps import Map, Permutation
from ...transport.plan import Plan
from ...transport.solve import maximise
from ..alignment import Alignment
from ..similarity import Similarity

MOST_STEPS = 40
_GAIN = 1e-5
# Relative to its largest number, what of a polynomial through exact data is rounding.
_ROUNDING = 1e-11


class Relaxed:
    """A doubly stochastic map `weights_NN`, rows = source, columns = anchor, as a `Map`."""

    hard = False
    kept = None

    def __init__(self, weights_NN: torch.Tensor) -> None:
        """Take the matrix as it is, rows and columns summing to 1."""
        self.weights_NN = weights_NN

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, N)."""
        return len(self.weights_NN), len(self.weights_NN)

    def produce(
        self, tensor: torch.Tensor, dim: int, anchor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`W' = einsum('nm,n...->m...', weights, W)` along `dim`."""
        moved: torch.Tensor = torch.tensordot(self.weights_NN.T.to(tensor), tensor, ([1], [dim]))
        return moved.movedim(0, dim)

    def consume(
        self, tensor: torch.Tensor, dim: int, anchor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same: rows and columns sum to 1."""
        return self.produce(tensor, dim)


def relax(
    work: Similarity,
    spaces: Sequence[str],
    held: Alignment,
    *,
    start: Mapping[str, torch.Tensor] | None = None,
    most_steps: int = MOST_STEPS,
    watch: Callable[[float], None] | None = None,
) -> Alignment:
    """Maximise `sum <anchor, aligned source>` over doubly stochastic maps, then round.

    Each step: gradient of every space from its unfoldings, vertex by assignment, step length by
    exact line search on the polynomial, stop at a relative gain of 1e-5. Rounding takes, for
    each space, the assignment of largest weight.

    Args:
        work: The two models, of equal widths.
        spaces: What moves; no families.
        held: Maps of the other spaces.
        start: Doubly stochastic matrices by space; None = the barycentre, all entries 1/N.
        most_steps: Where to stop at the latest.
        watch: Told the objective after each step.
    """
    sizes = {s: work.anchor.graph.spaces[s].size for s in spaces}
    device = work.anchor.device
    even = {s: torch.full((n, n), 1.0 / n, device=device) for s, n in sizes.items()}
    weights = {s: w.to(device) for s, w in (start or even).items()}
    line = RelaxedPath(work, spaces, held)
    value = work.objective(line.at(weights))
    gradients = line.gradients(weights)
    for _ in range(most_steps):
        vertices = {s: Permutation(_index(maximise(gradients[s], proved=False))) for s in spaces}
        work.flop += sum(float(size) ** 3 for size in sizes.values())
        slope = _slope(gradients, weights, vertices)
        if slope <= _GAIN * abs(value):
            break
        values = line.values(weights, vertices, value, slope)
        step, best = line_search(value, slope, line.knots, values)
        if best - value <= _GAIN * abs(value):
            break
        weights = {s: torch.lerp(w, _matrix(vertices[s], w), step) for s, w in weights.items()}
        gradients = line.moved(gradients, weights, step)
        value = best
        if watch is not None:
            watch(value)
    rounded = {s: Permutation(_index(maximise(weights[s]))) for s in spaces}
    return replace(held, maps={**held.maps, **rounded})


class RelaxedPath:
    """The objective on the way from relaxed maps to vertices.

    Where no tensor has more than two axes that move, gradients are affine in the maps: those at a
    point of the way are a mean of those at its ends, and what is at the vertices needs no products
    with dense maps. The objective is then a parabola, given by its slopes at both ends.
    """

    def __init__(self, work: Similarity, spaces: Sequence[str], held: Alignment) -> None:
        """Look at `spaces`, the others held."""
        self._work, self._spaces, self._held = work, spaces, held
        degree = work.degree(spaces)
        self._affine = degree <= 2
        self._ends: dict[str, torch.Tensor] = {}
        self.knots = [1.0] if self._affine else [(k + 1) / (degree - 1) for k in range(degree - 1)]

    def at(self, maps: Mapping[str, torch.Tensor | Map]) -> Alignment:
        """All maps, those that are relaxed among them."""
        relaxed = {s: Relaxed(m) if isinstance(m, torch.Tensor) else m for s, m in maps.items()}
        return replace(self._held, maps={**self._held.maps, **relaxed})

    def gradients(self, maps: Mapping[str, torch.Tensor | Map]) -> dict[str, torch.Tensor]:
        """Of every space, on the device."""
        if any(isinstance(map, torch.Tensor) for map in maps.values()):
            self._work.flop += self._work.dense_flop(self._spaces)
        at = self.at(maps)
        return {s: self._work.benefit(s, at) for s in self._spaces}

    def values(
        self,
        weights: Mapping[str, torch.Tensor],
        vertices: Mapping[str, Permutation],
        value: float,
        slope: float,
    ) -> list[float]:
        """The objective at `knots`, from value and slope at the beginning."""
        if self._affine:
            self._ends = self.gradients(vertices)
            return [value + (slope + _slope(self._ends, weights, vertices)) / 2]
        between = (self.at(_towards(weights, vertices, t)) for t in self.knots)
        return [self._work.objective(at) for at in between]

    def moved(
        self,
        gradients: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        step: float,
    ) -> dict[str, torch.Tensor]:
        """The gradients at a share of the way, where the maps are `weights`."""
        if not self._affine:
            return self.gradients(weights)
        return {s: torch.lerp(g, self._ends[s], step) for s, g in gradients.items()}


def _slope(
    gradients: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    vertices: Mapping[str, Permutation],
) -> float:
    """What the objective gains on the way to the vertices, to first order."""
    slope: torch.Tensor | float = 0.0
    for space, gradient_NN in gradients.items():
        index_N = vertices[space].index_M.to(gradient_NN.device)
        picked_N = gradient_NN[index_N, torch.arange(len(index_N), device=index_N.device)]
        slope = slope + picked_N.sum(dtype=torch.float64)
        slope = slope - (gradient_NN * weights[space]).sum(dtype=torch.float64)
    return float(slope)


def line_search(
    value: float, slope: float, knots: Sequence[float], values: Sequence[float]
) -> tuple[float, float]:
    """Where on [0, 1] the polynomial through the data is largest, and how large.

    Args:
        value: At 0.
        slope: Its derivative at 0.
        knots: Further points in (0, 1]; with the two data at 0 they fix the degree len(knots) + 1.
        values: There.
    """
    t = np.asarray(knots, np.float64)
    powers = np.arange(2, 2 + len(t))
    rest = np.asarray(values, np.float64) - value - slope * t
    high = np.linalg.solve(t[:, None] ** powers, rest) if len(t) else np.empty(0)
    polynomial = np.polynomial.Polynomial([value, slope, *high])
    # A leading coefficient that is rounding alone would spoil the roots that matter.
    largest = np.abs([value, *values, *polynomial.coef]).max()
    roots = polynomial.trim(_ROUNDING * largest).deriv().roots()
    inside = roots.real[(abs(roots.imag) < 1e-9) & (roots.real > 0) & (roots.real < 1)]
    candidates = [0.0, 1.0, *np.sort(inside).tolist()]
    best = max(candidates, key=lambda s: float(polynomial(s)))
    return best, float(polynomial(best))


def _towards(
    weights: Mapping[str, torch.Tensor], vertices: Mapping[str, Permutation], step: float
) -> dict[str, Map]:
    """The maps at a share of the way to the vertices; the vertices themselves need no product."""
    if step == 1.0:
        return dict(vertices)
    return {s: Relaxed(torch.lerp(w, _matrix(vertices[s], w), step)) for s, w in weights.items()}


def _matrix(vertex: Permutation, like_NN: torch.Tensor) -> torch.Tensor:
    """A vertex as a dense matrix, where another one is."""
    matrix_NN = torch.zeros_like(like_NN)
    index_1N = vertex.index_M.to(like_NN.device)[None]
    return matrix_NN.scatter_(0, index_1N, 1.0)


def _index(plan: Plan) -> torch.Tensor:
    assert plan.index_M is not None
    return plan.index_M
