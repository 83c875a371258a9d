"""Sizes that shapes don't tell: given in the spec, found in config.json, or not known at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import IncompatibleModels
from .axes import Unit, axis_units
from .covers import Cover
from .patterns import Pattern
from .spec import Spec

Config = Mapping[str, Any]


def given_sizes(
    spec: Spec, spaces: Iterable[str], config: Config | None
) -> tuple[dict[str, tuple[int, str]], dict[str, tuple[str, ...]]]:
    """What the spec or config.json say of the sizes of `spaces`.

    Returns:
        Size and source by space; and the spaces whose size only a config.json could tell, with
        the keys that it lacks.

    Raises:
        IncompatibleModels: config.json holds something else than a positive number there.
    """
    known: dict[str, tuple[int, str]] = {}
    unknown: dict[str, tuple[str, ...]] = {}
    rules = [(Pattern(pattern), value) for pattern, value in spec.sizes.items()]
    for space in spaces:
        value = next((v for pattern, v in rules if pattern.match(space)), None)
        if isinstance(value, int):
            known[space] = value, "sizes:"
        elif value is not None:
            key = next((k for k in value if (config or {}).get(k) is not None), None)
            if config is None or key is None:
                unknown[space] = value
            else:
                known[space] = _positive(config[key], key), f"{key} of config.json"
    return known, unknown


def _positive(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise IncompatibleModels(
            "config.json doesn't fit",
            where=f"config.json, {key}: {value!r}",
            why="it must be a positive number",
            fix="correct it, or give the number in a spec (docs/spec.md, Sizes)",
        )
    return value


def hold(covers: Mapping[str, Cover], unknown: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Make one space of every axis that can't be taken apart, in place; these stay put.

    Nothing else is lost: what reads or writes such an axis keeps its other spaces.

    Returns:
        Reason by new space.
    """
    held: dict[str, str] = {}
    for cover in covers.values():
        for one in (cover, *cover.others):
            for dim, axis in enumerate(one.axes):
                missing = next((u for u in axis_units(axis) if u in unknown), None)
                if missing is not None:
                    id = str(axis).replace(" ", "")
                    one.axes[dim] = Unit(id)
                    held.setdefault(id, f"the size of {missing} is not known")
    return held


def how_to_give(spec: Spec, held: Mapping[str, str], unknown: Mapping[str, tuple[str, ...]]) -> str:
    """The warning about axes that were held, with the ways to free them."""
    keys = next(iter(unknown.values()))
    pattern = next(p for p, value in spec.sizes.items() if value == keys)
    return (
        f"{len(held)} kinds of axes stay in place, {next(iter(held))} for one: names and shapes "
        f"don't tell {pattern}, the {keys[0]} of config.json; put that file beside the checkpoint, "
        f'or write a spec of two lines, `family: {spec.name}` and `sizes: {{"{pattern}": N}}`, '
        "or trace the model (--arch hf:DIR)"
    )
