"""Typer wiring only: options -> frozen request -> verb -> renderer. Imports no torch.

A command is a function of its request; `_command` gives it the request's fields as options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ExitCode
from ..requests.requests import (
    STANDARD,
    CheckRequest,
    CurveRequest,
    DemoRequest,
    EvaluateRequest,
    InspectRequest,
    MergeRequest,
    PruneFuseRequest,
    PruneRequest,
)
from ..runtime import Progress, collect_rarely
from . import render
from .help import Group
from .render import Display, Outcome
from .run_verb import Request, Verb, foreseen, show_outcome
from .verbs import Commands, VerbEntry

if TYPE_CHECKING:
    from ..report.records import Report

app = typer.Typer(
    name="otfuse",
    help="Fuse trained checkpoints into one, by aligning their neurons with optimal transport.",
    epilog="otfuse demo\notfuse merge a.pt b.pt -o fused.pt",
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)

_ENTRIES: dict[str, VerbEntry] = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    collect_rarely()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = program().main(arguments or ["--help"], prog_name="otfuse", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last line of defence
        json, debug = "--json" in arguments, "--debug" in arguments
        return show_outcome(
            Outcome(_name(error), error=foreseen(error)), Display(json=json, debug=debug)
        )
    return int(status or 0) if arguments else ExitCode.USAGE


@cache
def program() -> Group:
    """The program with all its commands, made once in a process."""
    group = typer.main.get_command(app)
    assert isinstance(group, Group)
    group.commands = Commands(_ENTRIES)
    return group


def _command(
    name: str, request_type: type[Request], *examples: str, **more: Sequence[str]
) -> Callable[[Verb[Request]], Verb[Request]]:
    """Register a function of a request as a command that takes the request's fields as options."""

    def register(verb: Verb[Request]) -> Verb[Request]:
        _ENTRIES[name] = VerbEntry(name, verb, request_type, examples, **more)
        return verb

    return register


@_command(
    "merge",
    MergeRequest,
    "otfuse merge a.pt b.pt -o fused.pt --align wts",
    "otfuse merge a.safetensors b.safetensors -o fused.safetensors --weights 0.7,0.3",
    "otfuse merge a.pt b.pt -o ensemble.pt --width 2",
    required=("output",),
)
def merge_command(request: MergeRequest, progress: Progress) -> Report:
    """Fuse checkpoints into one.

    Units of every checkpoint are matched to those of the anchor by optimal transport, layer by
    layer, and only then averaged.
    """
    from ..commands.merge import run_merge as verb

    return verb(request, progress=progress)


@_command(
    "inspect",
    InspectRequest,
    "otfuse inspect a.pt",
    "otfuse inspect a.pt b.pt --ot-costs",
    "otfuse inspect a.pt b.pt --max-cost 0.5 --plot costs.html",
    "otfuse merge a.pt b.pt -o fused.pt --json | otfuse inspect --ot-costs",
    optional=("checkpoints",),
)
def inspect_command(request: InspectRequest, progress: Progress) -> Report:
    """Look before fusing: tensors, layer graph, compatibility, OT costs.

    Without a CKPT, or with -, shows the costs in a report or a --json envelope that comes from a
    pipe. With one CKPT and --ot-costs, shows the costs of the report beside it.
    """
    only = request.checkpoints[0] if len(request.checkpoints) == 1 else None
    if not request.checkpoints or only == STANDARD:
        from ..report.files import read_pipe
        from ..session.cost_outputs import check_outputs, finish

        check_outputs(request)
        return finish(read_pipe(sys.stdin), request)
    if isinstance(only, Path) and request.costs:
        from ..report.files import read_beside
        from ..session.cost_outputs import check_outputs, finish

        check_outputs(request)
        return finish(read_beside(only), request)
    from ..commands.inspect import run_inspect as verb

    return verb(request, progress=progress)


@_command(
    "prune-fuse",
    PruneFuseRequest,
    "otfuse prune-fuse dense.pt pruned.pt",
    "otfuse prune-fuse dense.pt pruned.pt -o better.pt --dense-weight 0.3",
)
def prune_fuse_command(request: PruneFuseRequest, progress: Progress) -> Report:
    """Fuse a dense checkpoint into its pruned version, which keeps its widths.

    Units that PRUNED still has are found and stay themselves; what was pruned is merged into them.
    Without -o, the result goes beside PRUNED: pruned.pt becomes pruned.fused.pt.
    """
    from ..commands.prune_fuse import run_prune_fuse as verb

    return verb(request, progress=progress)


@_command(
    "prune",
    PruneRequest,
    "otfuse prune a.pt -o small.pt --amount 0.5",
    "otfuse prune a.pt -o small.pt --criterion ot --layer fc1=0.9 --layer fc2=0.5",
    "otfuse prune a.pt -o small.pt --amount 0.5 --criterion reconstruct --arch mlp --samples x.npz",
    "otfuse prune a.pt -o shallow.pt --depth 2 --arch net.py:make_net --samples x.npz",
    required=("output",),
)
def prune_command(request: PruneRequest, progress: Progress) -> Report:
    """Remove whole units from a checkpoint, with everything that carries them, or whole blocks.

    What is written is smaller. Outputs and what can't be proven interchangeable stay; heads and
    channel groups go whole. otfuse prune-fuse recovers accuracy from the unpruned checkpoint; so
    does --criterion reconstruct, at once, where there are inputs. With them --depth removes blocks.
    """
    from ..commands.prune import run_prune as verb

    return verb(request, progress=progress)


@_command(
    "check",
    CheckRequest,
    "otfuse check a.pt --arch net.py:make_net",
    "otfuse check a.pt --arch net.py:make_net --spec net.yaml",
)
def check_command(request: CheckRequest, progress: Progress) -> Report:
    """Prove a layer graph on the network itself.

    All units are permuted at random: the outputs must stay. Each axis is left out once: the
    outputs must move. --arch names the network (and runs its code). Exits with 7 if the graph is
    wrong.
    """
    from ..commands.check import run_check as verb

    return verb(request, progress=progress)


@_command(
    "eval",
    EvaluateRequest,
    "otfuse eval a.pt b.pt fused.pt --arch net.py:make_net --samples test.npz",
    "otfuse eval a.pt b.pt --arch mlp --samples test.npz --ensemble --average",
)
def evaluate_command(request: EvaluateRequest, progress: Progress) -> Report:
    """Measure checkpoints on labelled samples: accuracy and cross-entropy.

    Token models without labels are measured on the next token, and have a perplexity. --arch names
    the network (and runs its code).
    """
    from ..commands.evaluate import run_evaluate as verb

    return verb(request, progress=progress)


@_command(
    "curve",
    CurveRequest,
    "otfuse curve a.pt b.pt --arch net.py:make_net --samples test.npz",
    "otfuse curve a.pt b.pt --arch mlp --samples test.npz --paper --plot curve.png",
    "otfuse curve a.pt b.pt --over width --inputs x.npz --arch net.py:make_net --samples test.npz",
)
def curve_command(request: CurveRequest, progress: Progress) -> Report:
    """Measure what lies between two checkpoints, for weights from 0 to 1 of the second one.

    The plain average beside the fused one (aligned once), and the loss barrier of both: how far
    the loss rises above the line between the ends. Or, --over width, what joint fusion makes of
    all checkpoints at several widths, beside each and their ensemble.
    """
    from ..commands.curve import run_curve as verb

    return verb(request, progress=progress)


@_command(
    "demo",
    DemoRequest,
    "otfuse demo",
    "otfuse demo --paper -o fused.safetensors",
)
def demo_command(request: DemoRequest, progress: Progress) -> Report:
    """Fuse a bundled pair of digit classifiers, and measure parents, plain average and fused net.

    Writes nothing without -o.
    """
    from ..commands.demo import run_demo as verb

    return verb(request, progress=progress)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, help="Print the version.", callback=lambda on: _version(on)
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


def _version(on: bool) -> None:
    if on:
        render.show_version()
        raise typer.Exit


def _name(error: BaseException) -> str | None:
    """The command that a usage error belongs to; None for the program itself."""
    context = getattr(error, "ctx", None)
    return context.info_name if context is not None and context.parent is not None else None


if __name__ == "__main__":
    sys.exit(main())
