"""The parents of a fusion, run on its inputs: agreement, activations, refit, calibration.

Everything here needs the network itself (`--arch`) and inputs, real or synthetic. Labels judge
what was fused, where there are any; nothing is fitted to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from ..fusion.average import Aligned
from ..fusion.calibrate import re_estimate, rescale
from ..fusion.fused import Fused
from ..fusion.layer_looks import Aim
from ..fusion.lockstep import Parent
from ..fusion.refit import Stress, refit
from ..fusion.repair import plan_repair
from ..fusion.selection import Selection
from ..graph.trace.program import Program
from ..matching.activations import Activations, Looking, Observed, observe_by, seen_places
from ..matching.alignment import Alignment
from ..matching.counterpart import Counterpart
from ..matching.models import Model
from ..matching.portfolio import Judge
from ..report.records import RefitRecord, StepRecord
from ..requests.recipe import Recipe
from ..running.samples import Samples
from ..runtime import Runtime
from .hearing import PairJudge, Speaking, all_tensors
from .parents import Parents

# Inputs that candidates and steps are judged on: more would cost passes and decide nothing.
_JUDGED = 500
# Of these, those that maps are told apart on where layers are fitted afterwards: what the better of
# two averages is ahead by, a fit evens out (docs/methods/candidates.md).
_TOLD_APART = 100

Tensors = dict[str, Tensor]


@dataclass
class Bench:
    """Models with their programs and tensors, and what their ensemble says on the inputs.

    Attributes:
        samples: Inputs, on the CPU.
        programs: By the model's index.
        tensors: By the model's index; float32, on the device.
        weights: Share of every model in the fusion.
        parents: The models.
        runtime: Device, seed, progress.
        most_bytes: Memory for values of waiting passes.
        moved: The kind of the inputs, where the networks shaped them: `class`, `statistics` or
            `balanced`.
        rows: Share of the rows that a fit takes where there are many.
        heard: What parents say on the inputs that are judged, where they were run on them already.
    """

    samples: Samples
    programs: Mapping[int, Program]
    tensors: Mapping[int, Tensors]
    weights: Sequence[float]
    parents: Parents
    runtime: Runtime
    most_bytes: int
    moved: str | None = None
    rows: float = 1.0
    heard: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take the inputs that candidates and steps are judged on."""
        self.judged = self.samples.take(slice(0, _JUDGED))

    @cached_property
    def _logits(self) -> dict[int, Tensor]:
        """What every parent says on them; asked once, by whoever judges."""
        holds_nothing = self.anchor if self.parents.given_anchor is not None else None
        for at, tensors in self.tensors.items():
            if at not in self.heard and at != holds_nothing:
                self.heard[at] = self.logits(self.programs[at], tensors)
        return self.heard

    @cached_property
    def choice(self) -> Tensor:
        """Classes that the parents' ensemble chooses."""
        return self.mixture.argmax(-1)

    @cached_property
    def mixture(self) -> Tensor:
        """The ensemble's probabilities: the weighted mean of the parents'."""
        return self._mixture({at: self.weights[at] for at in self._logits})

    @property
    def warnings(self) -> tuple[str, ...]:
        """What running the networks rests on without anybody having said so."""
        assumption = self.parents.shared_architecture.assumption
        return () if assumption is None else (assumption,)

    @property
    def anchor(self) -> int:
        """Index of the anchor."""
        return self.parents.anchor_index

    def logits(
        self, program: Program, tensors: Mapping[str, Tensor], most: int = _JUDGED
    ) -> Tensor:
        """What a network returns on (the first of) the judged inputs, classes last, on the CPU."""
        speaking = Speaking(program, tensors, self.runtime.device)
        return speaking.on(self.judged.take(slice(0, most)), self.runtime.workers)

    def _mixture(self, shares: Mapping[int, float]) -> Tensor:
        """The parents' mean of probabilities."""
        total = sum(
            share * self._logits[at].softmax(-1) for at, share in shares.items() if share > 0
        )
        assert isinstance(total, Tensor)
        return total

    def judge(self, source: Model, *, fitted: bool = False) -> Judge:
        """Says where the average of `source` and the anchor alone agrees with the two.

        What is `fitted` afterwards is told apart on fewer inputs.
        """
        most = _TOLD_APART if fitted else _JUDGED
        source_weight, rest = self.weights[source.index], self.weights[self.anchor]
        share = source_weight / (source_weight + rest)
        mixture = self._mixture({source.index: share, self.anchor: 1 - share})
        # What units do on the inputs is nothing to it.
        source, anchor = (replace(m, observed={}) for m in (source, self.parents.anchor))
        pair = [0.0] * len(self.weights)
        pair[source.index], pair[self.anchor] = share, 1 - share
        return PairJudge(
            source,
            anchor,
            share,
            Selection(tuple(pair)),
            plan_repair(anchor.graph),
            mixture[:most].argmax(-1),
            self.programs[self.anchor],
            self.judged.take(slice(0, most)),
        )

    def average(self, fused: Fused) -> Tensors:
        """All tensors of an average in memory, float32 on the device."""
        return all_tensors(fused, self.runtime.device)

    def agreement(self, tensors: Mapping[str, Tensor]) -> float:
        """How often a network at the anchor's widths says what the parents' ensemble says."""
        logits = self.logits(self.programs[self.anchor], tensors)
        return _share(logits.argmax(-1), self.choice)

    def verdict(self, tensors: Mapping[str, Tensor]) -> Verdict:
        """What a network at the anchor's widths is worth on the inputs that are judged."""
        return Verdict(self.logits(self.programs[self.anchor], tensors), self)

    def anchor_verdict(self) -> Verdict:
        """What the anchor alone, as it was given, is worth on them."""
        return Verdict(self._logits[self.parents.named_anchor], self)

    def yardsticks(self) -> tuple[StepRecord, ...]:
        """What every parent is worth by itself on them."""
        named = self.parents.named_anchor
        verdicts = {at: Verdict(logits, self) for at, logits in sorted(self._logits.items())}
        return tuple(
            verdict.step(f"parent {at}" + " (anchor)" * (at == named), kept=False)
            for at, verdict in verdicts.items()
            if verdict.choice.shape == self.choice.shape
        )

    def run_parents(self, aligned: Sequence[Aligned]) -> list[Parent]:
        """Everyone with a share as the refit runs them, the anchor first."""
        anchor = self.parents.anchor
        rest = 1.0 - sum(a.weight for a in aligned)
        return [
            self.run_parent(anchor, rest),
            *(self.run_parent(a.model, a.weight, a.alignment) for a in aligned),
        ]

    def run_parent(self, model: Model, weight: float, alignment: Alignment | None = None) -> Parent:
        """One model as the refit runs it."""
        program, tensors = self.programs[model.index], self.tensors[model.index]
        other = self.parents.counterparts.get(model.index)
        return Parent(program, tensors, weight, model.graph, alignment, other)

    def part(self, where: slice) -> Bench:
        """The same models on some of the inputs."""
        return replace(self, samples=self.samples.take(where), heard={})

    def refit(
        self,
        parents: Sequence[Parent],
        tensors: Tensors,
        ridge: float,
        *,
        left: frozenset[str] = frozenset(),
        aim: Aim | None = None,
        stress: Stress | None = None,
        fresh: Mapping[str, Tensor] | None = None,
    ) -> tuple[tuple[RefitRecord, ...], tuple[str, ...]]:
        """Fit every layer of `tensors`, in place; records, and remarks on what was left alone."""
        fitted, shared = refit(
            parents,
            self.programs[self.anchor],
            tensors,
            self.samples,
            ridge=ridge,
            left=left,
            runtime=self.runtime,
            most_bytes=self.most_bytes,
            aim=aim,
            stress=stress,
            rows=self.rows,
            fresh=fresh,
        )
        remarks = [f"{name} is used twice or tied: not refitted" for name in shared]
        return tuple(RefitRecord(f.layer, f.before, f.after) for f in fitted), tuple(remarks)

    def calibrate(
        self, kind: str, aligned: Sequence[Aligned], tensors: Tensors, left: frozenset[str]
    ) -> Tensors | None:
        """A calibrated copy by `bn` or `repair`; None where there is nothing to do."""
        copy, program = dict(tensors), self.programs[self.anchor]
        more = {"left": left, "runtime": self.runtime, "most_bytes": self.most_bytes}
        if kind == "bn":
            changed = re_estimate(program, copy, self.samples, **more)  # type: ignore[arg-type]
        else:
            parents = self.run_parents(aligned)
            changed = rescale(parents, program, copy, self.samples, **more)  # type: ignore[arg-type]
        return copy if changed else None


@dataclass(frozen=True)
class Verdict:
    """What a network says on the inputs that are judged, from one pass over them.

    Attributes:
        logits: Classes last, on the CPU.
        bench: The inputs, and what the parents say on them.
    """

    logits: Tensor
    bench: Bench

    @cached_property
    def choice(self) -> Tensor:
        """The likeliest class of every input, or of every position."""
        return self.logits.argmax(-1)

    @cached_property
    def hits(self) -> Tensor:
        """Where it is right: as labels say, or as the parents' ensemble does without labels."""
        return self.choice == (self.bench.choice if self._labels is None else self._labels)

    @property
    def hit_rate(self) -> float:
        """How often it is right, from 0 to 1."""
        return float(self.hits.double().mean())

    @cached_property
    def distances(self) -> Tensor:
        """Squares by which its probabilities miss the ensemble's, by input and position."""
        return (self.logits.softmax(-1) - self.bench.mixture).square().sum(-1)

    @cached_property
    def agreement(self) -> float:
        """How often it says what the parents' ensemble says, from 0 to 1."""
        return _share(self.choice, self.bench.choice)

    def step(self, name: str, *, kept: bool = True) -> StepRecord:
        """The same for the report: agreement and, with labels, accuracy in percent."""
        accuracy = None if self._labels is None else 100 * _share(self.choice, self._labels)
        return StepRecord(name, self.agreement, accuracy, kept)

    @property
    def _labels(self) -> Tensor | None:
        """Labels of the inputs, if there is one for each class that is said."""
        labels = self.bench.judged.labels
        return labels if labels is not None and labels.shape == self.choice.shape else None


def _share(choice: Tensor, wanted: Tensor) -> float:
    """How often two choices are one, from 0 to 1."""
    return float((choice == wanted).double().mean())


def seen_units(
    bench: Bench,
    samples: Samples,
    *,
    post: bool,
    seed: int,
    models: Sequence[Model] | None = None,
    before: bool = False,
) -> dict[int, Observed]:
    """What the units of every model (or of these) do on `samples`, by the model's index.

    `samples` are the bench's, or begin with those that are judged: what models say on these is
    kept.
    """
    seen: dict[int, Observed] = {}
    for model in models or bench.parents.models:
        if model.index not in bench.programs:
            continue
        other = bench.parents.counterparts.get(model.index)
        assert other is None or isinstance(other, Counterpart), "a stream has a basis, no units"
        program, tensors = bench.programs[model.index], bench.tensors[model.index]
        everywhere = seen_places(program, model.graph, post=post)
        places = tuple(everywhere if other is None else other.places)
        device, count = bench.runtime.device, samples.count
        look = Looking(program, tensors, model.graph, places, before, count, seed, device)
        seen[model.index], said = observe_by(
            look, samples, bench.runtime.workers, hear=bench.judged.count
        )
        if other is not None:
            observed = seen[model.index]
            carried: dict[str, tuple[Activations, ...]] = {}
            for space, first in other.carried.items():
                # There it is what is seen that stands for what the anchor's layer gives.
                carried[space] = tuple(replace(a, before_NF=None) for a in observed[first])
            seen[model.index] = {**observed, **carried}
        assert said is not None
        bench.heard.setdefault(model.index, said)
    return seen


def watch_units(bench: Bench, parents: Parents, recipe: Recipe) -> Parents:
    """The parents with what their units do on the inputs, where the recipe looks at it."""
    portfolio = recipe.align == "wts" and recipe.matcher == "auto"
    if recipe.align != "acts" and not portfolio:
        return parents
    seen = seen_units(bench, bench.judged, post=recipe.post_activations, seed=recipe.seed)
    models = tuple(replace(m, observed=seen.get(m.index, {})) for m in parents.models)
    return replace(parents, models=models)
