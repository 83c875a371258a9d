"""What lies beside the weights in a torch file, as far as it can be carried into another one.

Plain values and tensors can. An entry of the file is carried whole or left out and named: half an
optimizer is worse than none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .contents import Contents, Entry, is_leaf, plain_leaf
from .disk import Extent
from .formats.rebuild import Unsupported
from .formats.symbols import Foreign, Symbol, dtype_of
from .formats.unpickle import Bag, Table
from .names import shown

_PLAIN = (str, int, float, bytes, bool, complex, type(None), torch.dtype, torch.Size)
_MOST_LEVELS = 64  # of nesting: deeper than any config, and far from Python's own limit


@dataclass(frozen=True)
class Extras:
    """Other entries of a container, and its own that lie inside the state dict.

    Attributes:
        levels: For every wrapper key, outermost first: (key, all entries beside it, in order; the
            key itself stands for what it wraps).
        inside: Entries of the state dict that are no tensors: full name to value.
        left_out: Entries that can't be carried: where, and why.
    """

    levels: tuple[tuple[Any, Mapping[Any, Any]], ...]
    inside: Mapping[Any, Any]
    left_out: tuple[str, ...]

    def around(self, state: dict[str, Any]) -> Any:
        """The container with `state` as its state dict."""
        value: Any = state
        value.update({k: v for k, v in self.inside.items() if k not in state})
        for key, entries in reversed(self.levels):
            value = {k: value if k == key else v for k, v in entries.items()}
        return value


class _NotPlainError(Exception):
    """What can't be carried, in words."""


def extras_of(contents: Contents, wrapper: tuple[str, ...]) -> Extras:
    """All that `contents` hold beside the tensors of the state dict that `wrapper` leads to.

    Raises:
        UnreadableInput: A tensor among them is broken.
    """
    carrier = _Carrier(contents)
    levels = []
    table: Any = contents.root
    path: list[str] = []
    for key in wrapper:
        entries = carrier.entries(table, path, skip=lambda k, v, key=key: k == key)
        entries = {k: entries.get(k) for k in table if k == key or k in entries}
        levels.append((key, entries))
        table = table[key]
        path.append(key)
    inside = carrier.entries(table, path, skip=lambda _, value: is_leaf(value))
    return Extras(tuple(levels), inside, tuple(carrier.left_out))


class _Carrier:
    """From inert records to values that `torch.save` writes."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._tensors: dict[Any, torch.Tensor] = {}
        self.left_out: list[str] = []

    def entries(self, table: Mapping[Any, Any], path: list[str], skip: Any) -> dict[Any, Any]:
        """The entries of a table that can be carried; the others are noted."""
        carried = {}
        for key, value in table.items():
            if skip(key, value):
                continue
            name = ".".join([*path, shown(key, 80) if isinstance(key, str) else "(an entry)"])
            try:
                carried[self._key(key)] = self._value(value, 0)
            except _NotPlainError as error:
                self.left_out.append(f"{name} ({error})")
        return carried

    def _value(self, value: Any, depth: int = 0) -> Any:
        if depth > _MOST_LEVELS:
            raise _NotPlainError("nested too deeply, or inside itself")
        if isinstance(value, _PLAIN):
            return value
        if is_leaf(value):
            return self._tensor(value)
        if isinstance(value, Symbol):
            return _require(dtype_of(value), f"names {value}")
        if isinstance(value, Foreign):
            return self._foreign(value)
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, Bag | set):
            return {self._key(v) for v in value}
        if type(value) in (list, tuple):
            return type(value)(self._value(v, depth + 1) for v in value)
        raise _NotPlainError(f"a {shown(type(value).__name__)}")

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
        if isinstance(value, Table):
            _require(value.cls is None, f"a {value.cls}")
        elif type(value) not in (dict, OrderedDict):
            raise _NotPlainError(f"a {shown(type(value).__name__)}")
        return {self._key(k): self._value(v, depth + 1) for k, v in value.items()}

    def _key(self, key: Any) -> Any:
        if not isinstance(key, str | int | float | bytes | bool | type(None)):
            raise _NotPlainError("a key that is neither text nor a number")
        return key

    def _tensor(self, value: Any) -> torch.Tensor:
        leaf = plain_leaf(value) if isinstance(value, torch.Tensor) else value
        if isinstance(leaf, Unsupported):
            raise _NotPlainError(leaf.reason)
        entry: Entry = self._contents.locate("an entry beside the weights", leaf)
        # One tensor under two names stays one.
        key = entry if isinstance(entry, Extent) else id(value)
        if key not in self._tensors:
            self._tensors[key] = self._contents.read(entry)
        return self._tensors[key]

    def _foreign(self, value: Foreign) -> Any:
        """The few calls of which the result is known without making them."""
        name = "" if value.symbol is None else str(value.symbol).replace("__builtin__", "builtins")
        match name, value.args:
            case "builtins.set", ([*items],):
                return {self._key(item) for item in items}
            case "torch.Size", ((*sizes,),) if all(type(n) is int for n in sizes):
                return torch.Size(sizes)
            case "_codecs.encode", (str(text), "latin1") if text.isascii() or max(text) < "\u0100":
                return text.encode("latin1")
        raise _NotPlainError(f"a {value.cls}" if value.cls else "an object")


def _require(value: Any, otherwise: str) -> Any:
    if not value:
        raise _NotPlainError(otherwise)
    return value
