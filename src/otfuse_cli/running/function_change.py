"""How much the outputs of a network change: between two states, up to the order of their units.

The function check on real maps runs the source before and after it is aligned; what comes out may
differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.model import LayerGraph
from ..graph.trace.export_settings import eval_mode, no_fast_path, without_cache
from ..graph.trace.network_outputs import pick_outputs
from .once import run_once
from .precision import FLOAT32, Precision, as_dtype, in_double
from .relabel import Maps, axis_index

State = dict[str, Tensor]


def function_change(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    graph: LayerGraph | None = None,
    maps: Maps | None = None,
    other: nn.Module | None = None,
) -> float:
    """Largest relative change of the outputs between two states of one module.

    The function check on real maps: `before` is the source, `after` its aligned form. Where the
    graph lets the units of outputs move, they are expected in the order of `maps`. `after` may
    be run in another module.
    """
    last = module if other is None else other
    keywords = without_cache(module, dict(kwargs or {}))
    with eval_mode(module), eval_mode(last), no_fast_path(), torch.no_grad():
        old, new = (
            run_state(run, as_dtype((args, keywords, dict(state)), dtype))
            for run, state in ((module, before), (last, after))
        )
    if graph is not None and maps is not None:
        old = [reordered_output(i, y, graph, maps) for i, y in enumerate(old)]
    return max((relative_difference(b, a) for a, b in zip(old, new, strict=True)), default=0.0)


def outputs_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """What the network puts out with the tensors of `state`, computed in `dtype`."""
    keywords = without_cache(module, dict(kwargs or {}))
    with eval_mode(module), no_fast_path(), torch.no_grad():
        return run_state(module, as_dtype((args, keywords, dict(state)), dtype))


@dataclass(frozen=True)
class Change:
    """How much outputs changed, relative to the largest, and how much rounding may change them."""

    error: float
    allowed: float


def change_allowed(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    *,
    graph: LayerGraph | None = None,
    maps: Maps | None = None,
    other: nn.Module | None = None,
) -> Change:
    """`function_change` in float64, where the network can; in float32 where its kernels can't.

    Likewise where what it computes is a number in float32 only: masks by the largest number of a
    type overflow where they meet a constant of another one.

    Raises:
        RuntimeError: The network doesn't run on these tensors (ValueError likewise).
    """
    called = module, args, kwargs

    def change(dtype: torch.dtype) -> Change:
        error = function_change(
            *called, before, after, dtype=dtype, graph=graph, maps=maps, other=other
        )
        if error == inf and dtype is not torch.float32 and _is_undefined(*called, before, dtype):
            raise ValueError("what it computes is not a number in this type")
        # Some networks compute in half precision, whatever they are given.
        rough = error > FLOAT32 and rounding(*called, before, dtype=dtype)
        return Change(error, rough or FLOAT32)

    return in_double(change, failures=(RuntimeError, ValueError))


def _is_undefined(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> bool:
    """Whether an output has an entry that is not a number."""
    keywords = without_cache(module, dict(kwargs or {}))
    with eval_mode(module), no_fast_path(), torch.no_grad():
        outputs = run_state(module, as_dtype((args, keywords, dict(state)), dtype))
    return any(bool(torch.isnan(y).any()) for y in outputs)


def rounding(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float64,
) -> float:
    """The relative error that the least precise type which the module computes in allows.

    At least that of float32: what `function_change` is compared to.
    """
    keywords = without_cache(module, dict(kwargs or {}))
    with eval_mode(module), no_fast_path(), torch.no_grad(), Precision(dtype) as precision:
        run_state(module, as_dtype((args, keywords, dict(state)), dtype))
    allowed: float = precision.allowed
    return max(allowed, FLOAT32)


def run_state(
    module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any], State]
) -> list[Tensor]:
    """The outputs of one call (arguments, keywords, tensors), as tensors of their own."""
    args, kwargs, state = call
    outputs = run_once(module, state, args, kwargs)
    return [y.detach().clone() for y in pick_outputs(outputs)]


def reordered_output(number: int, output: Tensor, graph: LayerGraph, maps: Maps) -> Tensor:
    """An output with its free units in the order of `maps`."""
    for at, d, axis in graph.outputs:
        if at == number:
            output = output.index_select(d, axis_index(axis, maps, graph.spaces))
    return output


def relative_difference(new: Tensor, old: Tensor) -> float:
    """Largest change of an entry, relative to the largest finite entry of `old`; NaN is infinite.

    Equal infinities count as no change: some networks mark what they rule out by them. Another
    shape is an infinite change: a detector finds more objects, or fewer.
    """
    if new.shape != old.shape:
        return inf
    if new.numel() == 0:
        return 0.0
    a, b = new.double(), old.double()
    gap = torch.where(a == b, 0.0, (a - b).abs())
    scale = b[torch.isfinite(b)].abs().max() if bool(torch.isfinite(b).any()) else torch.tensor(1.0)
    worst = float(gap.max() / scale.clamp_min(1e-30))  # outputs of zeros: any change is large
    return inf if isnan(worst) else worst
