"""The help pages: options in their panels, an example at the end.

Typer can set panels with rich, but importing what it needs for that takes longer than everything
else that `--help` does, so the panels are plain sections here. Prints nothing itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..requests.option import PANELS, RUN
from .options import SHOW_ALL

# With more options than this, a help page shows the common ones; the others have `--help-all`.
_MANY = 20


class Command(TyperCommand):
    """A command whose options stand in sections, in the order of `PANELS`.

    Attributes:
        common: Names of the options that the short help shows, first in their sections.
    """

    common: Collection[str] = ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then every panel that has options; of many options the common ones."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {panel: [] for panel in PANELS}
        params = self.get_params(ctx)
        options = [param for param in params if param.param_type_name != "argument"]
        shown = sorted(params, key=lambda param: not self._is_common(param))
        shortened = len(options) > _MANY and not ctx.meta.get(SHOW_ALL)
        for param in filter(self._is_common, shown) if shortened else shown:
            record = _record(param, ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                sections["Arguments"].append((param.metavar or record[0], record[1]))
            else:
                panel = getattr(param, "rich_help_panel", None) or RUN  # --help has none
                sections[panel].append(record)
        _write_sections(formatter, sections)
        if shortened:
            formatter.write_paragraph()
            formatter.write_text(f"otfuse {self.name} --help-all shows all {len(options)} options.")

    def _is_common(self, param: Any) -> bool:
        if param.param_type_name == "argument" or "--help" in param.opts:
            return True
        return param.name in self.common

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        _write_examples(formatter, self.epilog)


class Group(TyperGroup):
    """The program itself: its commands before its options."""

    commands: Any

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write commands with the whole first sentence of their help, then options."""
        commands = [(name, entry.summary) for name, entry in self.commands.entries.items()]
        options = [_record(param, ctx) for param in self.get_params(ctx)]
        shown = [record for record in options if record]
        _write_sections(formatter, {"Commands": commands, "Options": shown})

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        _write_examples(formatter, self.epilog)


def _record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """The flags of a parameter and what is said of it.

    Typer below 0.21 escapes what it adds in brackets, for rich, which doesn't print this.
    """
    record = param.get_help_record(ctx)
    return None if record is None else (record[0], record[1].replace("\\[", "["))


def _write_sections(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for name, rows in sections.items():
        if rows:
            with formatter.section(_bold(name)):
                if coloured:
                    rows = [(typer.style(first, fg="cyan"), second) for first, second in rows]
                formatter.write_dl(rows)


def _write_examples(formatter: Any, examples: str | None) -> None:
    """One line each, never wrapped: they are there to be copied."""
    if examples:
        lines = examples.split("\n")
        with formatter.section(_bold("Examples" if len(lines) > 1 else "Example")):
            for line in lines:
                formatter.write(f"  {line}\n")


def _bold(text: str) -> str:
    return typer.style(text, bold=True) if sys.stdout.isatty() else text
