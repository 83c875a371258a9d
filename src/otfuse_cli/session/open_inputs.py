"""Inputs for a fusion, read or made up, and a bench on which its models run on them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import UsageError
from ..fusion.selection import Selection
from ..matching.models import Model
from ..requests.recipe import Recipe
from ..requests.requests import FusionOptions, ImproveOptions, PruneRequest
from ..running.architecture import require_network
from ..runtime import Runtime
from .architectures import arch_of_each
from .parents import Parents

if TYPE_CHECKING:
    from ..graph.trace.program import Program
    from ..running.samples import Samples
    from .bench import Bench, Tensors

# Fewer inputs than this say too little about a layer (docs/methods/inputs.md, Real).
LEAST_SAMPLES = 25
REAL, SYNTHETIC = 400, 2_000
CLASS_DRIVEN = 900  # each costs two dozen passes, forward and back


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


def _require_no_fits(options: ImproveOptions) -> None:
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
    """Refuse `reconstruct` without inputs, and inputs without it.

    Raises:
        UsageError: One of them is the case.
    """
    given = "--samples" if request.samples is not None else "--synthetic" * request.synthetic
    if request.criterion == "reconstruct" and not given:
        raise UsageError(
            "--criterion reconstruct needs inputs",
            where="--criterion reconstruct",
            why="it looks at what units do, and fits layers to it",
            fix="add --samples FILE, or --synthetic for inputs that are made up",
        )
    if given and request.criterion != "reconstruct":
        raise UsageError(
            f"{given} means nothing here",
            where=f"--criterion {request.criterion}",
            why="units are chosen by their weights",
            fix=f"add --criterion reconstruct, or leave out {given}",
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
        _require_no_fits(options)
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
    from ..running.class_driven import drive_to_classes
    from ..running.runnable import runnable
    from .bench import Bench

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
    weights = selection.weights
    used = [m for m in parents.models if m.index == anchor or selection.used(m.index)]
    tensors = {m.index: _tensors(m) for m in used}
    programs: dict[int, Program] = {}
    by_shape: dict[tuple[object, ...], Program] = {}
    for model in (parents.anchor, *(m for m in used if m.index != anchor)):
        known, shapes = parents.architecture(model.index), _shapes(model)
        key = (id(known), shapes)
        if key not in by_shape:
            by_shape[key] = runnable(
                known,
                samples,
                device=runtime.device,
                read=tensors[model.index],
                graph=parents.known.graph,
            )
        programs[model.index] = by_shape[key]
        _require_one_network(parents, model, programs, instead)
    driven = options.synthetic and _kind(parents, options) == "class"
    if driven:
        try:
            samples = drive_to_classes(
                samples,
                [(programs[m.index], tensors[m.index]) for m in used if weights[m.index] > 0],
                seed=recipe.seed,
                device=runtime.device,
                progress=partial(runtime.progress, "inputs"),
            )
        except UsageError:
            if options.synthetic_kind == "class":
                raise
            driven = False
    most = _most_bytes(options.max_memory)
    return Bench(samples, programs, tensors, weights, parents, runtime, most, driven)


def _require_one_network(
    parents: Parents, model: Model, programs: Mapping[int, Program], instead: str
) -> None:
    """Refuse a model that can't be run side by side with the anchor.

    Raises:
        UsageError: It takes another path, or batches of another size.
    """
    from ..graph.trace.program import same_operations

    mine, anchors = programs[model.index], programs[parents.anchor_index]
    where = f"{model.checkpoint.label}: {parents.architecture(model.index).graph.source}"
    if not same_operations(mine, anchors):
        raise UsageError(
            "the network computes something else at other widths",
            where=where,
            why="its forward pass takes another path",
            fix=f"{instead} without inputs",
        )
    if mine.batch != anchors.batch:
        raise UsageError(
            "programs with batches of different size",
            where=where,
            why=f"it takes {mine.batch} samples at a time, that of the anchor {anchors.batch}",
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

    known = parents.architecture(parents.anchor_index)
    arch = arch_of_each(options.arch, len(parents.models))[parents.anchor_index]
    network = require_network(
        known, arch, "--samples" if options.samples is not None else "--synthetic"
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

    network, kind = parents.known.network, options.synthetic_kind
    if kind != "auto" or network is None:
        return kind
    image = [len(slot.shape) == 3 and not slot.integer for slot in slots(network)] == [True]
    heads = any(space.per is not None for space in parents.known.graph.spaces.values())
    return "class" if image and heads else kind


def _tensors(model: Model) -> Tensors:
    found = {}
    for name in model.checkpoint.infos:
        tensor = model.read(name)
        found[name] = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    return found


def _shapes(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, info.shape) for name, info in model.checkpoint.infos.items())


def _most_bytes(max_memory: float | None) -> int:
    return int((4.0 if max_memory is None else max_memory) * (1 << 30))
