"""A network that is wider or narrower than the anchor, as what joint fusion fuses into (`--width`).

It has the anchor's graph at other sizes and holds nothing: where an anchor without a share gives
its shape and nothing else, so does this one, and all that follows asks for its shape only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.config import read_config
from ..checkpoint.open import Checkpoint
from ..checkpoint.resized import Resized
from ..errors import IncompatibleModels, OtfuseError, SolveFailed, few
from ..fusion.side_by_side import beside_one_another, require_independent, whole_union
from ..fusion.widths import SpaceWidth, Width, space_widths
from ..graph.analysis.agreement import agreed_sizes
from ..graph.model import LayerGraph, Role
from ..graph.sizes import at_sizes
from ..matching.models import Model
from ..pruning.advice import Advice, advice
from ..pruning.compact import parameters
from ..report.records import Checks, Widened, WidenedSpace
from ..running.arch_value import Arch
from ..running.architecture import Architecture
from ..running.factory import factory_arguments
from ..running.user_code import hugging_face
from .architectures import built_from
from .find_architecture import find_architecture, library_arch_of
from .function_check import declared, reordered_change
from .outputs import folder_config
from .parents import Parents
from .union_check import union_change


@dataclass(frozen=True)
class Wide:
    """A network to fuse into, and those that are fused.

    Attributes:
        parents: With this network, which holds nothing, as the anchor.
        models: That have a share, the anchor that was named first.
        shares: Of these; they sum to 1.
        widths: Units of every space.
        changes: What has to change where the network is built.
        remarks: What readers of the result should know.
    """

    parents: Parents
    models: tuple[Model, ...]
    shares: tuple[float, ...]
    widths: tuple[SpaceWidth, ...]
    changes: Advice = field(default_factory=Advice)
    remarks: tuple[str, ...] = ()

    @property
    def given(self) -> Model:
        """The anchor that was named."""
        return self.parents.models[self.parents.named_anchor]

    def side_by_side(self) -> dict[str, Tensor]:
        """All parents as one network; its logits are the weighted mean of theirs.

        Raises:
            IncompatibleModels: They can't be put side by side.
        """
        graph = self.given.graph
        require_independent(graph, self.models)
        places = beside_one_another(graph, self.models)
        parts = list(zip(self.models, places, self.shares, strict=True))
        tensors = {}
        for name, info in self.given.checkpoint.infos.items():
            if info.dtype.is_floating_point:
                tensors[name] = whole_union(name, graph, parts)
        return tensors

    def check(self, tensors: Mapping[str, Tensor] | None) -> tuple[Checks, tuple[str, ...]]:
        """Whether a network that can be run says what it should.

        Args:
            tensors: The parents side by side, which are compared with their mean. None: units will
                be chosen; then the anchor is run with its units in another order.

        Raises:
            IncompatibleModels: The parents side by side compute something else.
            SolveFailed: The anchor in another order does.
        """
        architecture = self.parents.architecture(self.given.index)
        verdict = declared(architecture.graph)
        if tensors is not None:
            change, remarks = union_change(self.parents, self.models, self.shares, tensors)
        else:
            change, remarks = reordered_change(architecture, self.given)
        if change is None:
            return verdict, remarks
        if not change.error <= change.allowed:
            raise _other_function(self.given.graph, change.error, chosen=tensors is None)
        function = verdict.function or "kept"
        return verdict.replace(function=function, max_error=change.error), remarks

    def record(self) -> Widened:
        """Widths for the report."""
        before, after = (
            parameters({name: info.shape for name, info in checkpoint.infos.items()})
            for checkpoint in (self.given.checkpoint, self.parents.whole.checkpoint)
        )
        spaces = tuple(WidenedSpace(w.space, w.anchor, w.union, w.units) for w in self.widths)
        return Widened(before, after, spaces, self.changes.sentences)


def widen(
    parents: Parents,
    width: Width,
    weights: Sequence[float],
    *,
    arch: Arch,
    output: Path | None,
) -> Wide:
    """A network as wide as `width` says in the place of the anchor.

    Args:
        parents: The models that are fused.
        width: How wide.
        weights: Of the models.
        arch: What `--arch` says of the anchor, for advice.
        output: Where the result goes, for its config.json.

    Raises:
        UsageError: A space that has no such name, or can't be widened.
        IncompatibleModels: Models that differ in their tensors; integers for every unit.
    """
    given, named = parents.anchor, parents.anchor_index
    if not parents.complete or parents.kept:
        raise IncompatibleModels(
            "models that differ in their tensors have no common width",
            where=few(sorted(parents.kept)) or "--width",
            why="what stays the anchor's, or what a model lacks, has no place beside the others",
            fix="leave out --width, or fuse models with the same tensors",
        )
    models = sorted(parents.models, key=lambda m: m.index != named)
    models = [model for model in models if weights[model.index] > 0]
    widths = space_widths(given.graph, [m.graph for m in models], width)
    graph = at_sizes(given.graph, {w.space: w.units for w in widths})
    resized = _resized(parents.whole.checkpoint, graph)
    wide = Model(len(parents.models), resized, graph, given.device)
    changes, config, said = _changes(given, graph, arch, output)
    separate = dict(parents.own_architectures)
    own = _configured(parents, arch, resized, graph, changes)
    if own is not None:
        separate[wide.index] = own
    capped = [w.space for w in widths if w.capped]
    remarks = [f"no more units than all checkpoints have: {', '.join(capped)}"] if capped else []
    stored_like = parents.stored_like
    return Wide(
        replace(
            parents,
            models=(*parents.models, wide),
            anchor_index=wide.index,
            given_anchor=named,
            whole=wide,
            stored_like=None if stored_like is None else _resized(stored_like, graph, parents),
            config={**(parents.config or {}), **config} or None,
            own_architectures=separate,
        ),
        tuple(models),
        tuple(weights[model.index] for model in models),
        widths,
        changes,
        (*remarks, *said),
    )


def wide_architecture(parents: Parents, arch: Arch, sizes: Mapping[str, int]) -> Architecture:
    """What runs a network that has the anchor's graph at other sizes.

    Args:
        parents: Whose anchor it is like.
        arch: What `--arch` says of that.
        sizes: Units by space.
    """
    anchor = parents.anchor
    graph = at_sizes(anchor.graph, sizes)
    changes = advice(anchor.graph, graph, config=built_from(arch, anchor.checkpoint.path))
    resized = _resized(parents.whole.checkpoint, graph)
    return _configured(parents, arch, resized, graph, changes) or parents.shared_architecture


def _configured(
    parents: Parents, arch: Arch, resized: Checkpoint, graph: LayerGraph, changes: Advice
) -> Architecture | None:
    """The network built with the new sizes in its config.json; None where that can't say them.

    Code that fixes widths takes them from there.
    """
    network = parents.shared_architecture.network
    named = library_arch_of(parents.anchor.checkpoint, arch)
    if network is None or not changes.config or not str(named).startswith("hf:"):
        return None
    folder = Path(str(named).removeprefix("hf:"))
    try:
        described = find_architecture(
            resized, partial(hugging_face, folder, sizes=changes.config), untied=network.untied
        )
        sizes = agreed_sizes(described.graph, graph, label="--width", anchor_label="the anchor")
    except OtfuseError:
        return None  # the anchor's own code may take these widths
    fits = all(sizes[space.id] == space.size for space in graph.free() if space.id in sizes)
    return described if fits else None


def _resized(checkpoint: Checkpoint, graph: LayerGraph, parents: Parents | None = None) -> Resized:
    """The checkpoint with the shapes of a graph, tensors that are stored again among them."""
    shapes, ones = dict(graph.shapes), set[str]()
    for name, tensor in graph.tensors.items():
        if any(Role.VARIANCE in axis.roles for axis in tensor.axes):
            ones.add(name)
        for copy in () if parents is None else parents.copies.get(name, ()):
            shapes[copy] = tensor.shape
    for name, info in checkpoint.infos.items():
        if shapes.get(name, info.shape) != info.shape and not info.dtype.is_floating_point:
            raise IncompatibleModels(
                "whole numbers for every unit can't be widened",
                where=f"{name}: {list(info.shape)}",
                why="nothing tells what they are for more units",
                fix="leave out --width",
            )
    return Resized(checkpoint, shapes, ones=frozenset(ones))


def _changes(
    given: Model, graph: LayerGraph, arch: Arch, output: Path | None
) -> tuple[Advice, Mapping[str, Any], tuple[str, ...]]:
    """What has to change where the network is built, the part of it in config.json, and remarks."""
    path = given.checkpoint.path
    built, copied = built_from(arch, path), read_config(path)
    changes = advice(given.graph, graph, config=built, arguments=factory_arguments(arch))
    in_config = changes if copied == built else Advice(changes.sentences)
    config, remarks = folder_config(output, copied, in_config)
    return changes, config, remarks


def _other_function(graph: LayerGraph, error: float, *, chosen: bool) -> Exception:
    if chosen:
        return SolveFailed(
            "the anchor in another order computes something else",
            where=f"outputs differ by {error:.2g} (relative)",
            why=f"{graph.source} calls units interchangeable that are not",
            fix="find the claim with otfuse check, or correct the spec",
        )
    return IncompatibleModels(
        "these models can't be put side by side exactly",
        where=f"{graph.source}: outputs differ from the models' mean by {error:.2g} (relative)",
        why="something in this network looks at several units at once, or at its outputs' scale",
        fix="give inputs (--samples FILE, or --synthetic) and a smaller --width",
    )
