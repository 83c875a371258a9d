"""A layer graph from a module: export it, label it, name what was found.

This executes the module's own code; `graph_from_program` doesn't.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from ...errors import IncompatibleModels
from ..model import LayerGraph
from .chosen_rows import CHOSEN, EverythingChosen
from .emit import emit
from .export_settings import (
    eval_mode,
    no_fast_path,
    own_output,
    quiet,
    without_cache,
    without_lines,
)
from .in_place import write_apart
from .network_outputs import checked_outputs, may_be_held, output_names, with_outputs_told
from .nodes import operator_name
from .packed import packed_sequences
from .propagate import propagate
from .rules import RULES
from .untraceable import explain, is_data_dependent, refuse_scripted

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Used = TypeVar("Used")


def trace(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    source: str = "",
    free_outputs: bool = False,
    name_map: Mapping[str, str] | None = None,
) -> LayerGraph:
    """Trace `module` on example inputs and find what in it is interchangeable.

    Works on the meta device as well as on real tensors; no weight is read. The example sizes
    don't matter, but axes longer than 1 are better.

    Args:
        module: Traced in eval mode; its mode is restored.
        args: Example inputs; moved to the module's device.
        kwargs: Example keyword inputs.
        source: Goes into `LayerGraph.source`.
        free_outputs: Leave the outputs' units free, for headless backbones.
        name_map: Names of the module's tensors in the checkpoint, where they differ.

    Raises:
        IncompatibleModels: `torch.export` can't follow the module; says where and what to do.
    """
    described = partial(graph_from_program, source=source, name_map=name_map)
    program, graph, warnings = _for_graph(module, args, kwargs, free_outputs, described)
    if not free_outputs and may_be_held(graph):
        freed = described(program, free_outputs=True)
        graph = with_outputs_told(graph, freed, output_names(program))
    return replace(graph, warnings=(*graph.warnings, *warnings))


def _for_graph(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    free_outputs: bool,
    described: Callable[..., LayerGraph],
) -> tuple[ExportedProgram, LayerGraph, tuple[str, ...]]:
    """A program, the graph that is `described` of it, and warnings of how it was exported."""
    exported = partial(export, module, args, kwargs, padded=True)
    described = partial(described, free_outputs=free_outputs)
    try:
        return *with_lines(exported, described, told=_warns_of_nothing), ()
    except IncompatibleModels as error:
        if not is_data_dependent(error):
            raise
        chosen = EverythingChosen()
        exported = partial(exported, chosen=chosen)
        try:
            found = with_lines(exported, described, told=_warns_of_nothing)
        except IncompatibleModels:
            raise error from None
        return *found, (CHOSEN,) if chosen.used else ()


def _warns_of_nothing(graph: LayerGraph) -> bool:
    return not graph.warnings


def with_lines(
    exported: Callable[..., ExportedProgram],
    use: Callable[[ExportedProgram], Used],
    *,
    told: Callable[[Used], bool] = lambda used: True,
) -> tuple[ExportedProgram, Used]:
    """A program and what is made of it; exported once more where a line of the module is missing.

    Args:
        exported: Exports, with or without `lines`.
        use: Makes something of the program.
        told: Whether that lacks no line.

    Raises:
        IncompatibleModels: From both; it says where, if that can be told.
    """
    program = exported(lines=False)
    try:
        used = use(program)
        if told(used):
            return program, used
    except IncompatibleModels as error:
        if error.where is not None:
            raise
    program = exported(lines=True)
    return program, use(program)


def graph_from_program(
    program: ExportedProgram,
    *,
    source: str = "",
    free_outputs: bool = False,
    name_map: Mapping[str, str] | None = None,
) -> LayerGraph:
    """The layer graph of an exported program; runs none of its code.

    Args:
        program: From `export` here, or loaded from a `.pt2` file.
        source: Goes into `LayerGraph.source`.
        free_outputs: Leave the outputs' units free.
        name_map: Names of the program's tensors in the checkpoint, where they differ.
    """
    decomposed = functional(program)
    labelled = propagate(decomposed, checked=checked_outputs(program), pin_outputs=not free_outputs)
    return emit(labelled, source=source, name_map=name_map)


def export(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    padded: bool = False,
    chosen: EverythingChosen | None = None,
    lines: bool = False,
) -> ExportedProgram:
    """Export `module` in eval mode.

    Args:
        module: Left as it is.
        args: Example inputs.
        kwargs: Example keyword inputs.
        padded: Take packed sequences for padded ones: good for a layer graph, not to be run.
        chosen: Take what is chosen by data for everything: the same.
        lines: Let every operation tell which line of the module made it; takes as long again.

    Raises:
        IncompatibleModels: It can't be exported in either of the ways that torch knows.
    """
    refuse_scripted(module)
    reasons: list[Exception] = []
    # Running the module first: it follows most networks, and its reasons are the ones to show.
    for compiled in (False, True) if chosen is None else (False,):
        try:
            moved, keywords = _on_device_of(module, (tuple(args), dict(kwargs or {})))
            given, known = packed_sequences(padded=padded), without_lines(skip=not lines)
            with given, known, chosen or nullcontext():
                return _export(module, moved, without_cache(module, keywords), compiled=compiled)
        except IncompatibleModels:
            raise
        except Exception as error:  # noqa: BLE001 - whatever torch or the user's forward raises
            reasons.append(error)
    raise explain(reasons[0], module, reasons[1:]) from reasons[0]


def _on_device_of(
    module: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs where the module's tensors are; on the meta device only if all of them are there."""
    devices = [t.device for t in module.state_dict().values()]
    real = [device for device in devices if device.type != "meta"]
    device = next(iter(real or devices), torch.device("cpu"))
    leaves = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    if any(t.is_meta for t in leaves) and device.type != "meta":
        raise ValueError("example inputs without values for a module that holds some")
    moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(device), inputs
    )
    return moved


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool
) -> ExportedProgram:
    """Export by running the module or, where `compiled`, by torch's compiler, which reads its code.

    The compiler follows what the other way can't: layers inside of branches, NumPy, attention
    that has no gradients on a CPU.
    """
    with ExitStack() as stack:
        stack.enter_context(eval_mode(module))
        stack.enter_context(no_fast_path())
        stack.enter_context(quiet())
        stack.enter_context(own_output())
        stack.enter_context(torch.set_grad_enabled(not compiled))
        return torch.export.export(module, args, kwargs, strict=compiled)


def functional(program: ExportedProgram) -> ExportedProgram:
    """`program` without operations that write in place, and without higher-order ones.

    The empty table keeps composites (linear, convolution, attention, lstm) whole. Nothing needs
    to be done where every operation already has a rule and writes nowhere.

    Args:
        program: What its simple in-place operations do is done without writing, in the same object.
    """
    write_apart(program)
    if all(_is_plain(node) for node in program.graph.nodes if node.op == "call_function"):
        return program
    with quiet():
        decomposed: ExportedProgram = program.run_decompositions({})
    return decomposed


def _is_plain(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        silent = node.meta.get("val") is None  # an assertion
        return not target._schema.is_mutable and (silent or operator_name(node) in RULES)
    return target is getitem
