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
    contents: dict[int, tuple[Any, Any]] = {}
    for one in inside:
        attributes = vars(one)
        # By identity: two containers may be equal, and a container may hold itself.
        contents[id(attributes)] = attributes, attributes.copy()
        for name, value in attributes.items():
            if name not in _MACHINERY:
                _note(value, contents)
    _forget(inside)
    try:
        yield
    finally:
        for container, content in contents.values():
            _put_back(container, content)
        _forget(inside)


def _note(value: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Remember what a container and the containers in it hold."""
    if id(value) in contents or not isinstance(value, (dict, list, set)):
        return
    contents[id(value)] = value, value.copy()
    for item in list(value.values()) if isinstance(value, dict) else value:
        _note(item, contents)


def _put_back(container: Any, content: Any) -> None:
    # Untouched ones stay untouched: a container of the user's may do more than hold things.
    if _same(container, content):
        return
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _same(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects that it held before."""
    if len(container) != len(content):
        return False
    if isinstance(container, MutableMapping):
        for key, value in content.items():
            if key not in container or container[key] is not value:
                return False
        return True
    return all(a is b for a, b in zip(container, content, strict=True))


def _forget(inside: list[nn.Module]) -> None:
    for kind in {type(m) for m in inside}:
        for owner in kind.__mro__:
            if owner.__module__.partition(".")[0] == "torch":
                continue  # torch's own caches hold nothing of a single network
            for value in vars(owner).values():
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()
