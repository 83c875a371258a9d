"""Verbs as commands, each built when it is asked for: a run needs one of them, `--help` none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import typer
from typer.models import CommandInfo

from ..requests.option import option_of
from .help import Command
from .options import RunOptions, signature
from .run_verb import Verb, run_verb


@dataclass(frozen=True)
class VerbEntry:
    """A verb, and how it stands on the command line.

    Attributes:
        name: The command.
        verb: What runs: a function of a request, whose docstring is the help.
        request_type: The request, whose fields are the options.
        examples: Lines at the end of the help.
        required: Fields with a default that the command line insists on.
        optional: Fields without a default that the command line doesn't insist on.
    """

    name: str
    verb: Verb[Any]
    request_type: type
    examples: Sequence[str]
    required: Sequence[str] = ()
    optional: Sequence[str] = ()

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        return (self.verb.__doc__ or "").partition("\n\n")[0].replace("\n", " ").strip()

    def build(self) -> Command:
        """The command that Typer makes of it."""
        command = typer.main.get_command_from_info(
            CommandInfo(
                self.name, cls=Command, callback=self._callback(), epilog="\n".join(self.examples)
            ),
            pretty_exceptions_short=False,
            rich_markup_mode=None,
        )
        assert isinstance(command, Command)
        command.common = {
            item.name
            for kind in (self.request_type, RunOptions)
            for item in fields(kind)
            if (declared := option_of(item)) is not None and declared.common
        }
        return command

    def _callback(self) -> Callable[..., int]:
        def run(**values: Any) -> int:
            return run_verb(self.name, self.verb, self.request_type, values)

        taken = signature(self.request_type, required=self.required, optional=self.optional)
        run.__doc__ = self.verb.__doc__
        run.__signature__ = taken  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in taken.parameters.values()}
        return run


class Commands(Mapping[str, Any]):
    """Commands by name, as Typer wants them."""

    def __init__(self, entries: Mapping[str, VerbEntry]) -> None:
        self.entries = entries
        self._built: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        if name not in self._built:
            self._built[name] = self.entries[name].build()
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
