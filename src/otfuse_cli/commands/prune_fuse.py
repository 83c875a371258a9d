"""`prune-fuse`: fuse a dense network into its pruned version, which is the anchor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import torch

from ..checkpoint.open import Checkpoint
from ..errors import UsageError
from ..fusion.average import Aligned
from ..matching.alignment import Alignment
from ..matching.match import match
from ..matching.matchers.sweep import Match
from ..matching.models import Model
from ..matching.portfolio import Judge
from ..pruning.fixed_points import fixed_points_apply, match_survivors
from ..pruning.pruned_sizes import pruning_record
from ..pruning.survivors import Survivors, find_survivors
from ..remote.location import location
from ..report.records import Report
from ..requests.recipe import Recipe
from ..requests.requests import ImproveOptions, PruneFuseRequest
from ..runtime import Progress, Runtime, silent
from ..session.merge_plan import MergePlan, Steps, report_path
from ..session.parents import Parents
from ..session.pipeline import run
from ..session.pruned_parents import assemble_pruned
from ..transport.choice import PartlyFixed

# Weight of a dense net whose units are all that the pruned one has (measured on training
# images: docs/methods/pruning.md), and of one that the pruned net was trained away from.
_TRUSTING, _CAREFUL = 0.7, 0.5


def run_prune_fuse(request: PruneFuseRequest, *, progress: Progress = silent) -> Report:
    """Fuse `request.dense` into `request.pruned`; the output has the pruned net's shape.

    Raises:
        OtfuseError: See docs/exit-codes.md; nothing is left behind.
    """
    return run(_plan(request, to_file=True), progress)


def prune_fuse_tensors(
    request: PruneFuseRequest, *, progress: Progress = silent
) -> tuple[dict[str, torch.Tensor], Report]:
    """Fuse in memory, and to the output file as well where the request names one."""
    tensors: dict[str, torch.Tensor] = {}
    report = run(_plan(request, to_file=False), progress, also=tensors.__setitem__)
    return tensors, report


def _plan(request: PruneFuseRequest, *, to_file: bool) -> MergePlan:
    weight = _CAREFUL if request.dense_weight is None else request.dense_weight
    if not (isfinite(weight) and 0 <= weight <= 1):
        raise UsageError(
            "the dense weight must lie between 0 and 1",
            where=f"--dense-weight {weight:g}",
            fix="0 keeps the pruned net, 1 the aligned dense one",
        )
    output = request.output
    if output is None and to_file:
        if not isinstance(request.pruned, str | Path):
            raise UsageError("no output", where="-o OUT", fix="say where the fused model goes")
        pruned = location(request.pruned)
        name = f"{pruned.stem}.fused{pruned.suffix}"
        if pruned.is_dir():
            name = f"{pruned.resolve().name}-fused"  # a suffix would make it a file
            pruned = pruned.resolve()
        output = pruned.with_name(name)
    steps = _Steps(replace(request, output=output))
    return MergePlan(
        command="prune-fuse",
        checkpoints=(request.dense, request.pruned),
        anchor_index=1,
        weights=(weight, 1 - weight),
        output=output,
        report=report_path(output, request.report),
        options=request,
        target=request,
        steps=Steps(steps.assemble, steps.match, steps.describe, steps.teach),
    )


@dataclass
class _Steps:
    """What a pruned anchor adds to a fusion: compaction, survivors, and what to say of them.

    `survivors` are found once, with the models; a refit asks for them too.
    """

    request: PruneFuseRequest
    survivors: Mapping[str, Survivors] | None = None
    remarks: tuple[str, ...] = ()

    def assemble(
        self, checkpoints: Sequence[Checkpoint], anchor: int, options: ImproveOptions, device: str
    ) -> Parents:
        parents, self.remarks = assemble_pruned(checkpoints, self.request, device)
        if self.request.dense_weight == 0:
            return parents  # the dense net is not read beyond its header
        self.survivors = find_survivors(*parents.models)
        same = all(s.complete for s in self.survivors.values())
        if self.request.dense_weight is None and same and self._matches(*parents.models):
            return replace(parents, weights=(_TRUSTING, 1 - _TRUSTING))
        return parents

    def match(
        self,
        source: Model,
        anchor: Model,
        recipe: Recipe,
        runtime: Runtime,
        judge: Judge | None = None,
    ) -> Match:
        """By survivors, where the options leave it to us and there are any."""
        if self._matches(source, anchor):
            assert self.survivors is not None
            return match_survivors(source, anchor, self.survivors, recipe)
        return match(source, anchor, recipe, runtime, judge)

    def teach(self, aligned: Sequence[Aligned]) -> list[Aligned] | None:
        """What a refit aims at: the dense network, on the units that survived as they are.

        A pruned unit that is no survivor aims at what the map makes of the dense ones. None where
        nothing survived: then the two networks are parents like any others.
        """
        if self.survivors is None or not any(len(s.pruned_S) for s in self.survivors.values()):
            return None
        teachers = []
        for source in aligned:
            maps = {
                space: PartlyFixed(
                    map, self.survivors[space].dense_S, self.survivors[space].pruned_S
                )
                if space in self.survivors
                else map
                for space, map in source.alignment.maps.items()
            }
            teachers.append(replace(source, alignment=Alignment(maps), weight=1.0))
        return teachers

    def describe(self, parents: Parents, report: Report) -> Report:
        dense, pruned = parents.models
        remarks = list(self.remarks)
        if self.survivors is not None and not any(len(s.pruned_S) for s in self.survivors.values()):
            remarks.append(
                "no unit of the pruned network is one of the dense network's: it was trained "
                "further, or is another network; units are matched as different widths are"
            )
        pruning = pruning_record(dense.graph, pruned.graph, survivors=self.survivors)
        recipe = {**report.recipe, "keep_shape": self.request.keep_shape}
        return report.replace(recipe=recipe, pruning=pruning, warnings=(*report.warnings, *remarks))

    def _matches(self, dense: Model, pruned: Model) -> bool:
        """Whether survivors decide the maps."""
        return (
            self.survivors is not None
            and self._free_to_choose()
            and fixed_points_apply(dense, pruned, self.survivors)
        )

    def _free_to_choose(self) -> bool:
        """Whether no option asks for another way of matching."""
        ask = self.request
        default = {
            "matcher": "auto",
            "align": "wts",
            "solver": "exact",
            "residual": "shared",
            "mass": None,
        }
        return not ask.paper and all(
            getattr(ask, name) in (None, value) for name, value in default.items()
        )
