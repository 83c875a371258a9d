"""`prune`: remove units or blocks, and write the smaller network that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..checkpoint.open import Checkpoint
from ..checkpoint.publication import Publication
from ..errors import UsageError
from ..graph.analysis.restrict import remaining
from ..graph.model import LayerGraph
from ..graph.sizes import resize
from ..matching.models import Model
from ..pruning.advice import advice
from ..pruning.amounts import choose_amounts, held_together, require_share
from ..pruning.choose_units import choose_kept
from ..pruning.compact import smaller
from ..pruning.depth_advice import depth_advice
from ..pruning.pruned_sizes import pruning_record
from ..pruning.renumber import renumbered
from ..remote.location import location
from ..report.records import Checks, FileRecord, Pruning, Report
from ..requests.requests import PruneRequest
from ..running.arch_value import Arch
from ..running.architecture import Architecture
from ..running.factory import factory_arguments
from ..runtime import Progress, Runtime, Stopwatch, peak_rss_bytes, resolve_device, silent
from ..session.architectures import arch_of_each, arch_record, built_from
from ..session.find_architecture import find_architecture, shapes_of
from ..session.function_check import require_kept, require_proof
from ..session.graph_records import graph_record
from ..session.input_rules import require_inputs
from ..session.merge_plan import report_path
from ..session.outputs import (
    Put,
    refuse_outputs,
)
from ..session.parents import open_checkpoints
from ..session.pruned_network import Destination, PrunedNetwork, check_pruned, write_pruned
from ..session.tied_tensors import tie

if TYPE_CHECKING:
    from ..session.reconstruct_pruned import Reconstructed
    from ..session.remove_blocks import Shallower


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


def _run(request: PruneRequest, progress: Progress, also: Put | None = None) -> Report:
    with Publication(overwrite=request.overwrite) as outputs:
        return _prune(request, progress, also, outputs)


def _prune(
    request: PruneRequest, progress: Progress, also: Put | None, outputs: Publication
) -> Report:
    request = _as_asked(request)
    _require_amounts(request)
    require_inputs(request)
    output = None if request.output is None else location(request.output)
    report_at = report_path(output, request.report)
    refuse_outputs(output, report_at, (request.checkpoint,), request)
    watch = Stopwatch()
    runtime = Runtime(resolve_device(request.device), request.seed, progress)
    (arch,) = arch_of_each(request.arch, 1)
    with open_checkpoints((request.checkpoint,), request.key) as (stored,):
        with watch("graph"):
            one = tie((stored,), 0, arch)
            checkpoint = one.checkpoints[0]
            model, traced = _whole(request, checkpoint, arch, runtime)
        to = Destination(request, output, arch, stored, one.copies, also, outputs)
        task = _Task(request, model, traced, to, runtime, watch)
        done = _units(task) if request.depth is None else _blocks(task)
        report = Report(
            command="prune",
            version=__version__,
            inputs=(checkpoint.record(),),
            output=done.written,
            recipe=_recipe(request, runtime, done.made),
            graph=graph_record(done.graph),
            checks=done.checks,
            pruning=done.pruning,
            warnings=(
                *((stored.remark,) if stored.remark else ()),
                *traced.remarks,
                *one.warnings,
                *model.graph.warnings,
                *done.remarks,
            ),
            steps=done.made.steps if done.made is not None else (),
            refits=done.made.refits if done.made is not None else (),
        )
    report = report.replace(timings=dict(watch.seconds), peak_rss_bytes=peak_rss_bytes())
    if report_at is not None:
        outputs.write(report_at, report.to_json())
    return report


@dataclass(frozen=True)
class _Task:
    """What is pruned, and where it goes."""

    request: PruneRequest
    model: Model
    traced: Architecture
    to: Destination
    runtime: Runtime
    watch: Stopwatch

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The config.json that the network was built from."""
        return built_from(self.to.arch, self.model.checkpoint.path)


@dataclass(frozen=True)
class _Done:
    """What was written, checked and made, as the report tells it."""

    graph: LayerGraph
    checks: Checks
    pruning: Pruning
    remarks: tuple[str, ...]
    written: tuple[FileRecord, ...]
    made: Reconstructed | Shallower | None


def _units(task: _Task) -> _Done:
    """Remove units (`--amount`, `--layer`)."""
    request, graph = task.request, task.model.graph
    work = _cut(request, task.model, task.traced, task.runtime, task.watch)
    with task.watch("check"):
        checks, remarks = check_pruned(work)
        require_kept(checks, remarks, graph, asked=request.require_proof)
    changes = advice(
        graph,
        work.graph,
        config=task.config,
        arguments=factory_arguments(task.to.arch),
    )
    with task.watch("write"):
        lost, written = write_pruned(work, changes, task.to, task.runtime)
    pruning = pruning_record(
        graph, work.graph, criterion=request.criterion, advice=changes.sentences
    )
    remarks = (*_left_whole(work, request), *lost, *remarks)
    return _Done(work.graph, checks, pruning, remarks, written, work.made)


def _blocks(task: _Task) -> _Done:
    """Remove blocks (`--depth`)."""
    from ..session.remove_blocks import remove_blocks
    from ..session.shallower import check_shallower, write_shallower

    request, model = task.request, task.model
    work = remove_blocks(request, task.traced, model, task.runtime, task.watch)
    changes = depth_advice(
        work.lists,
        work.gone,
        config=task.config,
        arguments=factory_arguments(task.to.arch),
    )
    with task.watch("check"):
        checks, remarks = check_shallower(task.traced, model, work, changes)
        require_kept(checks, remarks, model.graph, asked=request.require_proof)
    with task.watch("write"):
        lost, written = write_shallower(model, work, changes, task.to, task.runtime)
    graph = remaining(model.graph, work.left)
    pruning = pruning_record(
        model.graph,
        graph,
        criterion=request.criterion,
        advice=changes.sentences,
        removals=work.removals,
    )
    renamed = remaining(model.graph, work.left, lambda name: renumbered(name, work.lists))
    return _Done(renamed, checks, pruning, (*lost, *work.remarks, *remarks), written, work)


def _whole(
    request: PruneRequest, checkpoint: Checkpoint, arch: Arch, runtime: Runtime
) -> tuple[Model, Architecture]:
    """The network as it is, on a graph of its own widths."""
    shapes = shapes_of(checkpoint)
    traced = find_architecture(checkpoint, arch)
    graph = traced.graph
    require_proof(graph, asked=request.require_proof)
    if shapes != {name: tensor.shape for name, tensor in graph.tensors.items()}:
        graph = resize(graph, shapes, label=checkpoint.label, anchor=graph.source)
    return Model(0, checkpoint, graph, runtime.device), traced


def _cut(
    request: PruneRequest, model: Model, traced: Architecture, runtime: Runtime, watch: Stopwatch
) -> PrunedNetwork:
    """Choose which units stay; for `reconstruct` by what they do, and fit what reads them."""
    graph = model.graph
    with watch("prune"):
        amounts = choose_amounts(graph, request.amount, request.only, request.layer)
        choice = choose_kept(model, amounts, request.criterion, runtime)
    work = PrunedNetwork(traced, model, choice, smaller(graph, choice.kept))
    if request.criterion != "reconstruct" or not choice.kept:
        return work
    from ..session.reconstruct_pruned import reconstruct_pruned

    made = reconstruct_pruned(request, traced, model, choice.kept, runtime, watch)
    return replace(work, made=made)


def _as_asked(request: PruneRequest) -> PruneRequest:
    """The request with the criterion that `--depth` has.

    Raises:
        UsageError: `--depth` beside what it doesn't go with.
    """
    if request.depth is None:
        return request
    if request.amount is not None or request.layer:
        raise UsageError(
            "blocks and units at once",
            where="--depth and " + ("--amount" if request.amount is not None else "--layer"),
            why="which units of a block are worth keeping depends on which blocks are left",
            fix="one after the other: --depth first, then prune what it has written",
        )
    if request.criterion not in ("l1", "reconstruct"):
        raise UsageError(
            f"--criterion {request.criterion} means nothing here",
            where=f"--depth {request.depth}",
            why="blocks are chosen by what the outputs miss without them",
            fix="leave it out",
        )
    return replace(request, criterion="reconstruct")


def _require_amounts(request: PruneRequest) -> None:
    if request.depth is not None:
        return
    if request.amount is None and not request.layer:
        raise UsageError(
            "nothing says how much to prune",
            where="--amount, --layer, --depth",
            fix="for example --amount 0.5, or --layer fc1=0.9, or --depth 2",
        )
    if request.only and request.amount is None:
        raise UsageError("--only needs --amount", where="--only", fix="--layer names single layers")
    if request.amount is not None:
        require_share(request.amount, f"--amount {request.amount:g}")
    for name, share in (request.layer or {}).items():
        require_share(share, f"--layer {name}={share:g}", zero=True)


def _left_whole(work: PrunedNetwork, request: PruneRequest) -> tuple[str, ...]:
    left = [s for s in held_together(work.model.graph) if s not in work.choice.kept]
    if request.amount is None or request.only or not left:
        return ()
    return (
        f"{', '.join(left)} stays whole: a layer norm ties its units together; --layer prunes it "
        "all the same",
    )


def _recipe(
    request: PruneRequest, runtime: Runtime, made: Reconstructed | Shallower | None
) -> dict[str, Any]:
    recipe = {
        "criterion": request.criterion,
        "amount": request.amount,
        "depth": request.depth,
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
    samples, moved = request.samples, made.moved if made is not None else None
    return recipe | {
        "samples": str(samples) if isinstance(samples, str | Path) else None,
        "synthetic": request.synthetic,
        "synthetic_kind": moved or request.synthetic_kind,
        "synthetic_steps": request.synthetic_steps,
        "num_samples": request.num_samples,
        "input_shape": request.input_shape,
        "ridge": request.ridge,
    }
