"""The user's module: found by name, built, with inputs to trace it on. This executes user code.

`pkg.mod:factory` and `file.py:factory` call a function (or a module class) without arguments, or
with the checkpoint's shapes; `torchvision:NAME`, `timm:NAME` and `hf:DIR` build a known one. A
factory returns a module, or a module and example inputs (a tensor, a tuple of arguments, or a dict
of keywords). From Python, the factory or the module itself may be given.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import IncompatibleModels, UnreadableInput, UsageError
from ..graph.model import Shapes
from .arch_value import Arch, Factory, arch_label, called_with, copied, takes_shapes
from .example_inputs import example_inputs
from .meta import all_on_meta
from .untie import untie
from .user_code import LIBRARIES, find_callable, hugging_face, names_a_module, split_spec


@dataclass(frozen=True)
class Network:
    """A module and what to call it with.

    Attributes:
        source: What `--arch` says, or what messages call it.
        module: In eval mode.
        args: Example inputs.
        kwargs: Example keyword inputs.
        untied: Its output layer has a weight of its own.
        given: The object that was given in place of a name.
        shapes: Of the checkpoint that it was built for, where its factory takes them.
    """

    source: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    untied: bool = False
    given: Arch | None = None
    shapes: Shapes | None = None

    def again(self, shapes: Shapes | None = None) -> Network:
        """Built again, on the CPU; for other `shapes`, where its factory takes them."""
        arch = self.source if self.given is None else self.given
        wanted = self.shapes if self.shapes is None or shapes is None else shapes
        return build(arch, device="cpu", untied=self.untied, shapes=wanted)


def factory_arguments(arch: Arch) -> dict[str, Any]:
    """Arguments of the user's factory that have defaults; none for a network of another kind."""
    if isinstance(arch, str):
        place, _ = split_spec(arch)
        if not names_a_module(arch) or place in LIBRARIES:
            return {}
        arch = find_callable(arch)
    if isinstance(arch, nn.Module):
        return {}
    try:
        parameters = inspect.signature(arch).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def build(
    arch: Arch, *, device: str, untied: bool = False, shapes: Shapes | None = None
) -> Network:
    """Build the module that `arch` names, in eval mode, on `device` (`meta` holds no weights).

    Args:
        arch: A name, a factory, or a module (of the latter two, a copy of what they give).
        device: Where.
        untied: With an output layer that shares nothing with an embedding.
        shapes: Of the checkpoint's tensors, for a factory that takes them.

    Raises:
        UnreadableInput: No such file, folder or module.
        UsageError: The file has no such factory, or an optional package is missing.
        IncompatibleModels: The factory failed, or returned no module.
    """
    source, where = arch_label(arch), f"--arch {arch_label(arch)}"
    factory: Factory
    if not isinstance(arch, str):
        factory = (lambda: arch) if isinstance(arch, nn.Module) else arch
    elif untied and arch.startswith("hf:"):
        factory = partial(hugging_face, Path(arch.removeprefix("hf:")), untied=True)
    else:
        factory = find_callable(arch)
    shaped = shapes is not None and takes_shapes(factory)
    call = factory if shapes is None else called_with(factory, shapes)
    try:
        with torch.device(device):
            made = call()
    except (UsageError, UnreadableInput):
        raise
    except Exception as error:
        raise _failed(error, where, shaped=shaped) from error
    if not isinstance(arch, str):
        made = copied(made, device)
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise IncompatibleModels(
            "the factory returned no module",
            where=where,
            why=f"it returned a {type(module).__name__}",
            fix="return a torch.nn.Module, or a module and example inputs",
        )
    # On the meta device some constructors make real tensors; and ties are undone before tracing.
    module.eval()
    if device == "meta":
        all_on_meta(module)
    if untied:
        untie(module)
    args, kwargs = example_inputs(module, inputs, where, device)
    arch_object = None if isinstance(arch, str) else arch
    return Network(source, module, args, kwargs, untied, arch_object, shapes if shaped else None)


def _failed(error: Exception, where: str, *, shaped: bool) -> IncompatibleModels:
    fix = "it must work without arguments and return a torch.nn.Module"
    if shaped:
        fix = (
            "it was called with the checkpoint's shapes (a dict of tensor names to tuples), since "
            "it takes one argument, or one called shapes: read the widths from it"
        )
    return IncompatibleModels(
        "the factory failed",
        where=where,
        why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
        fix=fix,
    )
