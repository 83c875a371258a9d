"""Sizes that shapes don't tell: given in the spec, found in config.json, or not known at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from ...errors import IncompatibleModels
from ..axes import Unit, axis_units
from .expressions import substitute
from .grammar import Spec
from .line_match import Cover
from .patterns import Pattern

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
    sizes: dict[str, tuple[int, str]] = {}
    unknown: dict[str, tuple[str, ...]] = {}
    rules = [(Pattern(text), value) for text, value in spec.sizes.items()]
    for space in spaces:
        value = next((v for pattern, v in rules if pattern.match(space)), None)
        size = None if value is None else _told(value, config)
        if size is not None:
            sizes[space] = size
        elif isinstance(value, tuple):
            unknown[space] = value
    return sizes, unknown


def check_sizes(spec: Spec, sizes: Mapping[str, int], config: Config | None, where: str) -> None:
    """Compare with the spec's `check:`, of sizes or products of them: `kv{i} * g{i}`.

    Raises:
        IncompatibleModels: They differ: the config.json is that of another model.
    """
    for text, value in spec.check.items():
        first, *rest = (factor.strip() for factor in text.split("*"))
        expected = _told(value, config)
        for space in sizes if expected is not None else ():
            match = Pattern(first).match(space)
            if expected is None or match is None:
                continue
            factors = [space, *(substitute(factor, match.numbers) for factor in rest)]
            product = prod(sizes.get(factor, 1) for factor in factors)
            if product != expected[0]:
                raise IncompatibleModels(
                    "a size does not fit",
                    where=f"{expected[1]} is {expected[0]}, {where}",
                    why=f"the shapes make {' * '.join(factors)} {product}",
                    fix="correct it, or put this model's config.json beside the checkpoint",
                )


def _told(value: int | tuple[str, ...], config: Config | None) -> tuple[int, str] | None:
    """A number and where it is from; None when config.json doesn't hold it."""
    if isinstance(value, int):
        return value, "the number given"
    config = config or {}
    for key in value:  # models call one number by several names: the first that is there
        if config.get(key) is not None:
            return _positive(config[key], key), f"{key} of config.json"
    return None


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
    kept: dict[str, str] = {}
    for cover in covers.values():
        for one in (cover, *cover.others):
            for dim, axis in enumerate(one.axes):
                missing = next((u for u in axis_units(axis) if u in unknown), None)
                if missing is not None:
                    id = str(axis).replace(" ", "")  # `h0*q0`: a name that no line can have given
                    one.axes[dim] = Unit(id)
                    kept.setdefault(id, f"the size of {missing} is not known")
    return kept


def architectures(config: Config | None) -> tuple[str, ...]:
    """Class names of the model, as config.json says."""
    names = (config or {}).get("architectures")
    return tuple(str(n) for n in names) if isinstance(names, list | tuple) else ()


def how_to_give(spec: Spec, kept: Mapping[str, str], unknown: Mapping[str, tuple[str, ...]]) -> str:
    """The warning about axes that were held, with the ways to free them."""
    keys = next(iter(unknown.values()))
    pattern = next(p for p, value in spec.sizes.items() if value == keys)
    return (
        f"{len(kept)} kinds of axes stay in place, {next(iter(kept))} for one: names and shapes "
        f"don't tell {pattern}, the {keys[0]} of config.json; put that file beside the checkpoint, "
        f'or write a spec of two lines, `family: {spec.name}` and `sizes: {{"{pattern}": N}}`, '
        "or trace the model (--arch hf:DIR)"
    )
