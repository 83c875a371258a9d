"""A picture as a file: png and svg by matplotlib (the extra `plot`), html by ourselves."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..checkpoint.publication import write_whole
from ..checkpoint.write import check_output
from ..errors import UsageError
from .charts import Picture

SUFFIXES = (".png", ".svg", ".html")


def check_plot(path: Path, *, overwrite: bool) -> None:
    """Refuse a picture early, before any work is done for it.

    Raises:
        UsageError: A suffix that nobody draws, or one that needs matplotlib where it is missing.
        OutputRefused: It exists, or can't be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"no such kind of plot: {path.suffix or 'no suffix'}",
            where=f"--plot {path}",
            why="the suffix decides the format",
            fix=f"use one of: {', '.join(SUFFIXES)}",
        )
    if suffix != ".html" and find_spec("matplotlib") is None:
        raise UsageError(
            f"{suffix} plots need matplotlib, which is not installed",
            where=f"--plot {path}",
            fix="pip install 'otfuse-cli[plot]', or take .html, which needs nothing",
        )
    check_output(path, overwrite=overwrite)


def write_picture(path: Path, picture: Picture, *, overwrite: bool = False) -> None:
    """Draw `picture` into `path`; the same picture gives the same bytes.

    Raises:
        UsageError: See `check_plot`.
        OutputRefused: The file exists and `overwrite` is false, or can't be written.
    """
    check_plot(path, overwrite=overwrite)
    write_whole(path, drawn(path, picture), overwrite=overwrite)


def drawn(path: Path, picture: Picture) -> bytes:
    """The bytes of `picture` in the format that the suffix of `path` decides."""
    suffix = path.suffix.lower()
    if suffix == ".html":
        from .page import page

        return page(picture).encode("utf-8")
    from .drawing import drawing

    return drawing(picture, suffix.removeprefix("."))
