"""`prune`: remove units, and write the smaller network that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..checkpoint.config import read_config
from ..checkpoint.open import Checkpoint
from ..checkpoint.publication import Publication
from ..errors import SolveFailed, UsageError
from ..graph.model import LayerGraph
from ..graph.sizes import resize
from ..matching.models import Model
from ..pruning.advice import Advice, advice
from ..pruning.amounts import choose_amounts, held_together, require_share
from ..pruning.choose_units import KeptUnits, choose_kept
from ..pruning.compact import Pruner, smaller
from ..pruning.pruned_sizes import pruning_record
from ..pruning.zeroed_check import masked_change
from ..report.records import Checks, FileRecord, Report
from ..requests.requests import PruneRequest
from ..running.architecture import Architecture, architecture
from ..running.factory import factory_arguments
from ..runtime import Progress, Runtime, Stopwatch, peak_rss_bytes, resolve_device, silent
from ..session.architectures import arch_of_each, arch_record
from ..session.function_check import declared, reordered_change, require_kept, require_proof
from ..session.open_inputs import require_inputs
from ..session.outputs import (
    Put,
    folder_config,
    kept_extras,
    refuse_outputs,
    require_room,
    sink,
    target_info,
)
from ..session.parents import graph_record, open_checkpoints, shapes_of
from ..session.tied_tensors import tie
from .merge import report_path

if TYPE_CHECKING:
    from ..session.reconstruct_pruned import Reconstructed


def run_prune(request: PruneRequest, *, progress: Progress = silent) -> Report:
    """Prune `request.checkpoint` into its output file.

    Raises:
        OtfuseError: See docs/exit-codes.md; nothing is left behind.
    """
    if request.output is None:
        raise UsageError("no output", where="-o OUT", fix="say where the pruned model goes")
    return _run(request, progress)


def prune_tensors(
    request: PruneRequest, *, progress: Progress = silent
) -> tuple[dict[str, torch.Tensor], Report]:
    """Prune in memory, and to the output file as well where the request names one."""
    tensors: dict[str, torch.Tensor] = {}
    report = _run(request, progress, also=tensors.__setitem__)
    return tensors, report


@dataclass(frozen=True)
class _Pruned:
    """A network with what stays of it; `made` where its tensors were fitted on inputs."""

    known: Architecture
    model: Model
    choice: KeptUnits
    graph: LayerGraph
    made: Reconstructed | None = None


def _run(request: PruneRequest, progress: Progress, also: Put | None = None) -> Report:
    with Publication(overwrite=request.overwrite) as outputs:
        return _prune(request, progress, also, outputs)


def _prune(
    request: PruneRequest, progress: Progress, also: Put | None, outputs: Publication
) -> Report:
    _require_amounts(request)
    require_inputs(request)
    output = None if request.output is None else Path(request.output)
    report_at = report_path(output, request.report)
    refuse_outputs(output, report_at, (request.checkpoint,), request)
    watch = Stopwatch()
    runtime = Runtime(resolve_device(request.device), request.seed, progress)
    (arch,) = arch_of_each(request.arch, 1)
    with open_checkpoints((request.checkpoint,), request.key) as (stored,):
        with watch("graph"):
            one = tie((stored,), 0, arch)
            checkpoint = one.checkpoints[0]
            known = architecture(
                arch,
                shapes_of(checkpoint),
                aliases=checkpoint.aliases,
                config=read_config(checkpoint.path),
                label=checkpoint.label,
            )
            graph = known.graph
            require_proof(graph, asked=request.require_proof)
            if shapes_of(checkpoint) != {n: t.shape for n, t in graph.tensors.items()}:
                graph = resize(
                    graph, shapes_of(checkpoint), label=checkpoint.label, anchor=graph.source
                )
            model = Model(0, checkpoint, graph, runtime.device)
            amounts = choose_amounts(graph, request.amount, request.only, request.layer)
        with watch("prune"):
            choice = choose_kept(model, amounts, request.criterion, runtime)
        work = _Pruned(known, model, choice, smaller(graph, choice.kept))
        if request.criterion == "reconstruct" and choice.kept:
            from ..session.reconstruct_pruned import reconstruct_pruned

            found = reconstruct_pruned(request, known, model, choice.kept, runtime, watch)
            work = replace(work, made=found)
        with watch("check"):
            checks, remarks = _check(work)
            require_kept(checks, remarks, graph, asked=request.require_proof)
        told = advice(
            graph,
            work.graph,
            config=_config(request, checkpoint.path),
            arguments=factory_arguments(arch),
        )
        with watch("write"):
            lost, written = _write(
                request, output, work, one.copies, stored, runtime, also, told, outputs
            )
        report = Report(
            command="prune",
            version=__version__,
            inputs=(checkpoint.record(),),
            output=written,
            recipe=_recipe(request, runtime, work.made),
            graph=graph_record(work.graph),
            checks=checks,
            pruning=pruning_record(
                graph,
                work.graph,
                criterion=request.criterion,
                advice=told.sentences,
            ),
            warnings=(*one.warnings, *graph.warnings, *_left_whole(work, request), *lost, *remarks),
            steps=work.made.steps if work.made is not None else (),
            refits=work.made.refits if work.made is not None else (),
        )
    report = report.replace(timings=dict(watch.seconds), peak_rss_bytes=peak_rss_bytes())
    if report_at is not None:
        outputs.write(report_at, report.to_json())
    return report


def _require_amounts(request: PruneRequest) -> None:
    if request.amount is None and not request.layer:
        raise UsageError(
            "nothing says how much to prune",
            where="--amount, --layer",
            fix="for example --amount 0.5, or --layer fc1=0.9",
        )
    if request.only and request.amount is None:
        raise UsageError("--only needs --amount", where="--only", fix="--layer names single layers")
    if request.amount is not None:
        require_share(request.amount, f"--amount {request.amount:g}")
    for name, share in (request.layer or {}).items():
        require_share(share, f"--layer {name}={share:g}", zero=True)


def _check(work: _Pruned) -> tuple[Checks, tuple[str, ...]]:
    """Compact against masked, where the network can be run and units are dropped.

    Where units are merged or fitted instead, nothing is kept exactly: there the whole network is
    run with its units in another order, which shows that the graph is right.

    Raises:
        SolveFailed: They differ by more than rounding.
    """
    verdict = declared(work.known.graph)
    kept = work.choice.kept
    fitted = work.made.remarks if work.made is not None else ()
    together = sorted(set(held_together(work.model.graph)) & set(kept))
    if together and work.made is None:
        return verdict, (
            f"{', '.join(together)}: a norm takes its statistics over these units, so that those "
            "which are left change too",
        )
    if not kept:
        return verdict, fitted
    if work.made is not None or work.choice.merges:
        change, remarks = reordered_change(work.known, work.model)
        fitted = (*fitted, *remarks)
    else:
        change = masked_change(work.known, work.model, kept)
    if change is None:
        return verdict, fitted
    if not change.error <= change.allowed:
        raise SolveFailed(
            "the compact network computes something else than the masked one",
            where=f"{work.model.checkpoint.label}: outputs differ by {change.error:.2g} (relative)",
            why=f"{work.model.graph.source} says units go together that do not",
            fix="find the claim with otfuse check, or correct the spec",
        )
    return verdict.replace(function=verdict.function or "kept", max_error=change.error), fitted


def _write(
    request: PruneRequest,
    output: Path | None,
    work: _Pruned,
    copies: Mapping[str, tuple[str, ...]],
    like: Checkpoint,
    runtime: Runtime,
    also: Put | None,
    told: Advice,
    outputs: Publication,
) -> tuple[tuple[str, ...], tuple[FileRecord, ...]]:
    """Write every tensor; returns what could not be written along with them, and what was."""
    checkpoint = work.model.checkpoint
    own = read_config(checkpoint.path)
    config, remarks = folder_config(
        output, own, told if own == _config(request, checkpoint.path) else Advice(told.sentences)
    )
    pruner = Pruner(work.model, work.choice, None if work.made is None else work.made.tensors)
    infos = [
        replace(target_info(info, request.dtype), shape=work.graph.tensors[info.name].shape)
        for info in checkpoint.infos.values()
    ]
    again = {i.name: [replace(i, name=n) for n in copies.get(i.name, ())] for i in infos}
    every = [i for info in infos for i in (info, *again[info.name])]
    require_room(output, every)
    extras, lost = kept_extras(checkpoint, request)
    with sink(
        output, like, every, request, outputs, also=also, extras=extras, config=config
    ) as out:
        for done, info in enumerate(infos):
            runtime.progress("write", done, len(infos))
            tensor = pruner.tensor(info.name, info.dtype)
            out.put(info.name, tensor)
            for copy in again[info.name]:
                out.put(copy.name, tensor.clone())
    runtime.progress("write", len(infos), len(infos))
    return (*lost, *remarks), out.written


def _left_whole(work: _Pruned, request: PruneRequest) -> tuple[str, ...]:
    left = [s for s in held_together(work.model.graph) if s not in work.choice.kept]
    if request.amount is None or request.only or not left:
        return ()
    return (
        f"{', '.join(left)} stays whole: a layer norm ties its units together; --layer prunes it "
        "all the same",
    )


def _config(request: PruneRequest, path: Path | None) -> Mapping[str, Any] | None:
    """The config.json that the network is built from."""
    (arch,) = arch_of_each(request.arch, 1)
    if isinstance(arch, str) and arch.startswith("hf:"):
        return read_config(Path(arch.removeprefix("hf:")))
    return read_config(path)


def _recipe(request: PruneRequest, runtime: Runtime, made: Reconstructed | None) -> dict[str, Any]:
    recipe = {
        "criterion": request.criterion,
        "amount": request.amount,
        "only": list(request.only),
        "layer": dict(request.layer or {}),
        "arch": arch_record(request.arch, 1),
        "keep_extras": request.keep_extras,
        "shard_size": request.shard_size,
        "dtype": request.dtype,
        "device": runtime.device,
        "seed": request.seed,
    }
    if request.criterion != "reconstruct":
        return recipe
    samples, driven = request.samples, made is not None and made.driven
    return recipe | {
        "samples": str(samples) if isinstance(samples, str | Path) else None,
        "synthetic": request.synthetic,
        "synthetic_kind": "class" if driven else request.synthetic_kind,
        "num_samples": request.num_samples,
        "input_shape": request.input_shape,
        "ridge": request.ridge,
    }
