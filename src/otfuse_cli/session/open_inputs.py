"""Inputs for a fusion, read or made up, and a bench on which its models run on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import UsageError
from ..fusion.selection import Selection
from ..matching.models import Model
from ..requests.recipe import Recipe
from ..requests.requests import FusionOptions, ImproveOptions
from ..running.architecture import require_network
from ..runtime import Runtime, reuse_freed_memory
from .architectures import arch_of_each
from .input_rules import require_no_fits, require_no_inputs
from .parents import Parents

if TYPE_CHECKING:
    from ..graph.trace.program import Program
    from ..running.samples import Samples
    from .bench import Bench, Tensors

# Fewer inputs than this say too little about a layer (docs/methods/inputs.md, Real).
LEAST_SAMPLES = 25
REAL, SYNTHETIC = 400, 2_000
CLASS_DRIVEN = 900  # each costs two dozen passes, forward and back


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
    samples = _inputs(parents, options, recipe)
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
    driven = None
    if options.synthetic and _kind(parents, options) == "class":
        heard = [m.index for m in used if selection.weights[m.index] > 0]
        runs = [(programs[at], tensors[at]) for at in heard]
        driven = _driven(samples, runs, runtime, required=options.synthetic_kind == "class")
    return Bench(
        driven or samples,
        programs,
        tensors,
        selection.weights,
        parents,
        runtime,
        int(options.pass_memory * (1 << 30)),
        driven is not None,
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
        widths = (id(architecture), shapes)
        if widths not in exported:
            exported[widths] = runnable(
                architecture,
                samples,
                device=runtime.device,
                read=tensors[model.index],
                graph=parents.shared_architecture.graph,
            )
        programs[model.index] = exported[widths]
        _require_one_network(parents, model, programs, instead)
    return programs


def _driven(
    samples: Samples,
    runs: Sequence[tuple[Program, Tensors]],
    runtime: Runtime,
    *,
    required: bool,
) -> Samples | None:
    """The inputs driven toward what the networks take for classes; None where that can't be.

    Raises:
        UsageError: The same, where it was asked for.
    """
    from ..running.class_driven import drive_to_classes

    try:
        return drive_to_classes(
            samples,
            runs,
            seed=runtime.seed,
            device=runtime.device,
            progress=partial(runtime.progress, "inputs"),
        )
    except UsageError:
        if required:
            raise
        return None


def _require_one_network(
    parents: Parents, model: Model, programs: Mapping[int, Program], instead: str
) -> None:
    """Refuse a model that can't be run side by side with the anchor.

    Raises:
        UsageError: It takes another path, or batches of another size.
    """
    from ..graph.trace.program import same_operations

    program, anchors = programs[model.index], programs[parents.anchor_index]
    where = f"{model.checkpoint.label}: {parents.architecture(model.index).graph.source}"
    if not same_operations(program, anchors):
        raise UsageError(
            "the network computes something else at other widths",
            where=where,
            why="its forward pass takes another path",
            fix=f"{instead} without inputs",
        )
    if program.batch != anchors.batch:
        raise UsageError(
            "programs with batches of different size",
            where=where,
            why=f"it takes {program.batch} samples at a time, that of the anchor {anchors.batch}",
            fix="export both with one batch size",
        )


def _inputs(parents: Parents, options: FusionOptions, recipe: Recipe) -> Samples:
    if options.samples is not None and options.synthetic:
        raise UsageError(
            "real inputs and synthetic ones",
            where="--samples and --synthetic",
            fix="give one of them",
        )
    from ..running.samples import load_samples
    from ..running.synthetic import first_layer_names, synthetic_samples

    of_anchor = parents.architecture(parents.anchor_index)
    arch = arch_of_each(options.arch, len(parents.models))[parents.anchor_index]
    network = require_network(
        of_anchor, arch, "--samples" if options.samples is not None else "--synthetic"
    )
    if options.samples is not None:
        number = REAL if options.num_samples is None else options.num_samples
        return load_samples(options.samples, network, number=number, seed=recipe.seed)
    first = {
        f"{model.index}.{name}": model.read(name).cpu()
        for model in parents.models
        for name in first_layer_names(model.graph)
    }
    kind = _kind(parents, options)
    usual = CLASS_DRIVEN if kind == "class" else SYNTHETIC
    return synthetic_samples(
        network,
        first,
        number=usual if options.num_samples is None else options.num_samples,
        seed=recipe.seed,
        input_shape=options.input_shape,
        kind=kind,
    )


def _kind(parents: Parents, options: FusionOptions) -> str:
    """What is made up. Where attention reads images, leaves do harm (docs/methods/inputs.md)."""
    from ..running.inputs import slots

    network, kind = parents.shared_architecture.network, options.synthetic_kind
    if kind != "auto" or network is None:
        return kind
    image = [len(slot.shape) == 3 and not slot.integer for slot in slots(network)] == [True]
    heads = any(
        space.per is not None for space in parents.shared_architecture.graph.spaces.values()
    )
    return "class" if image and heads else kind


def _tensors(model: Model) -> Tensors:
    tensors = {}
    for name in model.checkpoint.infos:
        tensor = model.read(name)
        tensors[name] = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    return tensors


def _shapes(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, info.shape) for name, info in model.checkpoint.infos.items())
