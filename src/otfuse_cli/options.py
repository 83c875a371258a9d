"""Options to requests: what Typer reads off a request, and what is read out of its values.

A command takes the fields of its frozen request, so the command line and the library can't drift.
Imports neither torch nor numpy: this module decides how fast `--help` is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from math import isfinite, nan
from pathlib import Path
from typing import Any

from .checkpoint.suffix import parse_size
from .commands.keys import read_keys
from .commands.weights import read_weights
from .errors import UsageError
from .option_table import OPTIONS, OWN

# Options that may be repeated, as INDEX=VALUE (`commands.indexed_option`).
PER_CHECKPOINT = ("arch",)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a command says and how, as against what it does."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False


def signature(
    request_type: type,
    *,
    required: Sequence[str] = (),
    optional: Sequence[str] = (),
    omit: Sequence[str] = (),
) -> inspect.Signature:
    """What Typer reads off a function that takes `request_type`'s fields as parameters.

    Args:
        request_type: A frozen request.
        required: Fields with a default that the command line insists on.
        optional: Fields without a default that the command line doesn't insist on.
        omit: Fields that make no sense on this command.
    """
    defaults = {
        field.name: inspect.Parameter.empty if field.default is MISSING else field.default
        for kind in (request_type, RunOptions)
        for field in fields(kind)
        if field.name not in omit
    }
    defaults |= {name: None for name in PER_CHECKPOINT if isinstance(defaults.get(name), str)}
    defaults |= dict.fromkeys(required, inspect.Parameter.empty) | dict.fromkeys(optional)
    return inspect.Signature(
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            for name, kind in {**OPTIONS, **OWN.get(request_type.__name__, {})}.items()
            if (default := defaults.get(name, MISSING)) is not MISSING
        ]
    )


def split(request_type: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], RunOptions]:
    """Typer's values as the request's keywords, raw, and the run options."""
    own = {field.name for field in fields(request_type)}
    rest = {name: value for name, value in values.items() if name not in own}
    return {name: value for name, value in values.items() if name in own}, RunOptions(**rest)


def build(request_type: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    """The frozen request; text that stands for numbers or choices is read here.

    Raises:
        UsageError: A value that can't be meant.
    """
    values = dict(keywords)
    values |= repeated(values)
    if "checkpoints" in values:
        values["checkpoints"] = tuple(values["checkpoints"] or ())
    for name in ("skip", "only"):
        if name in values:
            values[name] = tuple(values[name] or ())
    if "key" in values:
        texts = tuple(values["key"] or ())
        keys = read_keys(texts)
        values["key"] = keys.bare if keys.bare is not None and not keys.own else texts or None
    if values.get("weights") is not None:
        text = values["weights"]
        by_file = text.endswith((".yaml", ".yml"))
        values["weights"] = read_weights(Path(text)) if by_file else parse_weights(text)
    if values.get("input_shape") is not None:
        values["input_shape"] = parse_shape(values["input_shape"])
    if values.get("shard_size") is not None:
        parse_size(values["shard_size"])
    if "layer" in values:
        values["layer"] = parse_shares(values["layer"] or ()) or None
    limit = values.get("max_cost")
    if limit is not None and not (isfinite(limit) and limit >= 0):
        raise UsageError("a cost is finite and not negative", where=f"--max-cost {limit}")
    limit = values.get("max_moved")
    if limit is not None and not 0 <= limit <= 1:
        raise UsageError("a fraction lies between 0 and 1", where=f"--max-moved {limit}")
    request = request_type(**{n: v for n, v in values.items() if v is not MISSING})
    if hasattr(request, "recipe"):
        request.recipe()  # refuses a bad choice before anything heavy is imported
    return request


def repeated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options that may be repeated: one text, several, or what the request has for none."""
    given = {name: tuple(values[name] or ()) for name in PER_CHECKPOINT if name in values}
    return {
        name: (texts[0] if len(texts) == 1 else texts) if texts else MISSING
        for name, texts in given.items()
    }


def parse_weights(text: str) -> tuple[float, ...]:
    """`0.7,0.3` as numbers.

    Raises:
        UsageError: A part isn't a number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            "weights must be numbers, separated by commas",
            where=f"--weights {text}",
            fix="one per checkpoint, for example --weights 0.7,0.3",
        ) from error


def parse_shape(text: str) -> tuple[int, ...]:
    """`1,28,28` as numbers.

    Raises:
        UsageError: A part isn't a positive whole number.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            "a shape is whole numbers, separated by commas",
            where=f"--input-shape {text}",
            fix="for example --input-shape 1,28,28",
        )
    return tuple(int(part) for part in parts)


def parse_shares(texts: Sequence[str]) -> dict[str, float]:
    """`fc1=0.9`, repeated, as numbers by name.

    Raises:
        UsageError: A part is missing, isn't a number, or a name comes twice.
    """
    shares: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            share = float(number)
        except ValueError:
            share = nan
        if not name or not isfinite(share):
            raise UsageError(
                "a layer and its share belong together",
                where=f"--layer {text}",
                fix="for example --layer fc1=0.9",
            )
        if shares.setdefault(name, share) != share:
            raise UsageError(
                "two amounts for the same layer", where=f"--layer {text}", fix="give one of them"
            )
    return shares
