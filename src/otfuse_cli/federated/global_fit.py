"""The global model, fitted to what its clients compute on inputs of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..matching.alignment import Alignment
from ..matching.matchers.sweep import Match
from ..matching.models import Model
from ..matching.portfolio import Judge
from ..report.records import Report
from ..requests import keywords
from ..requests.recipe import Recipe
from ..requests.requests import MergeRequest
from ..runtime import Runtime, silent
from ..session.merge_plan import MergePlan, Steps
from ..session.pipeline import run


@dataclass(frozen=True)
class GlobalFit:
    """What the global model is fitted on, and when.

    Attributes:
        options: Keywords of `merge` that give inputs and say how they are used.
        always: In every round; otherwise in those in which clients were matched.
    """

    options: Mapping[str, Any]
    always: bool = False

    def request(self, states: Sequence[Mapping[str, torch.Tensor]], **more: Any) -> MergeRequest:
        """The request of a merge of `states`, with these inputs.

        Raises:
            UsageError: No such option, or a value that can't be meant.
        """
        return keywords.request(MergeRequest, checkpoints=tuple(states), **{**self.options, **more})


def fit_global(
    fit: GlobalFit,
    states: Sequence[Mapping[str, torch.Tensor]],
    weights: Sequence[float],
    plans: Sequence[Alignment],
    mean: Mapping[str, torch.Tensor],
    *,
    arch: Any,
    runtime: Runtime,
) -> tuple[dict[str, torch.Tensor], Report]:
    """What a merge makes of clients that are matched already, and their mean as the anchor.

    Args:
        fit: The inputs.
        states: Of the clients.
        weights: Of the clients; sum to 1.
        plans: Their maps onto the global units.
        mean: The anchor: their mean, which has no weight of its own.
        arch: The network.
        runtime: Seed and device.

    Raises:
        OtfuseError: See docs/exit-codes.md.
    """

    def known(
        source: Model,
        anchor: Model,
        recipe: Recipe,
        runtime: Runtime,
        judge: Judge | None = None,
    ) -> Match:
        return Match(plans[source.index], (), ())

    request = fit.request([*states, mean], arch=arch, seed=runtime.seed, device=runtime.device)
    plan = MergePlan(
        command="merge",
        checkpoints=request.checkpoints,
        anchor_index=len(states),
        weights=(*weights, 0.0),
        output=None,
        report=None,
        options=replace(request, matcher="sweep"),
        target=request,
        steps=Steps(match=known),
    )
    tensors: dict[str, torch.Tensor] = {}
    report = run(plan, silent, also=tensors.__setitem__)
    return tensors, report
