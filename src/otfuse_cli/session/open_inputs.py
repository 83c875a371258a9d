"""Inputs for a fusion, read or made up, and a bench on which its models run on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..errors import IncompatibleModels, UsageError
from ..fusion.selection import Selection
from ..graph.analysis.streams import has_heads
from ..matching.models import Model
from ..requests.recipe import Recipe
from ..requests.requests import FusionOptions, ImproveOptions
from ..running.architecture import Architecture, require_network
from ..runtime import Runtime, reuse_freed_memory
from .architectures import arch_of_each
from .input_rules import require_no_fits, require_no_inputs
from .moved_kinds import NUMBERS, made_kind, moved_samples
from .parents import Parents

if TYPE_CHECKING:
    from ..graph.trace.program import Program
    from ..running.samples import Samples
    from .bench import Bench, Tensors

# Fewer inputs than this say too little about a layer (docs/methods/inputs.md, Real).
LEAST_SAMPLES = 25
REAL, SYNTHETIC = 400, 2_000

# What to do where code fixes widths that `--width` changes.
_OWN_WIDTH = (
    "let the factory take the checkpoint's shapes, and build the network for them: def "
    "make_net(shapes): ...; or widen only what its code takes: --layer NAME=F without --width"
)


def open_bench(
    parents: Parents,
    options: FusionOptions,
    recipe: Recipe,
    selection: Selection,
    runtime: Runtime,
    *,
    instead: str = "use --no-refit",
) -> Bench | None:
    """Read or make inputs, and make every parent that counts ready to run; None without inputs.

    Args:
        parents: The models.
        options: Which inputs.
        recipe: What needs them.
        selection: Shares; a source without any is not read.
        runtime: Device and seed.
        instead: What errors advise to do without inputs.

    Raises:
        OtfuseError: Inputs that can't be read or don't fit, no network to run.
    """
    if options.samples is None and not options.synthetic:
        require_no_inputs(options, recipe)
        return None
    if isinstance(options, ImproveOptions) and not options.refits:
        require_no_fits(options)
    if recipe.mass == "importance" and recipe.align != "acts":
        raise UsageError(
            "--mass importance needs --align acts",
            where=f"--align {recipe.align}",
            why="importance is what units do, and units are compared by their weights here",
            fix="add --align acts, or use --mass norm",
        )
    if not parents.complete or selection.rules:
        raise UsageError(
            "inputs can't be used here",
            where="--samples or --synthetic",
            why="the models differ in their tensors, or have weights by tensor: there is no one "
            "function to aim at",
            fix="fuse without inputs",
        )
    from .bench import Bench

    reuse_freed_memory()
    kind = made_kind(parents, options) if options.synthetic else ""
    samples = _inputs(parents, options, recipe, kind)
    refits = isinstance(options, ImproveOptions) and options.refits and not options.force
    if refits and samples.count < LEAST_SAMPLES:
        raise UsageError(
            "too few inputs for a refit",
            where=f"{samples.count} samples",
            why=f"with fewer than {LEAST_SAMPLES} it does more harm than good",
            fix=f"give more, or {instead}, or --force to go on all the same",
        )
    anchor = parents.anchor_index
    used = [m for m in parents.models if m.index == anchor or selection.used(m.index)]
    tensors = {model.index: _tensors(model) for model in used}
    programs = _programs(parents, samples, tensors, runtime, instead)
    moved = None
    if kind in NUMBERS:
        heard = [m.index for m in used if selection.weights[m.index] > 0]
        runs = [(programs[at], tensors[at]) for at in heard]
        moved = moved_samples(kind, samples, runs, options, runtime)
        if moved is None and kind == "balanced":
            samples = _inputs(parents, options, recipe, "auto")
    return Bench(
        moved or samples,
        programs,
        tensors,
        selection.weights,
        parents,
        runtime,
        int(options.pass_memory * (1 << 30)),
        kind if moved is not None else None,
    )


def _programs(
    parents: Parents,
    samples: Samples,
    tensors: Mapping[int, Tensors],
    runtime: Runtime,
    instead: str,
) -> dict[int, Program]:
    """The forward pass of every model that has tensors; one export for each set of widths.

    Raises:
        UsageError: A model can't be run side by side with the anchor.
    """
    from ..running.runnable import runnable

    programs: dict[int, Program] = {}
    exported: dict[tuple[object, ...], Program] = {}
    others = [m for m in parents.models if m.index in tensors and m is not parents.anchor]
    for model in (parents.anchor, *others):
        architecture, shapes = parents.architecture(model.index), _shapes(model)
        deeper = model.index in parents.other_depth
        widths = (id(architecture), shapes)
        if widths not in exported:
            exported[widths] = runnable(
                architecture,
                samples,
                device=runtime.device,
                read=tensors[model.index],
                graph=None if deeper else parents.shared_architecture.graph,
            )
        programs[model.index] = exported[widths]
        source = f"{model.checkpoint.label}: {architecture.graph.source}"
        _require_one_network(
            source,
            programs[model.index],
            programs[parents.anchor_index],
            f"{instead} without inputs",
            deeper=deeper,
        )
    return programs


def add_network(bench: Bench, parents: Parents) -> Bench:
    """The bench with one more network, that of the anchor of `parents`: it gives its widths only.

    Raises:
        IncompatibleModels: The code of the network doesn't take these widths.
        UsageError: It computes something else at them.
    """
    from ..running.runnable import runnable

    model, named = parents.anchor, parents.named_anchor
    architecture = parents.architecture(model.index)
    tensors = {**bench.tensors, model.index: _tensors(model)}
    program = bench.programs[named]
    if _shapes(model) != _shapes(parents.models[named]):
        try:
            program = runnable(
                architecture,
                bench.samples,
                device=bench.runtime.device,
                read=tensors[model.index],
                graph=parents.shared_architecture.graph,
            )
        except IncompatibleModels as error:
            error.fix = _OWN_WIDTH
            raise
        source = f"--width: {parents.shared_architecture.graph.source}"
        _require_heads(architecture, model)
        _require_one_network(source, program, bench.programs[named], "use another --width")
    return replace(
        bench,
        programs={**bench.programs, model.index: program},
        tensors=tensors,
        weights=(*bench.weights, 0.0),
        parents=parents,
    )


def _require_heads(architecture: Architecture, model: Model) -> None:
    """Refuse code that makes other heads of these widths than are meant.

    Raises:
        IncompatibleModels: It does, or doesn't say.
    """
    from ..running.runnable import sizes_at

    if not has_heads(model.graph):
        return
    sizes = sizes_at(architecture, dict(_shapes(model)))
    for id, size in model.graph.sizes.items():
        made = None if sizes is None else sizes[id]
        if made != size:
            raise IncompatibleModels(
                "the network makes other heads of these widths",
                where=f"space {id}: {made} units, {size} are meant",
                why="its code fixes how many there are",
                fix=_OWN_WIDTH,
            )


def _require_one_network(
    where: str, program: Program, anchors: Program, fix: str, *, deeper: bool = False
) -> None:
    """Refuse a model that can't be run side by side with the anchor; `deeper`: of other layers.

    Raises:
        UsageError: It takes another path, or batches of another size.
    """
    from ..graph.trace.program import same_operations

    if not deeper and not same_operations(program, anchors):
        raise UsageError(
            "the network computes something else at other widths",
            where=where,
            why="its forward pass takes another path",
            fix=fix,
        )
    if program.batch != anchors.batch:
        raise UsageError(
            "programs with batches of different size",
            where=where,
            why=f"it takes {program.batch} samples at a time, that of the anchor {anchors.batch}",
            fix="export both with one batch size",
        )


def _inputs(parents: Parents, options: FusionOptions, recipe: Recipe, kind: str) -> Samples:
    """The inputs: read, or made up as a kind begins."""
    if options.samples is not None and options.synthetic:
        raise UsageError(
            "real inputs and synthetic ones",
            where="--samples and --synthetic",
            fix="give one of them",
        )
    from ..running.class_balance import drawn_for
    from ..running.inputs import slots
    from ..running.samples import load_samples
    from ..running.synthetic import first_layer_names, synthetic_samples

    of_anchor = parents.architecture(parents.anchor_index)
    arch = arch_of_each(options.arch, len(parents.models))[parents.anchor_index]
    why = "--samples" if options.samples is not None else "--synthetic"
    network = require_network(of_anchor, arch, why)
    for index in sorted(parents.other_depth):
        own = arch_of_each(options.arch, len(parents.models))[index]
        require_network(parents.architecture(index), own, f"checkpoint {index}")
    if options.samples is not None:
        number = REAL if options.num_samples is None else options.num_samples
        return load_samples(options.samples, network, number=number, seed=recipe.seed)
    first = {
        f"{model.index}.{name}": model.read(name).cpu()
        for model in parents.models
        for name in first_layer_names(model.graph)
    }
    number = options.num_samples or NUMBERS.get(kind, SYNTHETIC)
    if kind == "balanced":
        number = drawn_for(number, options.input_shape or slots(network)[0].shape)
    return synthetic_samples(
        network,
        first,
        number=number,
        seed=recipe.seed,
        input_shape=options.input_shape,
        kind=kind,
    )


def _tensors(model: Model) -> Tensors:
    tensors = {}
    for name in model.checkpoint.infos:
        tensor = model.read(name)
        tensors[name] = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    return tensors


def _shapes(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, info.shape) for name, info in model.checkpoint.infos.items())
