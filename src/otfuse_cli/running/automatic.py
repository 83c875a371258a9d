"""`--arch auto`: the network of a library where the checkpoint is of one, else names and shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import IncompatibleModels, OtfuseError, UnreadableInput, UsageError, few
from ..graph.model import LayerGraph, Shapes
from ..graph.spec.from_shapes import graphs_differ
from .arch_value import Arch
from .architecture import Architecture, architecture
from .checkpoint_names import Aliases
from .recognition import Recognised, library_network

# What a library, or building and tracing a network of it, may fail with.
_FAILURES = (IncompatibleModels, UnreadableInput, UsageError)


def automatic(
    shapes: Shapes,
    *,
    aliases: Aliases | None = None,
    config: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    label: str = "the checkpoint",
    free_outputs: bool = False,
    untied: bool = False,
) -> Architecture:
    """The architecture of a checkpoint that nobody described.

    Arguments are those of `architecture`; `folder` is where the config.json lies.

    Raises:
        OtfuseError: Neither a library that is installed nor names and shapes tell it.
    """
    recognised = library_network(shapes, config, folder)
    failed: OtfuseError | None = None
    describe = partial(
        architecture,
        shapes=shapes,
        aliases=aliases,
        label=label,
        free_outputs=free_outputs,
        untied=untied,
    )
    if recognised is not None and recognised.installed:
        try:
            traced = describe(recognised.arch)
            remarks = _rivals(recognised, traced.graph, describe, label)
        except _FAILURES as error:
            failed = error
        else:
            graph = replace(traced.graph, source=recognised.source)
            return replace(traced, graph=graph, remarks=remarks)
    try:
        named = describe("auto", config=config)
    except IncompatibleModels as error:
        if failed is not None:
            raise failed from error
        if recognised is not None:
            error.fix = recognised.hint
        raise
    if recognised is None:
        return named
    remark = recognised.hint
    if failed is not None:
        why = failed.what if failed.why is None else f"{failed.what}: {failed.why}"
        remark = f"this is {recognised.name} of {recognised.library}, which was not traced: {why}"
    return replace(named, remarks=(remark,))


def library_arch(
    arch: Arch, shapes: Shapes, config: Mapping[str, Any] | None, folder: Path | None
) -> Arch:
    """What `auto` stands for, where a library that is installed has the network."""
    if arch != "auto":
        return arch
    recognised = library_network(shapes, config, folder)
    return recognised.arch if recognised is not None and recognised.installed else arch


def _rivals(
    recognised: Recognised, graph: LayerGraph, describe: Callable[[str], Architecture], label: str
) -> tuple[str, ...]:
    """A remark on networks with the same tensors that compute something else.

    Raises:
        IncompatibleModels: Their units are not interchangeable in the same places.
    """
    for rival in recognised.rivals:
        try:
            other = describe(rival)
        except _FAILURES:
            continue
        if graphs_differ(graph, other.graph):
            raise IncompatibleModels(
                "ambiguous architecture",
                where=label,
                why=f"{recognised.arch} and {rival} have these tensors and different layer graphs",
                fix=f"choose: --arch {recognised.arch} or --arch {rival}",
            )
    if not recognised.rivals:
        return ()
    return (
        f"taken for {recognised.arch}; {few(recognised.rivals)} has the same tensors and computes "
        "something else: to run it on inputs, name the right one with --arch",
    )
