"""`--residual orthogonal`: every parent in canonical form, every source turned onto the anchor.

What is left for the fusion afterwards are models whose units stand in the same places; they compute
what the parents computed, which is checked by running them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoint.replaced import Replaced
from ..errors import SolveFailed, UsageError
from ..fusion.repair import Repair
from ..graph.analysis.blocks import AxisBlock
from ..graph.analysis.streams import Stream, normed_stream
from ..graph.model import LayerGraph
from ..matching.alignment import Alignment
from ..matching.alignment_costs import measure
from ..matching.canonical import Tensors, canonical, view
from ..matching.matchers.orthogonal import Moves, match_rotated, move, restored
from ..matching.matchers.sweep import Match
from ..matching.models import Model
from ..report.records import Checks, SpaceRecord
from ..requests.recipe import Recipe
from ..running.arch_value import Arch
from ..running.architecture import module_state, require_network
from ..running.factory import Network
from ..running.function_change import change_allowed
from ..running.precision import FLOAT32
from ..runtime import Runtime
from .find_architecture import shapes_of
from .parents import Parents


@dataclass(frozen=True)
class Turned:
    """What became of the parents.

    Attributes:
        parents: In canonical form, sources turned and their units in the anchor's places.
        matches: Of the sources, by index: all units stay, and what the report says.
        repair: Rows that the average shortens.
        checks: That every parent computes what it computed.
    """

    parents: Parents
    matches: Mapping[int, Match]
    repair: Repair
    checks: Checks


def turn(
    parents: Parents, used: Collection[int], arch: Arch, recipe: Recipe, runtime: Runtime
) -> Turned:
    """Canonical parents, sources turned onto the anchor.

    Args:
        parents: The models.
        used: Indices of those that count.
        arch: `--arch`, for messages.
        recipe: With `residual orthogonal`.
        runtime: Progress, and where sources are matched, in float64. Functions are checked, and
            what moves is moved, on the CPU.

    Raises:
        PostNorm: Norms stand on the stream itself.
        UsageError: Options that mean another matching, no network, different widths, or a stream
            that can't be turned.
        SolveFailed: A parent would compute something else.
    """
    _require_plain(parents, used, recipe)
    network = require_network(parents.shared_architecture, arch, "--residual orthogonal")
    graph = parents.anchor.graph
    stream = normed_stream(graph)
    test = _Test(network, parents.shared_architecture.names, graph)
    tests: dict[int, _Test] = {}
    for at, separate in parents.own_architectures.items():
        source_network = require_network(separate, arch, "--residual orthogonal")
        tests[at] = _Test(source_network, separate.names, graph)
    anchor = parents.anchor
    anchor_tensors, worst = _settled(anchor, stream, test)
    anchor_placed = _placed(anchor_tensors, runtime)
    pairs = test.rotary(anchor_tensors, stream)
    tensors = {anchor.index: anchor_tensors}
    matches: dict[int, Match] = {}
    for source in parents.sources:
        if source.index not in used:
            continue
        its = tests.get(source.index, test)
        source_tensors, error = _settled(source, stream, its)
        source_placed = _placed(source_tensors, runtime)
        moves = match_rotated(
            source_placed, anchor_placed, graph, stream, pairs=pairs, progress=_told(runtime)
        )
        moved = move(source_tensors, graph, stream, moves)
        worst = max(worst, error, its.change(source_tensors, moved, source.checkpoint.label))
        tensors[source.index] = moved
        matches[source.index] = _match(
            source, anchor, source_tensors, moved, anchor_tensors, moves, stream, recipe
        )
    models = tuple(_held(m, tensors[m.index]) if m.index in tensors else m for m in parents.models)
    turned = replace(parents, models=models, whole=models[parents.anchor_index])
    repair = Repair(rows=restored(graph, stream) if recipe.repair == "auto" else {})
    return Turned(turned, matches, repair, Checks("kept", worst))


def _placed(tensors: Tensors, runtime: Runtime) -> Tensors:
    return {name: tensor.to(runtime.device) for name, tensor in tensors.items()}


def _told(runtime: Runtime) -> Callable[[int, int], None]:
    return lambda done, total: runtime.progress("match", done, total)


def _require_plain(parents: Parents, used: Collection[int], recipe: Recipe) -> None:
    """Refuse what asks for another matching.

    Raises:
        UsageError: Something does.
    """
    where, why = "--residual orthogonal", "it has a matching of its own, from the weights"
    plain = Recipe()
    for option in ("align", "matcher", "solver", "mass", "passes"):
        if getattr(recipe, option) != getattr(plain, option):
            raise UsageError(
                f"--{option} {getattr(recipe, option)} can't be combined with {where}",
                where=where,
                why=why,
                fix=f"leave out --{option}, or use --residual shared",
            )
    if not parents.complete or parents.whole.graph is not parents.anchor.graph:
        raise UsageError(
            "models that differ in their tensors can't be turned",
            where=where,
            why="there is no one function to keep",
            fix="use --residual shared",
        )
    shapes = shapes_of(parents.anchor.checkpoint)
    for model in parents.models:
        if model.index in used and shapes_of(model.checkpoint) != shapes:
            raise UsageError(
                "models of different widths can't be turned onto one another",
                where=f"{model.checkpoint.label} and {parents.anchor.checkpoint.label}",
                why="a rotation keeps the width",
                fix="use --residual shared",
            )


def _settled(model: Model, stream: Stream, test: _Test) -> tuple[Tensors, float]:
    """A model in canonical form, and how much its outputs have changed."""
    before = {n: model.stored(n) for n in model.checkpoint.infos}
    after = canonical(before, model.graph, stream)
    return after, test.change(before, after, model.checkpoint.label)


def _held(model: Model, tensors: Tensors) -> Model:
    return replace(model, checkpoint=Replaced(model.checkpoint, tensors))


def _match(
    source: Model,
    anchor: Model,
    before: Tensors,
    after: Tensors,
    anchor_tensors: Tensors,
    moves: Moves,
    stream: Stream,
    recipe: Recipe,
) -> Match:
    """All units stay where they are now; costs before and after, in canonical form."""
    stays = Alignment({})
    target = _held(anchor, anchor_tensors)
    first, _ = measure(_held(source, before), target, stays, recipe, {})
    spaces, layers = measure(_held(source, after), target, stays, recipe, {})
    records = [_record(now, then, moves, stream) for now, then in zip(spaces, first, strict=True)]
    return Match(stays, tuple(records), layers)


def _record(now: SpaceRecord, then: SpaceRecord, moves: Moves, stream: Stream) -> SpaceRecord:
    index: Tensor | None = moves.units.get(now.id)
    if now.id in moves.heads:
        index = moves.heads[now.id].index_M
    moved = None
    if index is not None:
        moved = float((index != torch.arange(len(index))).double().mean())
    solver = "assignment" if index is not None else "polar"
    return now.replace(identity_cost=then.ot_cost, moved_fraction=moved, solver=solver)


class _Test:
    """Runs the network with one set of tensors and another."""

    def __init__(self, network: Network, names: Mapping[str, str], graph: LayerGraph) -> None:
        self.network, self.names, self.graph = network, names, graph

    def change(
        self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], label: str
    ) -> float:
        """Relative change of the outputs.

        Raises:
            SolveFailed: It is more than rounding.
        """
        error = self._change(before, after)
        if not error <= FLOAT32:
            raise SolveFailed(
                "a parent in canonical form computes something else",
                where=f"{label}: outputs differ by {error:.2g} (relative)",
                why="something in the network looks at single units of its residual stream",
                fix="use --residual shared",
            )
        return error

    def rotary(self, tensors: Tensors, stream: Stream) -> dict[str, Tensor]:
        """Which positions inside queries and keys turn together, where positions are rotary.

        Tried out: halves apart (Llama) or neighbours (GPT-J); turning pairs by any angle must keep
        the function. Heads where it doesn't are not turned inside.
        """
        fixed = [a for a in stream.attentions if not a.turns]
        widths = {a.queries[0].weight.sizes[-1] for a in fixed}
        if len(widths) != 1 or (width := widths.pop()) % 2:
            return {}
        places = torch.arange(width)
        for pairs in (places.view(2, -1), places.view(-1, 2).T):
            trial = {n: t.clone() for n, t in tensors.items()}
            for attention in fixed:
                for part in attention.queries:
                    for block in (part.weight, part.bias):
                        if block is not None:
                            _turn_pairs(trial, block, pairs)
            if self._change(tensors, trial) <= FLOAT32:
                return {a.heads: pairs for a in fixed}
        return {}

    def _change(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
        one, two = (module_state(self.network, self.names, t.__getitem__) for t in (before, after))
        called = self.network.module, self.network.args, self.network.kwargs
        return change_allowed(*called, one, two).error


def _turn_pairs(tensors: Tensors, block: AxisBlock, pairs: Tensor) -> None:
    """Turn every pair of positions inside a block by an angle of its own."""
    held = view(block, tensors[block.tensor]).movedim(len(block.sizes) - 1, -1)
    angle = torch.arange(1.0, pairs.shape[1] + 1, dtype=torch.float64)
    one, two = held[..., pairs[0]], held[..., pairs[1]]
    held[..., pairs[0]] = angle.cos() * one - angle.sin() * two
    held[..., pairs[1]] = angle.sin() * one + angle.cos() * two
