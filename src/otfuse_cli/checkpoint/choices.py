"""Which entry of a file is the state dict: the one that is, none, or several that could be meant.

Two entries whose tensors have the same names and shapes are a choice, whatever they are called; so
is anything that is called an average and has tensors of the same shapes. No files here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# How messages and `--key` call the file's own level.
TOP = "."
WRAPPERS = ("state_dict", "model_state_dict", "model")
_AVERAGED = re.compile(
    r"(^|[_.-])(ema|swa|avg|averaged?|averages|shadow|polyak|teacher|lookahead)([_.-]|\d|$)",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(r"optim|sched|scaler", re.IGNORECASE)
_MAX_DEPTH = 8  # wrappers in wrappers; a file may even contain itself

Shape = tuple[int, ...]
Named = dict[str, Shape]


@dataclass(frozen=True)
class Kinds:
    """What the leaves of a file are.

    Attributes:
        is_leaf: Whether a value describes a tensor.
        module_class: The class of a whole module with tensors in it; None for anything else.
    """

    is_leaf: Callable[[Any], bool]
    module_class: Callable[[Any], str | None]


class AmbiguousError(Exception):
    """Several entries could be meant: their names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names


def inner(table: Mapping[Any, Any], kinds: Kinds) -> str | None:
    """The entry of `table` that is, or wraps, the state dict; `None` if `table` is it.

    Raises:
        AmbiguousError: Nobody can say.
    """
    chosen = _chosen(table, kinds)
    if chosen is not None and (rivals := _rivals(table, chosen, kinds)):
        raise AmbiguousError([chosen, *rivals])
    return chosen


def holding_tensors(table: Mapping[Any, Any], kinds: Kinds) -> list[str]:
    """Entries that are mappings with tensors inside, but for those of a module's own state dict."""
    return [
        name
        for name, value in table.items()
        if isinstance(name, str)
        and not name.endswith("_extra_state")
        and isinstance(value, Mapping)
        and any(True for _ in tensors_in(value, kinds))
    ]


def tensors_in(value: Any, kinds: Kinds) -> Iterator[tuple[str, Any]]:
    """Every tensor inside mappings and lists, with its dotted name."""
    seen: set[int] = set()
    pending: list[tuple[str, Any, int]] = [("", value, 0)]
    while pending:
        name, item, depth = pending.pop()
        if kinds.is_leaf(item):
            yield name, item
        elif isinstance(item, Mapping | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            if depth <= _MAX_DEPTH:
                pairs = item.items() if isinstance(item, Mapping) else enumerate(item)
                pending += [(f"{name}.{k}" if name else f"{k}", v, depth + 1) for k, v in pairs]


def _chosen(table: Mapping[Any, Any], kinds: Kinds) -> str | None:
    entries = holding_tensors(table, kinds)
    usual = [name for name in entries if name in WRAPPERS]
    if len(usual) > 1:
        raise AmbiguousError(usual)
    if usual:
        return usual[0]
    # Any other name will do when nothing else can be meant: `net`, `params`, `weights`.
    models = [name for name in entries if not _NO_MODEL.search(name)]
    plain = [name for name in models if _looks_like_state_dict(table[name], kinds)]
    if _has_weights(table, kinds):
        # It is one itself; what lies in it is company, unless it looks like weights as well.
        plain = [name for name in plain if _has_weights(table[name], kinds)]
        if plain:
            raise AmbiguousError([TOP, *plain])
        return None
    if len(plain) > 1:
        raise AmbiguousError(plain)
    if plain:
        return plain[0]
    if any(map(kinds.is_leaf, table.values())):
        return None
    # `{"ema": {"module": ...}}`: nothing but wrappers.
    models = [name for name in models if _leads_to_state_dict(table[name], kinds)]
    if len(models) > 1:
        raise AmbiguousError(models)
    return models[0] if models else None


def _rivals(table: Mapping[Any, Any], chosen: str, kinds: Kinds) -> list[str]:
    """Other entries that hold the same model, or may."""
    wanted = _shapes(table[chosen], kinds)
    tails = _tails(wanted)
    rivals = []
    for name, value in table.items():
        if not isinstance(name, str) or name == chosen or _NO_MODEL.search(name):
            continue
        if kinds.module_class(value) is not None:
            rivals.append(name)
            continue
        if not isinstance(value, Mapping | list | tuple):
            continue
        shapes = _shapes(value, kinds)
        if isinstance(value, Mapping) and "param_groups" in value:
            continue
        if isinstance(value, Mapping) and _same_names(shapes, wanted, tails):
            rivals.append(".".join([name, *_deepest(value, wanted, tails, kinds)]))
        elif _AVERAGED.search(name) and _same_shapes(shapes, wanted):
            rivals.append(name)
    return rivals


def _deepest(
    table: Mapping[Any, Any], wanted: Named, tails: set[tuple[str, Shape]], kinds: Kinds
) -> list[str]:
    """Names that lead to the one mapping inside that holds the model."""
    path: list[str] = []
    while len(path) < _MAX_DEPTH:
        alike = [
            (name, value)
            for name, value in table.items()
            if isinstance(name, str)
            and isinstance(value, Mapping)
            and _same_names(_shapes(value, kinds), wanted, tails)
        ]
        if len(alike) != 1:
            break
        name, table = alike[0]
        path.append(name)
    return path


def _shapes(value: Any, kinds: Kinds) -> Named:
    """Shapes of all tensors with axes; what can't be fused has none."""
    shapes = {name: tuple(getattr(t, "shape", ())) for name, t in tensors_in(value, kinds)}
    return {name: shape for name, shape in shapes.items() if shape}


def _tails(named: Named) -> set[tuple[str, Shape]]:
    """Every name with its shape, and what is left of it without prefixes."""
    tails = set()
    for name, shape in named.items():
        parts = name.split(".")
        for at in range(len(parts)):
            tails.add((".".join(parts[at:]), shape))
    return tails


def _same_names(held: Named, wanted: Named, tails: set[tuple[str, Shape]]) -> bool:
    """Whether most of the model's tensors are there, whatever stands before their names."""
    theirs = _tails(held)
    forward = sum((name, shape) in theirs for name, shape in wanted.items())
    backward = sum((name, shape) in tails for name, shape in held.items())
    return bool(wanted) and 2 * max(forward, backward) >= len(wanted)


def _same_shapes(held: Named, wanted: Named) -> bool:
    """Whether most of the model's shapes are there, whatever the tensors are called."""
    common = Counter(held.values()) & Counter(wanted.values())
    return bool(wanted) and 2 * common.total() >= len(wanted)


def _looks_like_state_dict(table: Mapping[Any, Any], kinds: Kinds) -> bool:
    return any(
        isinstance(name, str)
        and (kinds.is_leaf(value) or (name in WRAPPERS and isinstance(value, Mapping)))
        for name, value in table.items()
    )


def _leads_to_state_dict(table: Mapping[Any, Any], kinds: Kinds, depth: int = 0) -> bool:
    """Whether names alone lead to one, as they don't in an optimizer's numbered state."""
    if _looks_like_state_dict(table, kinds):
        return True
    inside = (v for n, v in table.items() if isinstance(n, str) and isinstance(v, Mapping))
    return depth < _MAX_DEPTH and any(_leads_to_state_dict(v, kinds, depth + 1) for v in inside)


def _has_weights(table: Mapping[Any, Any], kinds: Kinds) -> bool:
    """Whether its own tensors are a layer's: named by a path, or matrices."""
    return any(
        isinstance(name, str)
        and kinds.is_leaf(value)
        and ("." in name or len(getattr(value, "shape", ())) > 1)
        for name, value in table.items()
    )
