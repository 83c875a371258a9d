"""A network with what is left of it: checked against the whole one, and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.config import read_config
from ..checkpoint.open import Checkpoint
from ..checkpoint.publication import Publication
from ..errors import SolveFailed
from ..graph.model import LayerGraph
from ..matching.models import Model
from ..pruning.advice import Advice
from ..pruning.amounts import held_together
from ..pruning.choose_units import KeptUnits
from ..pruning.compact import Pruner
from ..pruning.zeroed_check import masked_change
from ..report.records import Checks, FileRecord
from ..requests.requests import PruneRequest
from ..running.arch_value import Arch
from ..running.architecture import Architecture
from ..runtime import Runtime
from .architectures import built_from
from .function_check import declared, reordered_change
from .outputs import Put, folder_config, kept_extras, require_room, sink, target_info

if TYPE_CHECKING:
    from .reconstruct_pruned import Reconstructed


@dataclass(frozen=True)
class PrunedNetwork:
    """A network with what stays of it.

    Attributes:
        architecture: Of the whole network.
        model: The whole network.
        choice: Which units stay, and where the others go.
        graph: Of what is left.
        made: Its tensors, where they were fitted on inputs.
    """

    architecture: Architecture
    model: Model
    choice: KeptUnits
    graph: LayerGraph
    made: Reconstructed | None = None


def check_pruned(work: PrunedNetwork) -> tuple[Checks, tuple[str, ...]]:
    """Compact against masked, where the network can be run and units are dropped.

    Where units are merged or fitted instead, nothing is kept exactly: there the whole network is
    run with its units in another order, which shows that the graph is right.

    Raises:
        SolveFailed: They differ by more than rounding.
    """
    verdict = declared(work.architecture.graph)
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
        change, remarks = reordered_change(work.architecture, work.model)
        fitted = (*fitted, *remarks)
    else:
        change = masked_change(work.architecture, work.model, kept)
    if change is None:
        return verdict, fitted
    if not change.error <= change.allowed:
        raise SolveFailed(
            "the compact network computes something else than the masked one",
            where=f"{work.model.checkpoint.label}: outputs differ by {change.error:.2g} (relative)",
            why=f"{work.model.graph.source} says units go together that do not",
            fix="find the claim with otfuse check, or correct the spec",
        )
    function = verdict.function or "kept"
    return verdict.replace(function=function, max_error=change.error), fitted


@dataclass(frozen=True)
class Destination:
    """Where a pruned network goes.

    Attributes:
        request: Its dtype, and what is kept.
        output: Its file or folder; None for none.
        arch: Of the network.
        like: The checkpoint as it was opened, whose container it gets.
        copies: What is stored again under other names.
        also: Gets every tensor too.
        outputs: Where files appear together.
    """

    request: PruneRequest
    output: Path | None
    arch: Arch
    like: Checkpoint
    copies: Mapping[str, tuple[str, ...]]
    also: Put | None
    outputs: Publication

    def config(self, changes: Advice) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """What the config.json of an output folder has to say, and what to say of it."""
        path = self.like.path
        beside = read_config(path)
        built = beside == built_from(self.arch, path)
        return folder_config(self.output, beside, changes if built else Advice(changes.sentences))


def write_pruned(
    work: PrunedNetwork, changes: Advice, to: Destination, runtime: Runtime
) -> tuple[tuple[str, ...], tuple[FileRecord, ...]]:
    """Write every tensor; returns what could not be written along with them, and what was."""
    request, checkpoint = to.request, work.model.checkpoint
    config, remarks = to.config(changes)
    pruner = Pruner(work.model, work.choice, None if work.made is None else work.made.tensors)
    infos = [
        replace(target_info(info, request.dtype), shape=work.graph.tensors[info.name].shape)
        for info in checkpoint.infos.values()
    ]
    again, every = {}, []
    for info in infos:
        again[info.name] = [replace(info, name=name) for name in to.copies.get(info.name, ())]
        every += [info, *again[info.name]]
    require_room(to.output, every)
    extras, lost = kept_extras(checkpoint, request)
    with sink(
        to.output, to.like, every, request, to.outputs, also=to.also, extras=extras, config=config
    ) as out:
        for done, info in enumerate(infos):
            runtime.progress("write", done, len(infos))
            tensor = pruner.tensor(info.name, info.dtype)
            out.put(info.name, tensor)
            for copy in again[info.name]:
                out.put(copy.name, tensor.clone())
    runtime.progress("write", len(infos), len(infos))
    return (*lost, *remarks), out.written
