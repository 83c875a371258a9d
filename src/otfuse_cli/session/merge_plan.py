"""What a fusion will do, decided before any file is opened; what each verb does its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..checkpoint.open import Checkpoint
from ..errors import IncompatibleModels
from ..fusion.average import Aligned
from ..fusion.widths import Width
from ..matching.match import match
from ..matching.matchers.sweep import Match
from ..matching.models import Model
from ..matching.portfolio import Judge
from ..remote.location import location
from ..report.files import report_beside
from ..report.records import Report
from ..requests.recipe import Recipe
from ..requests.requests import STANDARD, AverageOptions, ImproveOptions, MergeRequest, Source
from ..requests.tensor_weights import Rules
from ..runtime import Runtime
from .computed_tensors import settle
from .parents import Parents, assemble

_ANY_DEPTH = (
    "networks of different depth take --blend joint and inputs (--samples FILE, or --synthetic), "
    "and few options beside (docs/methods/depth.md)"
)

Assemble = Callable[[Sequence[Checkpoint], int, ImproveOptions, str], Parents]


class MatchSource(Protocol):
    """Aligns one source to the anchor; a judge scores candidates, where there are any."""

    def __call__(
        self,
        source: Model,
        anchor: Model,
        recipe: Recipe,
        runtime: Runtime,
        judge: Judge | None = None,
    ) -> Match:
        """The source's match."""
        ...


def assemble_parents(
    checkpoints: Sequence[Checkpoint], anchor: int, options: ImproveOptions, device: str
) -> Parents:
    """Models of one network, as `merge` takes them.

    Raises:
        OtfuseError: See `parents.assemble` and `computed_tensors.settle`.
    """
    any_depth = takes_any_depth(options)
    try:
        parents = assemble(
            checkpoints,
            anchor,
            options.arch,
            device,
            free_outputs=options.free_outputs,
            strict=options.strict,
            vocab=options.vocab,
            untie=isinstance(options, MergeRequest) and options.untie,
            plain=options.align == "none",
            any_depth=any_depth,
        )
    except IncompatibleModels as error:
        if not any_depth and len(set(map(_matrices, checkpoints))) > 1:
            error.fix = _ANY_DEPTH if error.fix is None else f"{error.fix}; {_ANY_DEPTH}"
        raise
    if parents.other_depth:
        return parents  # no tensor stands for another by its name
    return settle(parents, keep=options.align != "none")


def takes_any_depth(options: ImproveOptions) -> bool:
    """Whether models may have other layers than the anchor: joint fusion alone is asked for."""
    if not isinstance(options, MergeRequest) or options.blend != "joint" or not options.refits:
        return False
    by_tensor = options.skip or options.only or not options.strict or options.vocab != "refuse"
    others = options.asks_for_width or options.untie or options.residual not in (None, "shared")
    return not (by_tensor or others or options.calibrate not in (None, "none"))


def _matrices(checkpoint: Checkpoint) -> int:
    """About how many layers a checkpoint has."""
    return sum(len(info.shape) > 1 for info in checkpoint.infos.values())


@dataclass(frozen=True)
class Steps:
    """What a verb does its own way.

    Attributes:
        assemble: Opened checkpoints, anchor's index, options, device -> models with graphs.
        match: One source against the anchor.
        describe: What the verb adds to the report before it is written.
        teach: From the aligned sources, what a refit aims at instead of the parents' mean; None
            where that is the aim.
    """

    assemble: Assemble = assemble_parents
    match: MatchSource = match
    describe: Callable[[Parents, Report], Report] = lambda parents, report: report
    teach: Callable[[Sequence[Aligned]], Sequence[Aligned] | None] = lambda aligned: None


@dataclass(frozen=True)
class MergePlan:
    """What a fusion will do.

    Attributes:
        command: The verb, for the report.
        checkpoints: Of all models, in the order in which they were named.
        anchor_index: Which one the others are aligned to; `parents.MEDOID`: still to be chosen.
        weights: One for each model; they sum to 1.
        output: Where the fused model goes; None for callers in memory.
        report: Where the report goes; None where it is only returned.
        options: Matching and improving.
        target: How the output is written.
        rules: Weights by tensor.
        width: How wide the result is; None: as wide as the anchor.
        steps: What the verb does its own way.
    """

    command: str
    checkpoints: tuple[Source, ...]
    anchor_index: int
    weights: tuple[float, ...]
    output: Path | None
    report: Path | None
    options: ImproveOptions
    target: AverageOptions
    rules: Rules = ()
    width: Width | None = None
    steps: Steps = field(default_factory=Steps)


def report_path(output: Path | None, report: Path | None) -> Path | None:
    """The report's file: as asked, or beside the output; none where it goes to a stream."""
    if report is not None:
        return None if report == STANDARD else location(report)
    return None if output is None else report_beside(output)
