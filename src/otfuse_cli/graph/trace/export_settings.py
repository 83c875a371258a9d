"""Settings around a run of the user's module: all of them are put back as they were."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

import torch
from torch import nn

from .attributes import unchanged

# They log what the error that follows says better.
LOUD = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor", "torch.export")


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without what was cached in it; afterwards the modes and caches of before."""
    training = {m: m.training for m in module.modules()}
    # An exported program has one mode, and refuses to be asked for another.
    with suppress(NotImplementedError):
        module.train()  # modules that cache what they derive in evaluation drop it here
        module.eval()
    try:
        with unchanged(module):
            yield
    finally:
        for m, mode in training.items():
            m.training = mode


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings that torch.export gives about itself: nobody here can act on them."""
    levels = {name: logging.getLogger(name).level for name in LOUD}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
        warnings.filterwarnings("ignore", r"The tensor attributes? self\.", UserWarning)
        # What they log as errors is raised as well, and said in our words then.
        for name in LOUD:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


@contextmanager
def without_lines(*, skip: bool) -> Iterator[None]:
    """With `skip`, operations don't remember which line made them: half of the time of an export.

    Releases of torch that lack the setting remember them all the same.
    """
    before = getattr(torch.fx.config, "do_not_emit_stack_traces", False)
    torch.fx.config.do_not_emit_stack_traces = skip
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


@contextmanager
def own_output() -> Iterator[None]:
    """What the module prints goes to stderr; the partial graph of a failed export nowhere."""
    printed, partial = io.StringIO(), ""
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            yield
    except Exception as error:
        partial = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        text = printed.getvalue()
        sys.stderr.write(text.replace(partial, "").rstrip("\n") if partial else text)


@contextmanager
def no_fast_path() -> Iterator[None]:
    """The fused encoder layer hides its parts from the rules."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def without_cache(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A key-value cache is state that export can't return; nobody needs it for one pass."""
    forward = inspect.signature(module.forward)
    if "use_cache" in forward.parameters:
        kwargs.setdefault("use_cache", False)
    return kwargs
