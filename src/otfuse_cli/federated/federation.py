"""What a server keeps of its clients between rounds, and how it fuses what they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..checkpoint.open import Checkpoint, open_checkpoint
from ..checkpoint.tied import Tied
from ..errors import IncompatibleModels
from ..fusion.average import Aligned
from ..graph.model import LayerGraph
from ..matching.alignment import Alignment, in_place
from ..matching.carry import carried, chosen_places, reversed_alignment
from ..requests.recipe import Recipe
from ..running.architecture import Architecture
from ..runtime import Runtime
from ..session.computed_tensors import settle
from ..session.function_check import check_function
from ..session.parents import Parents, assemble, fit
from ..transport.maps import Permutation
from .global_fit import GlobalFit, fit_global
from .present_mean import Participant, present_mean
from .repaired_mean import repaired_mean
from .strangers import place_strangers, still_fits
from .updates import ModelTensors, Update, fault, misfit, widths_of


@dataclass(frozen=True)
class FusedRound:
    """What came of one round.

    Attributes:
        tensors: The new global model; None where no update could be used.
        used: Clients whose updates count.
        dropped: Why the others' don't, by client.
        matched: Clients that got a new plan.
        remarks: What a reader of the log should know.
    """

    tensors: dict[str, torch.Tensor] | None
    used: tuple[int, ...] = ()
    dropped: Mapping[int, str] = field(default_factory=dict)
    matched: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()


class Federation:
    """A global model's clients: their widths, and the plan of each onto the global units."""

    def __init__(
        self,
        *,
        arch: Any,
        recipe: Recipe,
        runtime: Runtime,
        rematch: bool = True,
        global_fit: GlobalFit | None = None,
    ) -> None:
        """Begin without clients.

        Args:
            arch: What network the global model is, as for `merge`.
            recipe: How units are matched.
            runtime: Seed and device.
            rematch: Look in every round whether a client's plan still fits.
            global_fit: What the global model is fitted on.
        """
        self._arch, self._recipe, self._runtime = arch, recipe, runtime
        self._rematch, self._fit = rematch, global_fit
        self._architecture: Architecture | None = None  # found once: tracing takes seconds
        self._graph: LayerGraph | None = None
        # Tied tensors: under which names, and which of a name's is fused.
        self._ties: list[tuple[str, ...]] = []
        self._copies: dict[str, str] = {}
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}
        self._plans: dict[int, Alignment] = {}

    def knows(self, node: int) -> bool:
        """Whether the widths of a client are known."""
        return node in self._shapes

    def moves(self, node: int) -> bool:
        """Whether a client has the global model in another form."""
        return node in self._plans

    def open(self, tensors: ModelTensors) -> None:
        """Find the layer graph of the global model, once.

        Raises:
            OtfuseError: An architecture that nobody knows.
        """
        if self._architecture is not None:
            return
        checkpoint = open_checkpoint(dict(tensors), label="the global model")
        parents = assemble([checkpoint], 0, self._arch, self._runtime.device)
        self._architecture = parents.shared_architecture
        self._graph = settle(parents, keep=True).anchor.graph
        for first, others in parents.copies.items():
            self._ties.append((first, *others))
            self._copies.update(dict.fromkeys(others, first))

    def meet(self, node: int, shapes: Mapping[str, tuple[int, ...]], tensors: ModelTensors) -> None:
        """Take in a client that has shown the shapes of its model.

        Raises:
            IncompatibleModels: They are no widths of the global model's network.
        """
        like, label = widths_of(tensors), f"client {node}"
        wrong = misfit(shapes, like)
        if wrong is not None:
            raise IncompatibleModels("a client has another network", where=label, why=wrong)
        if dict(shapes) != like:
            empty = {n: torch.zeros(shapes[n], dtype=t.dtype) for n, t in tensors.items()}
            parents = self._assemble([open_checkpoint(empty, label=label)], tensors)
            client, anchor = parents.models
            self._plans[node] = chosen_places(anchor, client.graph, label)
        self._shapes[node] = dict(shapes)

    def carry(self, node: int, tensors: ModelTensors) -> dict[str, torch.Tensor]:
        """The global model as a client has it: its widths, its order of units.

        Raises:
            IncompatibleModels: A tensor that can't be carried to other widths.
        """
        plan = self._plans.get(node)
        if plan is None:
            return dict(tensors)
        assert self._graph is not None, "plans come from a graph"
        back = reversed_alignment(plan, self._graph)
        return self._all_names(tensors, carried(tensors, self._graph, back))

    def fuse(self, tensors: ModelTensors, updates: Sequence[Update]) -> FusedRound:
        """Fuse updates into a new global model; those that can't be used are left out.

        Args:
            tensors: The global model so far, which clients were sent.
            updates: In any order; they count in the one that is given.

        Raises:
            OtfuseError: An unknown architecture, a problem that was not solved, a fit that failed.
        """
        self.open(tensors)
        good, dropped = [], dict[int, str]()
        for update in updates:
            wrong = fault(update, tensors, self._shapes.get(update.node))
            if wrong is None and update.node not in self._shapes:
                wrong = self._other_network(update, tensors)
            if wrong is None:
                good.append(update)
            else:
                dropped[update.node] = wrong
        if not good:
            return FusedRound(None, dropped=dropped)
        fused = _Round(self, tensors, good).run()
        return replace(fused, used=tuple(u.node for u in good), dropped=dropped)

    def _remember(self, update: Update, plan: Alignment | None) -> None:
        self._shapes[update.node] = widths_of(update.tensors)
        if plan is None or _moves_nothing(plan):
            self._plans.pop(update.node, None)
        else:
            self._plans[update.node] = plan

    def _other_network(self, update: Update, tensors: ModelTensors) -> str | None:
        """Why an unknown client's widths are none of this network; None where they are."""
        if widths_of(update.tensors) == widths_of(tensors):
            return None
        label = f"client {update.node}"
        try:
            self._assemble([open_checkpoint(update.tensors, label=label)], tensors)
        except IncompatibleModels as error:
            return "; ".join(said for said in (error.what, error.where, error.why) if said)
        return None

    def _assemble(self, clients: Sequence[Checkpoint], tensors: ModelTensors) -> Parents:
        """Clients' models and the global one, last, with their graphs."""
        assert self._architecture is not None, "the global model is opened first"
        checkpoint = open_checkpoint(dict(tensors), label="the global model")
        anchor, device = len(clients), self._runtime.device
        seen: list[Checkpoint] = [*clients, checkpoint]
        if self._ties:
            seen = [Tied(one, self._ties) for one in seen]
        parents = fit(self._architecture, seen, anchor, device)
        return settle(parents, keep=True)

    def _all_names(
        self, like: ModelTensors, moved: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """A model under all names of `like`: tied tensors under each of theirs."""
        return {name: moved[self._copies.get(name, name)].clone() for name in like}


class _Round:
    """One round of a federation under way."""

    def __init__(self, of: Federation, tensors: ModelTensors, updates: Sequence[Update]) -> None:
        self.of, self.tensors, self.updates = of, tensors, updates
        labels = [f"client {update.node}" for update in updates]
        checkpoints = [
            open_checkpoint(dict(update.tensors), label=label)
            for update, label in zip(updates, labels, strict=True)
        ]
        self.parents = of._assemble(checkpoints, tensors)
        *self.models, self.before = self.parents.models
        total = sum(update.weight for update in updates)
        self.shares = [update.weight / total for update in updates]
        self.plans = [of._plans.get(update.node) for update in updates]
        self.kept = {n: t for n, t in tensors.items() if n not in of._copies}

    def run(self) -> FusedRound:
        """Match who has no plan, or another order than it says; then average, repair, fit."""
        of = self.of
        strangers = [at for at, update in enumerate(self.updates) if self._is_stranger(at, update)]
        remarks: tuple[str, ...] = ()
        if strangers:
            remarks = self._match(strangers)
        mean = present_mean(self._participants(range(len(self.updates))), self.kept)
        if strangers and of._recipe.repair == "auto":
            mean = repaired_mean(self._aligned(range(len(self.updates))), mean, self.before)
        if of._fit is not None and (strangers or of._fit.always):
            mean, report = fit_global(
                of._fit,
                [update.tensors for update in self.updates],
                self.shares,
                [self._moves(plan) for plan in self.plans],
                of._all_names(self.tensors, mean),
                arch=of._arch,
                runtime=of._runtime,
            )
            remarks = (*remarks, *report.warnings)
        for at, update in enumerate(self.updates):
            of._remember(update, self.plans[at])
        matched = tuple(self.updates[at].node for at in strangers)
        return FusedRound(of._all_names(self.tensors, mean), matched=matched, remarks=remarks)

    def _is_stranger(self, at: int, update: Update) -> bool:
        """Whether nothing tells in which order its units stand."""
        same = widths_of(update.tensors) == widths_of(self.tensors)
        if not update.sent or not (same or self.of.knows(update.node)):
            return True
        if not self.of._rematch:
            return False
        how = self.of._recipe, self.of._runtime
        return not still_fits(self.models[at], self.before, self.plans[at], *how)

    def _match(self, strangers: Sequence[int]) -> tuple[str, ...]:
        """Plans of those that have none, checked on the network where it can be run."""
        settled = [at for at in range(len(self.updates)) if at not in strangers]
        weights = [*self.shares, sum(self.shares[at] for at in settled) or 1.0]
        elsewhere = self.of._shapes.keys() - {self.updates[at].node for at in strangers}
        mean = None
        if settled:
            mean = present_mean(self._participants(settled), self.kept)
        elif elsewhere:  # others hold plans onto the global units: these keep their order
            mean = self.kept
        models = [self.models[at] for at in strangers]
        how = self.of._recipe, self.of._runtime
        for at, plan in place_strangers(models, weights, self.before, mean, *how).items():
            self.plans[at] = plan
        _, remarks = check_function(
            self.parents, self._aligned(strangers), seed=self.of._runtime.seed
        )
        return remarks

    def _participants(self, chosen: Sequence[int]) -> list[Participant]:
        total = sum(self.shares[at] for at in chosen) if len(chosen) < len(self.updates) else 1.0
        return [
            Participant(
                {n: t for n, t in self.updates[at].tensors.items() if n in self.kept},
                self.shares[at] / total,
                self.models[at].graph,
                self.plans[at],
            )
            for at in chosen
        ]

    def _aligned(self, chosen: Sequence[int]) -> list[Aligned]:
        return [
            Aligned(self.models[at], self._moves(self.plans[at]), self.shares[at]) for at in chosen
        ]

    def _moves(self, plan: Alignment | None) -> Alignment:
        return in_place(self.before.graph) if plan is None else plan


def _moves_nothing(plan: Alignment) -> bool:
    inner = [map for maps in plan.families.values() for map in maps]
    maps = [*plan.maps.values(), *inner]
    return all(isinstance(map, Permutation) and map.identity for map in maps)
