"""Options to requests: what Typer reads off a request, and what is read out of its values.

A command takes the fields of its frozen request, so the command line and the library can't drift.
Imports neither torch nor numpy: this module decides how fast `--help` is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ..output_names import parse_size
from ..requests.option_text import parse_shape, parse_shares, parse_weights
from ..requests.tensor_weights import read_weights
from .option_table import OPTIONS, OWN

# Options that may be repeated, as INDEX=VALUE (`requests/indexed_option.py`).
PER_CHECKPOINT = ("arch", "key")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a command says and how, as against what it does."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    help_all: bool = False  # never arrives: it ends the run


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


def split_values(
    request_type: type, values: Mapping[str, Any]
) -> tuple[dict[str, Any], RunOptions]:
    """Typer's values as the request's keywords, raw, and the run options."""
    own = {field.name for field in fields(request_type)}
    rest = {name: value for name, value in values.items() if name not in own}
    return {name: value for name, value in values.items() if name in own}, RunOptions(**rest)


def build_request(request_type: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
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
