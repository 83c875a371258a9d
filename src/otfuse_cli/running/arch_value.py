"""What `--arch` may be: a name, or from Python a factory or a module; and how a factory is called.

A factory that takes the checkpoint's shapes builds a network for each set of widths.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..graph.model import Shapes

Factory = Callable[..., Any]
Arch = str | nn.Module | Factory


def arch_label(arch: Arch) -> str:
    """What messages and reports call it: the name itself, or where an object was defined."""
    if isinstance(arch, str):
        return arch
    while isinstance(arch, partial):
        arch = arch.func
    named = arch if hasattr(arch, "__qualname__") else type(arch)
    return f"{named.__module__}:{named.__qualname__}"


def takes_shapes(make: Factory) -> bool:
    """Whether a factory is given the shapes: by an argument called so, or by the one it needs."""
    return _shapes_argument(make) is not None


def called_with(make: Factory, shapes: Shapes) -> Factory:
    """`make` as a function without arguments, given the shapes where it takes them.

    `shapes` maps names of the checkpoint's tensors to tuples; each call gets a dict of its own.
    """
    name = _shapes_argument(make)
    if name is None:
        return make
    if not name:
        return lambda: make(dict(shapes))
    return lambda: make(**{name: dict(shapes)})


def copied(made: Any, device: str) -> Any:
    """What an object of the user's gave, as a copy on `device`: theirs is left as it is."""
    if isinstance(made, tuple) and len(made) == 2:
        return copied(made[0], device), made[1]
    if not isinstance(made, nn.Module):
        return made
    # Moved tensor by tensor within the copy, so that there is never a second one on the first
    # device; what is tied stays tied.
    memo: dict[int, Any] = {}
    for tensor in (*made.parameters(), *made.buffers()):
        moved: Tensor = tensor.detach().to(device, copy=True)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = moved
    return copy.deepcopy(made, memo)


def _shapes_argument(make: Factory) -> str | None:
    """The argument that takes shapes: a keyword, `` for the first position; None for none."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # written in C
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters:
        if parameter.name == "shapes" and parameter.kind not in many:
            return "" if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else "shapes"
    needed = [p for p in parameters if p.default is p.empty and p.kind not in many]
    one = len(needed) == 1 and needed[0].kind in positional
    return "" if one else None
