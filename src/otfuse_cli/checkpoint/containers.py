"""What lies around a state dict in a file: wrapper keys, name prefixes, other entries.

Works on nested mappings whatever their leaves are; no files here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnreadableInput, UsageError
from .names import shown

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_AVERAGED = re.compile(r"(^|[_.])(ema|swa)([_.]|$)", re.IGNORECASE)
_NO_MODEL = re.compile(r"optim|sched|scaler", re.IGNORECASE)
_MAX_DEPTH = 8
_SHOWN = 8

IsLeaf = Callable[[Any], bool]


@dataclass(frozen=True)
class Container:
    """How a file holds its state dict: all that is needed to write another one like it.

    Attributes:
        format: What holds it (see `Contents.form`): `safetensors`, `pt`, `dcp`, ...
        wrapper: Keys that lead to the state dict, outermost first.
        prefix: What was stripped from every name.
        keys: Clean names in file order, tied ones included.
        versions: The state dict's `_metadata` (module -> its entries), which some modules' loading
            depends on; `None` where the file has none.
    """

    format: str
    wrapper: tuple[str, ...] = ()
    prefix: str = ""
    keys: tuple[str, ...] = ()
    versions: Mapping[str, Mapping[str, int | str | None]] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        around = ", ".join([*self.wrapper, *([self.prefix] if self.prefix else [])])
        return f"{self.format} ({around})" if around else self.format


def find_state_dict(
    root: Any, *, key: str | None, label: str, is_leaf: IsLeaf
) -> tuple[tuple[str, ...], Mapping[Any, Any]]:
    """The state dict inside `root` and the keys that lead to it.

    Raises:
        UsageError: `key` leads nowhere, or several entries could be meant.
        UnreadableInput: There are no tensors.
    """
    if is_leaf(root):
        raise _no_tensors(label, "it holds a single tensor, not a state dict")
    path: list[str] = []
    table: Any = root
    if key is not None:
        path, table = _follow(root, key, label, is_leaf)
    while isinstance(table, Mapping) and len(path) <= _MAX_DEPTH:
        name = _inner(table, label, is_leaf)
        if name is None:
            break
        path.append(name)
        table = table[name]
    if not isinstance(table, Mapping):
        raise _no_tensors(label, f"it holds a {type(table).__name__}, not a state dict")
    if not any(isinstance(name, str) and is_leaf(value) for name, value in table.items()):
        raise _no_tensors(label, f"its entries are {_listed(table)}" if table else "it is empty")
    return tuple(path), table


def versions_of(metadata: Any) -> dict[str, dict[str, int | str | None]] | None:
    """The plain part of a state dict's `_metadata`, or `None` if there is none."""
    if not isinstance(metadata, Mapping):
        return None
    return {
        module: {
            name: value
            for name, value in entries.items()
            if isinstance(name, str) and isinstance(value, int | str | None)
        }
        for module, entries in metadata.items()
        if isinstance(module, str) and isinstance(entries, Mapping)
    }


def _inner(table: Mapping[Any, Any], label: str, is_leaf: IsLeaf) -> str | None:
    """The entry of `table` that is, or wraps, the state dict; `None` if `table` is it."""
    choices = _choices(table, is_leaf)
    known = [name for name in choices if name in _WRAPPERS]
    averaged = [name for name in choices if _AVERAGED.search(name)]
    if len(known) == 1 and not averaged:
        return known[0]
    if known:
        raise _ambiguous(label, [*known, *averaged])
    # Any other name will do when nothing else can be meant: `net`, `params`, `weights`.
    plain = [
        name
        for name in choices
        if not _NO_MODEL.search(name) and _looks_like_state_dict(table[name], is_leaf)
    ]
    if len(plain) > 1:
        raise _ambiguous(label, plain)
    return plain[0] if plain else None


def _choices(table: Mapping[Any, Any], is_leaf: IsLeaf) -> list[str]:
    """Entries with tensors inside, but for those that a module's own state dict can have."""
    return [
        name
        for name, value in table.items()
        if isinstance(name, str)
        and not name.endswith("_extra_state")
        and isinstance(value, Mapping)
        and _holds_tensors(value, is_leaf, set(), 0)
    ]


def _looks_like_state_dict(table: Mapping[Any, Any], is_leaf: IsLeaf) -> bool:
    return any(
        isinstance(name, str)
        and (is_leaf(value) or (name in _WRAPPERS and isinstance(value, Mapping)))
        for name, value in table.items()
    )


def _holds_tensors(table: Mapping[Any, Any], is_leaf: IsLeaf, seen: set[int], depth: int) -> bool:
    if id(table) in seen or depth > _MAX_DEPTH:
        return False
    seen.add(id(table))
    return any(
        is_leaf(value)
        or (isinstance(value, Mapping) and _holds_tensors(value, is_leaf, seen, depth + 1))
        for value in table.values()
    )


def _follow(root: Any, key: str, label: str, is_leaf: IsLeaf) -> tuple[list[str], Any]:
    """Walk a dotted key; an entry whose own name has dots goes before its parts."""
    path: list[str] = []
    table, rest = root, key
    while rest:
        if not isinstance(table, Mapping):
            break
        parts = rest.split(".")
        heads = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        head = next((h for h in heads if isinstance(table.get(h), Mapping)), None)
        if head is None:
            break
        path.append(head)
        table, rest = table[head], rest[len(head) + 1 :]
    if rest or not path:
        choices = _choices(root, is_leaf) if isinstance(root, Mapping) else []
        raise UsageError(
            "no such entry in the checkpoint",
            where=f"{label}, --key {key}",
            why=f"entries with tensors: {_joined(choices)}"
            if choices
            else "its tensors are not inside an entry",
            fix="name one of them" if choices else "leave --key away for this file",
        )
    return path, table


def _listed(table: Mapping[Any, Any]) -> str:
    names = [name for name in table if isinstance(name, str)]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return _joined(names) + more if names else "not named"


def _joined(names: list[str]) -> str:
    return ", ".join(shown(name, 80) for name in names[:_SHOWN])


def _ambiguous(label: str, choices: list[str]) -> UsageError:
    return UsageError(
        "several state dicts in one checkpoint",
        where=label,
        why=f"any of these could be meant: {_joined(choices)}",
        fix=f"choose one, for example --key {_joined(choices[:1])}",
    )


def _no_tensors(label: str, why: str) -> UnreadableInput:
    return UnreadableInput(
        "no tensors found",
        where=label,
        why=why,
        fix="save a state dict: torch.save(model.state_dict(), 'weights.pt')",
    )
