"""The acid test of a layer graph: permute every free space at once; the function must not change.

Weights are drawn anew, of order one: with the usual initialisation a wrong graph may move the
outputs by as little as 1e-8. Leave-one-out is the converse: an axis left out must show.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from math import inf, prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import IncompatibleModels
from ..graph.model import GraphTensor, LayerGraph, Role
from ..graph.trace.export_settings import eval_mode, no_fast_path, without_cache
from .function_change import State, relative_difference, reordered_output, run_state
from .precision import EXACT, FLOAT32, MOVED, Precision, as_dtype, in_double
from .relabel import Maps, draw_maps, relabel_axes, relabel_state

Run = Callable[[State], list[Tensor]]

_ROUNDED = 4  # units of rounding by which weights are moved, to see what that does
_MARGIN = 400  # times that is allowed
# The most that is allowed, by what usually is: a wrong unit changes more. In the half formats there
# is no room for more.
_MOST = {EXACT: 1e-8, FLOAT32: 1e-3}


@dataclass(frozen=True)
class AcidResult:
    """How well a graph has stood the test.

    Attributes:
        max_error: Largest change of an output, relative to the output's largest value.
        threshold: The error allowed; more than usual where rounding makes more by itself.
        draws: Joint permutations tried.
        spaces: Spaces permuted.
    """

    max_error: float
    threshold: float
    draws: int
    spaces: int

    @property
    def passed(self) -> bool:
        """Whether the function was kept."""
        return self.max_error <= self.threshold


@dataclass(frozen=True)
class Member:
    """A space on an axis of a tensor."""

    tensor: str
    axis: int
    space: str

    def __str__(self) -> str:
        return f"{self.tensor} axis {self.axis} ({self.space})"


@dataclass(frozen=True)
class LeaveOneOutResult:
    """Which members of a graph are proven to belong to it.

    Attributes:
        members: Number of members tried.
        undetected: Those that no output misses: true no-ops, or units that weren't moved.
        smallest_change: The least change that was detected.
    """

    members: int
    undetected: tuple[Member, ...]
    smallest_change: float


def acid_test(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    graph: LayerGraph,
    *,
    seed: int,
    draws: int = 5,
    dtype: torch.dtype = torch.float64,
    spaces: Collection[str] | None = None,
) -> AcidResult:
    """Random joint permutations of all free spaces (or of `spaces`) on weights drawn anew.

    Args:
        module: On real tensors; left as it is.
        args: Inputs.
        kwargs: Keyword inputs.
        graph: To be tested; its names are the module's.
        seed: Of weights and permutations.
        draws: Number of joint permutations.
        dtype: Of the arithmetic; float32 is taken where the module can't do it, or computes
            nothing finite in it.
        spaces: Only these.

    Raises:
        ValueError: The module has no values (meta device).
        IncompatibleModels: Its outputs aren't finite on drawn weights, or jump on rounding alone
            (a choice by scores that are equal).
    """
    generator = torch.Generator().manual_seed(seed)
    with _Bench(module, args, kwargs, graph, generator, dtype) as bench:
        error, moved = 0.0, 0
        for _ in range(draws):
            maps = _only(draw_maps(graph, generator), spaces)
            moved = len(maps)
            outputs = bench.run(relabel_state(bench.state, graph, maps))
            error = max(error, bench.change(outputs, maps))
        allowed = bench.threshold
        if error > allowed:
            allowed = max(allowed, bench.rounding(generator))
        return AcidResult(error, allowed, draws, moved)


def leave_one_out(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    graph: LayerGraph,
    *,
    seed: int,
    draws: int = 3,
    dtype: torch.dtype = torch.float64,
    spaces: Collection[str] | None = None,
) -> LeaveOneOutResult:
    """Leave each (tensor, axis) out of a joint permutation: the outputs must move.

    Arguments as for `acid_test`; costs one forward pass per member. What isn't detected is tried
    again on other weights, `draws` times in all: a unit may just have been dead.
    """
    generator = torch.Generator().manual_seed(seed)
    smallest, pending = inf, _members(graph, spaces)
    count = len(pending)
    for _ in range(draws):
        undetected: list[Member] = []
        with _Bench(module, args, kwargs, graph, generator, dtype) as bench:
            maps = _only(draw_maps(graph, generator), spaces)
            whole = relabel_state(bench.state, graph, maps)
            for member in pending:
                outputs = bench.run(_without(bench.state, whole, graph, maps, member))
                change = bench.change(outputs, maps)
                if change > MOVED[bench.threshold]:
                    smallest = min(smallest, change)
                else:
                    undetected.append(member)
        pending = undetected
        if not pending:
            break
    return LeaveOneOutResult(count, tuple(pending), smallest)


def redraw(state: Mapping[str, Tensor], graph: LayerGraph, generator: torch.Generator) -> State:
    """Weights of order one: matrices keep the size of what they read, gains are near 1."""
    out: State = dict(state)
    for name, described in graph.tensors.items():
        old = state[name]
        if not old.is_floating_point() and not old.is_complex():
            continue
        new = _drawn(described, old.shape, generator)
        if old.is_complex():
            new = torch.complex(new, _drawn(described, old.shape, generator))
        new = new.to(old.dtype)
        for alias in (name, *described.aliases):
            if alias in out:
                out[alias] = new
    return out


def _drawn(described: GraphTensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A tensor of order one, float64, by the role that it plays in the network."""
    roles = frozenset().union(*(axis.roles for axis in described.axes))
    noise: Tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    if Role.VARIANCE in roles:  # from 0.5 to 1.5: never near 0, where a norm would blow up
        return torch.rand(shape, generator=generator, dtype=torch.float64).add(0.5)
    if Role.CONSUME in roles and len(shape) > 1:
        made = [d for d, axis in enumerate(described.axes) if Role.PRODUCE in axis.roles]
        fan_in = prod(n for d, n in enumerate(shape) if d not in made[:1])
        return noise / sqrt(max(fan_in, 1))
    # Gains and shifts differ from unit to unit by much more than rounding, and sign changes of a
    # gain stay rare.
    if Role.SCALE in roles:
        return 1 + 0.3 * noise
    return 0.5 * noise


class _Bench(AbstractContextManager["_Bench"]):
    """A module set up to run on drawn weights, with the outputs it gives on them."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        graph: LayerGraph,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        tensors = module.state_dict()
        if any(t.device.type == "meta" for t in tensors.values()):
            raise ValueError("the acid test needs real tensors, not meta ones")
        self._module, self._graph = module, graph
        self._args, self._kwargs = args, without_cache(module, dict(kwargs or {}))
        self._dtype = dtype
        self._drawn = redraw(tensors, graph, generator)

    def __enter__(self) -> _Bench:
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self._module))
            stack.enter_context(no_fast_path())
            stack.enter_context(torch.no_grad())
            failures = (RuntimeError, IncompatibleModels)
            self.threshold = in_double(self._start, dtype=self._dtype, failures=failures)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, dtype: torch.dtype) -> float:
        """Run the module on the drawn weights; the error that its arithmetic allows."""
        self._dtype = dtype
        self.state = as_dtype(self._drawn, dtype)
        with Precision(dtype) as precision:
            self.expected = self.run(self.state)
        self._require_finite()
        allowed: float = precision.allowed
        return allowed

    def _require_finite(self) -> None:
        if not all(bool(torch.isfinite(y).any()) for y in self.expected if y.numel()):
            raise _untold("outputs aren't finite")

    def run(self, state: State) -> list[Tensor]:
        args, kwargs = as_dtype((self._args, self._kwargs), self._dtype)
        return run_state(self._module, (args, kwargs, state))

    def rounding(self, generator: torch.Generator) -> float:
        """What rounding may change: the permuted sums are added in another order.

        Weights are moved by a few units of rounding; some hundred times what that does is allowed,
        and never so much that a wrong graph could pass.
        """
        eps = _ROUNDED * torch.finfo(self._dtype).eps

        def rounded(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            return tensor * (1 + eps * noise)

        outputs = self.run({name: rounded(tensor) for name, tensor in self.state.items()})
        change = self.change(outputs, {})
        most = _MOST.get(self.threshold, self.threshold)
        if change > most:
            raise _untold(f"outputs change by {change:.1g} where weights change by rounding alone")
        return min(_MARGIN * change, most)

    def change(self, outputs: list[Tensor], maps: Maps) -> float:
        """Largest relative difference from what is expected under `maps`."""
        worst = 0.0
        for i, (new, old) in enumerate(zip(outputs, self.expected, strict=True)):
            worst = max(
                worst, relative_difference(new, reordered_output(i, old, self._graph, maps))
            )
        return worst


def _untold(why: str) -> IncompatibleModels:
    return IncompatibleModels(
        "nothing can be told of this graph from weights drawn at random",
        where="check",
        why=why,
        fix="merge with real checkpoints: their own weights are run, before and after",
    )


def _only(maps: Mapping[str, Any], spaces: Collection[str] | None) -> dict[str, Any]:
    return {id: value for id, value in maps.items() if spaces is None or id in spaces}


def _members(graph: LayerGraph, spaces: Collection[str] | None) -> list[Member]:
    members: list[Member] = []
    for space in graph.free():
        # A single unit has nowhere to go.
        if space.size > 1 and (spaces is None or space.id in spaces):
            for tensor, axis in graph.members[space.id]:
                members.append(Member(tensor, axis, space.id))
    return members


def _without(state: State, whole: State, graph: LayerGraph, maps: Maps, member: Member) -> State:
    described = graph.tensors[member.tensor]
    fewer = {id: index for id, index in maps.items() if id != member.space}
    axis_maps = [fewer if d == member.axis else maps for d in range(len(described.axes))]
    left_out = relabel_axes(state[member.tensor], described, axis_maps, graph.spaces)
    names = (member.tensor, *described.aliases)
    return whole | {name: left_out for name in names if name in whole}
