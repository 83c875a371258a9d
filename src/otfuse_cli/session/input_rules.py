"""Options that need inputs, and inputs that need options: what is refused before any is read."""

from __future__ import annotations

from ..errors import UsageError
from ..requests.recipe import Recipe
from ..requests.requests import FusionOptions, ImproveOptions, PruneRequest


def require_no_inputs(options: FusionOptions, recipe: Recipe) -> None:
    """Refuse options that mean nothing without inputs.

    Raises:
        UsageError: One of them was given.
    """
    wanted = None
    if recipe.align == "acts":
        wanted = "--align acts"
    elif recipe.mass == "importance":
        wanted = "--mass importance"
    elif isinstance(options, ImproveOptions) and options.refit:
        wanted = "--refit"
    elif isinstance(options, ImproveOptions) and options.calibrate not in (None, "none"):
        wanted = f"--calibrate {options.calibrate}"
    elif isinstance(options, ImproveOptions):
        wanted = _asks_for_fits(options)
    if wanted is not None:
        raise UsageError(
            f"{wanted} needs inputs",
            where=wanted,
            why="it looks at what units do",
            fix="add --samples FILE, or --synthetic for inputs that are made up",
        )


def _asks_for_fits(options: ImproveOptions) -> str | None:
    """The option that means nothing where no layer is fitted; None where none was given."""
    if options.blend not in (None, "average"):
        return f"--blend {options.blend}"
    return "--require-gain" if options.require_gain else None


def require_no_fits(options: ImproveOptions) -> None:
    """Refuse what means nothing where layers aren't fitted.

    Raises:
        UsageError: It was given.
    """
    asked = _asks_for_fits(options)
    if asked is not None:
        raise UsageError(
            f"{asked} without fits",
            where=asked,
            why="--no-refit, --paper and --align none fit no layer",
            fix="leave them out, or add --refit",
        )


def require_inputs(request: PruneRequest) -> None:
    """Refuse `reconstruct` and `--depth` without inputs, and inputs without them.

    Raises:
        UsageError: One of them is the case.
    """
    option = "--samples" if request.samples is not None else "--synthetic" * request.synthetic
    if request.depth is not None:
        if not option:
            raise UsageError(
                "--depth needs inputs",
                where=f"--depth {request.depth}",
                why="on them it finds which blocks are missed least, and fits what is left",
                fix="add --samples FILE, or --synthetic for inputs that are made up",
            )
        return
    if request.criterion == "reconstruct" and not option:
        raise UsageError(
            "--criterion reconstruct needs inputs",
            where="--criterion reconstruct",
            why="it looks at what units do, and fits layers to it",
            fix="add --samples FILE, or --synthetic for inputs that are made up",
        )
    if option and request.criterion != "reconstruct":
        raise UsageError(
            f"{option} means nothing here",
            where=f"--criterion {request.criterion}",
            why="units are chosen by their weights",
            fix=f"add --criterion reconstruct, or leave out {option}",
        )
