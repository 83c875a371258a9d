"""Options to requests: what Typer reads off a request, and what is read out of its values.

A command takes the fields of its frozen request, so the command line and the library can't drift.
Imports neither torch nor numpy: this module decides how fast `--help` is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..output_names import parse_size
from ..remote.location import is_remote, location
from ..requests.option import OUTPUT, Option, Options, option, option_of, switch
from ..requests.option_text import parse_shape, parse_shares, parse_weights, parse_widths
from ..requests.tensor_weights import read_weights

# Options that may be repeated, as INDEX=VALUE (`requests/indexed_option.py`).
PER_CHECKPOINT = ("arch", "key")
# In the context's `meta`: everything was asked for.
SHOW_ALL = "otfuse.help-all"


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What a command says and how, as against what it does."""

    json: bool = switch(
        False,
        "--json",
        panel=OUTPUT,
        text="One JSON envelope on standard output.",
        common=True,
    )
    quiet: bool = switch(False, "--quiet", "-q", text="Print nothing but errors.")
    verbose: bool = switch(
        False, "--verbose", "-v", text="Print everything that the report holds.", common=True
    )
    debug: bool = switch(False, "--debug", text="Show the traceback of an error.")
    threads: int | None = option(
        None,
        "--threads",
        kind=int,
        metavar="N",
        text="CPU threads that it may take.",
        said="one for each processor",
        low=1,
    )
    help_all: bool = switch(  # never arrives: it ends the run
        False, "--help-all", text="Show all options and exit.", common=True
    )


def signature(
    request_type: type, *, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> inspect.Signature:
    """What Typer reads off a function that takes `request_type`'s fields as parameters.

    Args:
        request_type: A frozen request.
        required: Fields with a default that the command line insists on.
        optional: Fields without a default that the command line doesn't insist on.
    """
    parameters = []
    for item in (*fields(request_type), *fields(RunOptions)):
        declared = option_of(item)
        if declared is None:
            continue
        default = inspect.Parameter.empty if item.default is MISSING else item.default
        if item.name in required:
            default = inspect.Parameter.empty
        elif item.name in optional or (declared.several and item.default is not MISSING):
            default = None
        parameters.append(
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=_annotation(item.name, declared),
            )
        )
    return inspect.Signature(parameters)


def _annotation(name: str, declared: Option) -> Any:
    """A parameter's type, with what Typer shows of it."""
    one = str if declared.kind is Path else declared.kind  # `split_values` tells paths from URLs
    kind: Any = list[one] if declared.several else one  # type: ignore[valid-type]
    if not declared.flags:
        shown = typer.Argument(metavar=declared.metavar, help=declared.text, show_default=False)
        return Annotated[kind, shown]
    more: dict[str, Any] = {}
    if declared.choices:
        more["autocompletion"] = lambda: list(declared.choices)
    if name == "help_all":
        more |= {"is_eager": True, "callback": _show_all}
    shown = typer.Option(
        *declared.flags,
        help=declared.help,
        metavar=declared.metavar,
        rich_help_panel=declared.panel,
        show_default=False,
        **more,
    )
    return Annotated[kind | None, shown]


def _show_all(context: typer.Context, asked: bool) -> None:
    if asked:
        from .render import show_text

        context.meta[SHOW_ALL] = True
        show_text(context.get_help() + "\n")
        raise typer.Exit


def split_values(
    request_type: type, values: Mapping[str, Any]
) -> tuple[dict[str, Any], RunOptions]:
    """Typer's values as the request's keywords, raw but for paths, and the run options."""
    declared = {field.name: option_of(field) for field in fields(request_type)}
    rest = {name: value for name, value in values.items() if name not in declared}
    keywords = {name: value for name, value in values.items() if name in declared}
    for name, value in keywords.items():
        option = declared[name]
        if option is not None and option.kind is Path and value is not None:
            keywords[name] = [*map(location, value)] if option.several else location(value)
    return keywords, RunOptions(**rest)


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
    if values.get("widths") is not None:
        values["widths"] = parse_widths(values["widths"])
    if values.get("input_shape") is not None:
        values["input_shape"] = parse_shape(values["input_shape"])
    if values.get("shard_size") is not None:
        parse_size(values["shard_size"])
    for name in ("samples", "inputs"):
        # A loader (`file.py:loader`) is no path, so the others stay texts.
        if isinstance(values.get(name), str) and is_remote(at := location(values[name])):
            values[name] = at
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
