"""Every command-line option, once: its flags, panel and help, keyed by the request field it fills.

A command takes the fields of its frozen request, so the command line and the library can't drift.
Imports neither torch nor numpy: this module decides how fast `--help` is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any

import typer

from .commands.requests import CHOICES, Recipe
from .errors import UsageError

PANELS = ("Pruning", "Fusion", "Matching", "Inputs", "Output", "Run")
PRUNING, FUSION, MATCHING, INPUTS, OUTPUT, RUN = PANELS


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
    defaults |= dict.fromkeys(required, inspect.Parameter.empty) | dict.fromkeys(optional)
    return inspect.Signature(
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            for name, kind in OPTIONS.items()
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
    if "checkpoints" in values:
        values["checkpoints"] = tuple(values["checkpoints"] or ())
    if values.get("weights") is not None:
        values["weights"] = parse_weights(values["weights"])
    for name in ("only", "layer"):
        if name in values:
            values[name] = tuple(values[name] or ())
    if "layer" in values:
        values["layer"] = parse_shares(values["layer"]) or None
    limit = values.get("max_cost")
    if limit is not None and not (isfinite(limit) and limit >= 0):
        raise UsageError("a cost is finite and not negative", where=f"--max-cost {limit}")
    request = request_type(**values)
    if hasattr(request, "recipe"):
        request.recipe()  # refuses a bad choice before anything heavy is imported
    return request


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


def _option(*flags: str, panel: str, text: str, default: object = None, **more: Any) -> Any:
    """A Typer option whose help ends with its default, the same way for all of them."""
    if default is not None:
        text += f" [default: {default}]"
    return typer.Option(*flags, help=text, rich_help_panel=panel, show_default=False, **more)


def _choice(name: str, *, panel: str, text: str) -> Any:
    """An option of the recipe with a closed set of values (`Recipe` refuses the others)."""
    values = CHOICES[name]
    return _option(
        f"--{name}",
        panel=panel,
        text=text,
        default=getattr(Recipe, name, values[0]),
        metavar="|".join(values),
        autocompletion=lambda: list(values),
    )


def _checkpoint(metavar: str, text: str) -> Any:
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def _flag(*flags: str, panel: str, text: str, default: str | None = None) -> Any:
    """An option without a value."""
    return _option(*flags, panel=panel, text=text, default=default, metavar="")


# In the order of the help: panels as they first appear, what most people need first.
OPTIONS: Mapping[str, Any] = {
    "checkpoints": Annotated[
        list[Path],
        _checkpoint("CKPT", "Checkpoints; the last one is the anchor, unless --anchor says so."),
    ],
    "checkpoint": Annotated[Path, _checkpoint("CKPT", "A checkpoint of the network.")],
    "dense": Annotated[Path, _checkpoint("DENSE", "The unpruned checkpoint.")],
    "pruned": Annotated[Path, _checkpoint("PRUNED", "Its pruned version: the anchor.")],
    "ot_costs": Annotated[
        bool,
        _flag(
            "--ot-costs",
            panel=FUSION,
            text="OT cost of every space and layer, beside the cost of leaving units in place.",
        ),
    ],
    "graph": Annotated[
        bool,
        _flag(
            "--graph", panel=FUSION, text="Every space of the layer graph, and what stays in place."
        ),
    ],
    "max_cost": Annotated[
        float | None,
        _option(
            "--max-cost",
            panel=FUSION,
            metavar="X",
            text="Exit with 7 if a space costs more than X.",
        ),
    ],
    "align": Annotated[
        str | None,
        _choice(
            "align",
            panel=FUSION,
            text="Match units by their incoming weights, or not at all (the plain average).",
        ),
    ],
    "weights": Annotated[
        str | None,
        _option(
            "--weights",
            panel=FUSION,
            metavar="W,W...",
            text="A weight per checkpoint, made to sum to 1.",
            default="equal",
        ),
    ],
    "dense_weight": Annotated[
        float | None,
        _option(
            "--dense-weight",
            panel=FUSION,
            metavar="W",
            text="Weight of DENSE; PRUNED has the rest.",
            default="0.7 if all units of PRUNED are DENSE's, else 0.5",
        ),
    ],
    "keep_shape": Annotated[
        bool,
        _flag(
            "--keep-shape",
            panel=FUSION,
            text="Where PRUNED is masked (weight_mask, rows of zeros): write its shape, pruned "
            "units zero, instead of a smaller network.",
        ),
    ],
    "amount": Annotated[
        float | None,
        _option(
            "--amount",
            panel=PRUNING,
            metavar="SHARE",
            text="Share of units to remove from every layer, more than 0 and less than 1.",
        ),
    ],
    "criterion": Annotated[
        str,
        _choice(
            "criterion",
            panel=PRUNING,
            text="Units to keep: of large incoming weights (l1, l2), random ones, or those that "
            "the others can be merged into at least cost (ot, which merges them).",
        ),
    ],
    "only": Annotated[
        list[str] | None,
        _option(
            "--only",
            panel=PRUNING,
            metavar="GLOB",
            text="Apply --amount to these spaces, modules or tensors only; may be repeated.",
        ),
    ],
    "layer": Annotated[
        list[str] | None,
        _option(
            "--layer",
            panel=PRUNING,
            metavar="NAME=SHARE",
            text="A share of its own for the units of a module, tensor or space, 0 to keep them "
            "all; may be repeated.",
        ),
    ],
    "anchor": Annotated[
        str,
        _option(
            "--anchor",
            panel=FUSION,
            metavar="last|first|medoid|INDEX",
            text="The checkpoint that gives widths and file format, and that the others are "
            "aligned to; INDEX counts from 0, medoid is the one nearest to all others.",
            default="last",
        ),
    ],
    "paper": Annotated[
        bool,
        _flag(
            "--paper",
            panel=FUSION,
            text="Exactly the method of Singh & Jaggi (2020); options given beside it win.",
        ),
    ],
    "residual": Annotated[
        str | None,
        _choice(
            "residual",
            panel=FUSION,
            text="Residual streams: one shared map, the paper's averaged maps, or left in place.",
        ),
    ],
    "beta": Annotated[
        float | None,
        _option(
            "--beta",
            panel=FUSION,
            metavar="B",
            text="Share of the shortcut in --residual average, 0 to 1.",
            default=Recipe.beta,
        ),
    ],
    "scale": Annotated[
        str | None,
        _choice(
            "scale",
            panel=FUSION,
            text="Different widths: keep the function, also bring both models' rows to one length, "
            "or the paper's scaling by M/N.",
        ),
    ],
    "repair": Annotated[
        str | None,
        _choice(
            "repair",
            panel=FUSION,
            text="Undo the shrinking of imperfectly matched units, from the weights alone.",
        ),
    ],
    "matcher": Annotated[
        str | None,
        _choice(
            "matcher",
            panel=MATCHING,
            text="How maps are found: one pass in graph order (sweep), steps that look at both "
            "sides of a unit (descent), all spaces at once (frank-wolfe), or the best of them.",
        ),
    ],
    "passes": Annotated[
        int | None,
        _option(
            "--passes",
            panel=MATCHING,
            metavar="P",
            text="From the second pass on, align each source to the mean of the other models.",
            default=Recipe.passes,
        ),
    ],
    "effort": Annotated[
        float | None,
        _option(
            "--effort",
            panel=MATCHING,
            metavar="FLOP",
            text="Operations that auto may plan to spend on a source; above it, it tries less.",
            default=f"{Recipe.effort:g}",
        ),
    ],
    "metric": Annotated[
        str | None, _choice("metric", panel=MATCHING, text="Ground metric between units.")
    ],
    "unit_norm": Annotated[
        bool | None,
        _flag(
            "--unit-norm/--raw",
            panel=MATCHING,
            text="Compare rows at unit norm, or as they are (cost only).",
            default="unit-norm",
        ),
    ],
    "mass": Annotated[
        str | None,
        _choice("mass", panel=MATCHING, text="Mass of a unit: equal, or the norm of its row."),
    ],
    "solver": Annotated[
        str | None, _choice("solver", panel=MATCHING, text="Solver of each transport problem.")
    ],
    "epsilon": Annotated[
        float | None,
        _option(
            "--epsilon",
            panel=MATCHING,
            metavar="E",
            text="Regularisation of sinkhorn, in standard deviations of the cost.",
            default=Recipe.epsilon,
        ),
    ],
    "arch": Annotated[
        str,
        _option(
            "--arch",
            panel=INPUTS,
            metavar="SPEC",
            text="What the network looks like: auto (by names and shapes), a family, spec.yaml, or "
            "the network itself: file.py:factory (runs that code), graph.pt2, hf:DIR.",
            default="auto",
        ),
    ],
    "spec": Annotated[
        str | None,
        _option(
            "--spec",
            panel=INPUTS,
            metavar="SPEC",
            text="Check this family or spec.yaml on the network instead of the traced graph.",
        ),
    ],
    "free_outputs": Annotated[
        bool,
        _flag(
            "--free-outputs",
            panel=INPUTS,
            text="Let the units of a traced network's outputs move: headless backbones.",
        ),
    ],
    "key": Annotated[
        str | None,
        _option(
            "--key",
            panel=INPUTS,
            metavar="NAME",
            text="The entry of the checkpoint to take, where it holds several models.",
        ),
    ],
    "output": Annotated[
        Path | None,
        _option(
            "--output",
            "-o",
            panel=OUTPUT,
            metavar="OUT",
            text="Where the new checkpoint goes; the suffix decides the format.",
        ),
    ],
    "report": Annotated[
        Path | None,
        _option(
            "--report",
            panel=OUTPUT,
            metavar="PATH",
            text="Where the report goes.",
            default="OUT with suffix .report.json",
        ),
    ],
    "write_spec": Annotated[
        Path | None,
        _option(
            "--write-spec",
            panel=OUTPUT,
            metavar="FILE",
            text="Write the layer graph as a spec, for --arch.",
        ),
    ],
    "overwrite": Annotated[
        bool, _flag("--overwrite", panel=OUTPUT, text="Replace an output that exists.")
    ],
    "dtype": Annotated[
        str, _choice("dtype", panel=OUTPUT, text="Stored dtype of floating tensors.")
    ],
    "json": Annotated[
        bool, _flag("--json", panel=OUTPUT, text="One JSON envelope on standard output.")
    ],
    "device": Annotated[
        str,
        _option(
            "--device",
            panel=RUN,
            metavar="auto|cpu|cuda",
            text="Where numerics run; cuda:1 names a device.",
            default="auto",
        ),
    ],
    "seed": Annotated[
        int, _option("--seed", panel=RUN, metavar="N", text="Decides everything random.", default=0)
    ],
    "quiet": Annotated[bool, _flag("--quiet", "-q", panel=RUN, text="Print nothing but errors.")],
    "verbose": Annotated[
        bool, _flag("--verbose", "-v", panel=RUN, text="Print everything that the report holds.")
    ],
    "debug": Annotated[bool, _flag("--debug", panel=RUN, text="Show the traceback of an error.")],
}
