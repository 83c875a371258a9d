"""One run of a module with given tensors in place of its own, as if it were its first."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.trace.attributes import unchanged


def run_once(
    module: nn.Module,
    state: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """What `module` returns with the tensors of `state`, which may have other widths and dtypes.

    Nothing is left behind: neither tensors nor what the module keeps in attributes. What it draws
    (noise, a latent vector) is the same in every run.

    Args:
        module: In the mode to run it in; left as it is.
        state: By the module's names, tied tensors under each of theirs.
        args: Of the call.
        kwargs: Of the call.
    """
    with _eager(), unchanged(module), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.func.functional_call(
            module, _each_once(module, state), args, dict(kwargs), tie_weights=False
        )


def _eager() -> AbstractContextManager[object]:
    """Nothing is compiled: that takes longer than the one run, and fails under a dispatch mode.

    What compiles (`torch.compile`, `torch.cond`) has loaded the compiler, which takes seconds.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _each_once(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` without the further names of a module that has several.

    Replaced under each of its names, such a module would be left with what replaced it first.
    """
    first = {path for path, _ in module.named_modules()}
    other = {path for path, _ in module.named_modules(remove_duplicate=False)} - first
    return {name: t for name, t in state.items() if name.rpartition(".")[0] not in other}
