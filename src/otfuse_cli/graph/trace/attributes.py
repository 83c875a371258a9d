"""What a module keeps outside its tensors while it runs: put back, so that no run sees another's.

A module may keep what it derives from its weights (an attention bias, a folded kernel, rotary
tables) in attributes. Run on other weights it would answer with those of the first run, and while
it is exported it would keep tensors without values.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# What every module has beside its buffers: parameters, children, hooks. Runs don't write there.
_MACHINERY = frozenset(vars(nn.Module())) - {"_buffers"}


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Leave the attributes of `module` and of all modules in it as they are found.

    Containers are put back with what they held. Methods that remember results by their arguments
    (`functools.lru_cache`) forget them: an argument is the module, never its weights.
    """
    inside = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
    held: dict[int, tuple[Any, Any]] = {}
    for one in inside:
        own = vars(one)
        held[id(own)] = own, own.copy()
        for name, value in own.items():
            if name not in _MACHINERY:
                _note(value, held)
    _forget(inside)
    try:
        yield
    finally:
        for container, content in held.values():
            _put_back(container, content)
        _forget(inside)


def _note(value: Any, held: dict[int, tuple[Any, Any]]) -> None:
    """Remember what a container and the containers in it hold."""
    if id(value) in held or not isinstance(value, (dict, list, set)):
        return
    held[id(value)] = value, value.copy()
    for item in list(value.values()) if isinstance(value, dict) else value:
        _note(item, held)


def _put_back(container: Any, content: Any) -> None:
    if isinstance(container, MutableMapping):
        same = len(container) == len(content) and all(
            key in container and container[key] is value for key, value in content.items()
        )
    else:
        same = len(container) == len(content) and all(
            a is b for a, b in zip(container, content, strict=True)
        )
    if same:
        return
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _forget(inside: list[nn.Module]) -> None:
    for kind in {type(m) for m in inside}:
        for owner in kind.__mro__:
            if owner.__module__.partition(".")[0] == "torch":
                continue
            for value in vars(owner).values():
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()
