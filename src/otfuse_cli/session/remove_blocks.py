"""`prune --depth`: residual blocks chosen on inputs, what is left fitted to the whole network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor

from ..checkpoint.view import View
from ..errors import IncompatibleModels, UsageError, few
from ..fusion.joint_stream import stress
from ..fusion.lockstep import Parent
from ..fusion.positions import reconstruction_counts
from ..fusion.refit import Stress
from ..fusion.selection import Selection
from ..graph.analysis.residual_blocks import ResidualBlock, residual_blocks
from ..graph.analysis.restrict import keep_tensors
from ..graph.analysis.without_blocks import before_gaps, without_blocks
from ..graph.trace.program import Program
from ..matching.models import Model
from ..pruning.choose_blocks import Removal, Trials
from ..pruning.renumber import NumberedModules, belongs_to, numbered_modules
from ..report.records import RefitRecord, StepRecord
from ..requests.requests import PruneRequest
from ..running.architecture import Architecture
from ..running.chance import clearly_more
from ..running.samples import Samples
from ..runtime import Runtime, Stopwatch
from .bench import Bench
from .open_inputs import open_bench
from .parents import Parents

# What fits on a few inputs have in place of no ridge: they can't do without one.
_RIDGE = 0.1


@dataclass(frozen=True)
class Shallower:
    """A network without some of its blocks.

    Attributes:
        removals: Blocks that are gone, in the order in which they were chosen.
        lists: The numbered modules that they were taken out of.
        left: Names of the tensors that stay, as the whole network has them.
        tensors: Those that were fitted, float32 by such a name.
        program: What is left of the forward pass.
        whole: The forward pass.
        samples: The inputs.
        steps: How often it says what the whole network says, before and after the fits.
        refits: Layers that were fitted.
        remarks: What was left alone.
        moved: The kind of the inputs, where gradients moved them.
    """

    removals: tuple[Removal, ...]
    lists: tuple[NumberedModules, ...]
    left: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    program: Program
    whole: Program
    samples: Samples
    steps: tuple[StepRecord, ...]
    refits: tuple[RefitRecord, ...]
    remarks: tuple[str, ...]
    moved: str | None

    @property
    def gone(self) -> tuple[str, ...]:
        """Blocks that are gone, in execution order."""
        ordered = sorted(self.removals, key=lambda r: self.whole.position[r.block.start])
        return tuple(removal.block.name for removal in ordered)


def remove_blocks(
    request: PruneRequest,
    architecture: Architecture,
    model: Model,
    runtime: Runtime,
    watch: Stopwatch,
) -> Shallower:
    """Take blocks out of a network, those that are missed least, and fit what is left.

    Args:
        request: With inputs and `depth`.
        architecture: Its architecture, with a network to run.
        model: The network.
        runtime: Device, seed, progress.
        watch: Takes the time of `inputs`, `prune` and `refit`.

    Raises:
        OtfuseError: Inputs that can't be read or don't fit, no network to run, fewer blocks than
            are to go, a singular fit.
    """
    with watch("inputs"):
        bench = _open(request, architecture, model, runtime)
    whole, dense = bench.programs[0], bench.tensors[0]
    with watch("prune"):
        blocks = _candidates(whole, request)
        ridge, parent = request.inputs().ridge, bench.run_parent(model, 1.0)
        counts = reconstruction_counts(whole, dense, bench.samples, device=runtime.device)
        held = ridge or _RIDGE
        weigh = stress(counts, held)
        trials = Trials(parent, bench.samples, weigh, held, runtime, bench.most_bytes)
        removals = trials.choose(blocks, _count(request))
        gone = [removal.block for removal in removals]
        left = _left(model, gone)
        small = without_blocks(whole, gone)
        bench = _with_smaller(bench, model, small, left)
    with watch("refit"):
        weigh = stress(counts, ridge)
        fitted, steps, refits, remarks = _fitted(bench, parent, gone, ridge, weigh)
    return Shallower(
        removals,
        numbered_modules(_names(model), [block.name for block in gone]),
        left,
        {n: fitted[n] for n in left if fitted[n] is not dense[n]},
        small,
        whole,
        bench.samples,
        steps,
        refits,
        (*bench.warnings, *remarks),
        bench.moved,
    )


def _open(
    request: PruneRequest, architecture: Architecture, model: Model, runtime: Runtime
) -> Bench:
    options = request.inputs()
    bench = open_bench(
        Parents((model,), 0, architecture, model),
        options,
        options.recipe(),
        Selection((1.0,)),
        runtime,
        instead="prune units (--amount)",
    )
    assert bench is not None
    return bench


def _count(request: PruneRequest) -> int:
    assert request.depth is not None
    return request.depth


def _candidates(program: Program, request: PruneRequest) -> list[ResidualBlock]:
    """Blocks that may go: all, or those that `--only` names.

    Raises:
        IncompatibleModels: The network has none, or fewer than are to go.
        UsageError: A pattern that fits none.
    """
    blocks = residual_blocks(program)
    names = [block.name for block in blocks]
    if not blocks:
        raise IncompatibleModels(
            "no block of this network can go",
            where=f"--depth {request.depth}",
            why="a block is a module that adds something to the value that it is given, and hands "
            "on the sum, which nothing here does; or its parts are used elsewhere too",
            fix="prune units (--amount); or fuse it into a shallower one (merge --weights 1,0 "
            "--blend joint)",
        )
    for pattern in request.only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                "the pattern fits no block",
                where=f"--only {pattern}",
                why=f"there are {few(names)}",
                fix="give a block; * stands for anything",
            )
    if request.only:
        blocks = tuple(b for b in blocks if any(fnmatchcase(b.name, p) for p in request.only))
    if _count(request) > len(blocks):
        raise IncompatibleModels(
            "fewer blocks than are to go",
            where=f"--depth {request.depth}",
            why=f"{len(blocks)} can go: {few([block.name for block in blocks])}; the others have "
            "no skip that leads past them unchanged, or parts that are used elsewhere",
            fix=f"use --depth {len(blocks)} or less",
        )
    return list(blocks)


def _names(model: Model) -> list[str]:
    """Names of all tensors, every name of tied ones."""
    checkpoint = model.checkpoint
    names = list(checkpoint.infos)
    for others in checkpoint.aliases.values():
        names += others
    return names


def _left(model: Model, gone: Sequence[ResidualBlock]) -> tuple[str, ...]:
    """Tensors that stay: what a block alone reads goes with it, and all that its module holds."""
    read = {name for block in gone for name in block.tensors}
    modules = [block.name for block in gone]
    return tuple(n for n in model.checkpoint.infos if n not in read and not belongs_to(n, modules))


def _with_smaller(bench: Bench, model: Model, small: Program, left: tuple[str, ...]) -> Bench:
    """The bench with what is left as its anchor, under the names of the whole network."""
    names = set(left)
    view = View(model.checkpoint, names, {})
    smaller = Model(1, view, keep_tensors(model.graph, names), bench.runtime.device)
    return replace(
        bench,
        programs={0: bench.programs[0], 1: small},
        tensors={0: bench.tensors[0], 1: {n: bench.tensors[0][n] for n in left}},
        weights=(1.0, 0.0),
        parents=replace(bench.parents, models=(model, smaller), anchor_index=1),
    )


def _fitted(
    bench: Bench, whole: Parent, gone: Sequence[ResidualBlock], ridge: float, weigh: Stress
) -> tuple[dict[str, Tensor], tuple[StepRecord, ...], tuple[RefitRecord, ...], tuple[str, ...]]:
    """The tensors that are left, fitted if that does no harm, and what to say of it."""
    removed = bench.tensors[1]
    before, fitted = bench.verdict(removed), dict(removed)
    left = before_gaps(whole.program, bench.programs[1], gone)
    refits, remarks = bench.refit([whole], fitted, ridge, left=left, stress=weigh)
    after = bench.verdict(fitted)
    worse = clearly_more(before.hits, after.hits)
    steps = (before.step("removed"), after.step("reconstruct", kept=not worse))
    if not worse:
        return fitted, steps, refits, remarks
    remark = "fitting lowers agreement: what is left was kept as it was"
    return dict(removed), steps, (), (*remarks, remark)
