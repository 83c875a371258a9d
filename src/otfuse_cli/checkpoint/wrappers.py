"""What lies around a state dict in a file: wrapper keys, name prefixes, other entries.

Works on nested mappings whatever their leaves are; no files here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnreadableInput, UsageError
from .choices import TOP, AmbiguousError, Kinds, holding_tensors, inner
from .formats.symbols import Foreign
from .names import shown

SAVE_STATE_DICT = "torch.save(model.state_dict(), 'weights.pt')"

_MAX_DEPTH = 8  # wrappers in wrappers; a file may even contain itself
_SHOWN = 8  # names in one message


@dataclass(frozen=True)
class Container:
    """How a file holds its state dict: all that is needed to write another one like it.

    Attributes:
        format: What holds it (see `Contents.form`): `safetensors`, `pt`, `dcp`, ...
        wrapper: Keys that lead to the state dict, outermost first.
        prefix: What was stripped from every name.
        keys: Clean names in file order, tied ones included.
        spelled: The stored name of a clean one, where it is not `prefix` and the name.
        beside: Tensors of a wrapper's own among the model's, by their stored names.
        versions: The state dict's `_metadata` (module -> its entries), which some modules' loading
            depends on; `None` where the file has none.
    """

    format: str
    wrapper: tuple[str, ...] = ()
    prefix: str = ""
    keys: tuple[str, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict, repr=False)
    beside: Mapping[str, Any] = field(default_factory=dict, repr=False)
    versions: Mapping[str, Mapping[str, int | str | None]] | None = field(default=None, repr=False)

    def stored_name(self, name: str) -> str:
        """What the file calls the tensor of a clean name."""
        return self.spelled.get(name, self.prefix + name)

    def __str__(self) -> str:
        around = ", ".join([*self.wrapper, *([self.prefix] if self.prefix else [])])
        return f"{self.format} ({around})" if around else self.format


def find_state_dict(
    root: Any, *, key: str | tuple[str, ...] | None, label: str, kinds: Kinds, bare: bool = False
) -> tuple[tuple[str, ...], Mapping[Any, Any], bool]:
    """The state dict inside `root`, the keys that lead to it, and whether `key` did.

    Args:
        root: The value of the file.
        key: The dotted name of an entry; a tuple is the whole path, and nothing is guessed.
        label: What messages call the file.
        kinds: What its leaves are.
        bare: The key is meant for several files: one without a choice doesn't need it.

    Raises:
        UsageError: `key` leads nowhere, or several entries could be meant.
        UnreadableInput: There are no tensors, or only those of a whole module.
    """
    if kinds.is_leaf(root):
        raise _no_tensors(label, "it holds a single tensor, not a state dict")
    if isinstance(key, tuple):
        table: Any = root
        for name in key:
            table = table[name]
        return key, _require_tensors(table, label, kinds), True
    path: list[str] = []
    table, used = root, key is not None
    if key is not None and key != TOP:
        try:
            path, table = _follow(root, key, label, kinds)
        except UsageError as error:
            if not bare:
                raise
            try:
                return find_state_dict(root, key=None, label=label, kinds=kinds)
            except UsageError:
                raise error from None
    while key != TOP and isinstance(table, Mapping) and len(path) <= _MAX_DEPTH:
        try:
            entry = inner(table, kinds)
        except AmbiguousError as error:
            names = [".".join([*path, n]) if n != TOP or path else n for n in error.names]
            raise _ambiguous(label, root, names, kinds) from error
        if entry is None:
            break
        path.append(entry)
        table = table[entry]
    return tuple(path), _require_tensors(table, label, kinds), used


def _require_tensors(table: Any, label: str, kinds: Kinds) -> Mapping[Any, Any]:
    """A state dict: a mapping with tensors in it, and no module."""
    cls = kinds.module_class(table)
    values = table.values() if isinstance(table, Mapping) else ()
    cls = cls or next((c for value in values if (c := kinds.module_class(value))), None)
    if cls is not None:
        raise _whole_module(label, cls)
    if isinstance(table, Foreign):
        raise _no_tensors(label, f"it holds an object of class {table.cls}, not a state dict")
    if not isinstance(table, Mapping):
        raise _no_tensors(label, f"it holds a {type(table).__name__}, not a state dict")
    if not any(isinstance(name, str) and kinds.is_leaf(value) for name, value in table.items()):
        cls = next((c for value in _everything(table) if (c := kinds.module_class(value))), None)
        if cls is not None:
            raise _whole_module(label, cls)
        raise _no_tensors(label, f"its entries are {_listed(table)}" if table else "it is empty")
    return table


def _everything(table: Any) -> Iterator[Any]:
    """All values inside mappings and lists."""
    seen: set[int] = set()
    pending = [table]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, Mapping) else value


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


def _follow(root: Any, key: str, label: str, kinds: Kinds) -> tuple[list[str], Any]:
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
        choices = holding_tensors(root, kinds) if isinstance(root, Mapping) else []
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


def _ambiguous(label: str, root: Any, names: list[str], kinds: Kinds) -> UsageError:
    modules = [name for name in names if kinds.module_class(_at(root, name)) is not None]
    others = [name for name in names if name not in modules]
    listed = [f"{shown(n, 80)} (a whole module)" if n in modules else n for n in names]
    return UsageError(
        "several state dicts in one checkpoint",
        where=label,
        why=f"any of these could be meant: {_joined(listed)}",
        fix=f"choose one, for example --key {_joined((others or names)[:1])} (of one file among "
        "several: --key INDEX=NAME)",
    )


def _at(root: Any, name: str) -> Any:
    for part in name.split("."):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def _whole_module(label: str, cls: str) -> UnreadableInput:
    return UnreadableInput(
        "a whole module, not a state dict",
        where=label,
        why=f"it holds an object of class {cls}, which only that class's own code could load",
        fix=f"where the class is defined, load it and save its weights: {SAVE_STATE_DICT}",
    )


def _no_tensors(label: str, why: str) -> UnreadableInput:
    return UnreadableInput(
        "no tensors found",
        where=label,
        why=why,
        fix=f"save a state dict: {SAVE_STATE_DICT}",
    )
