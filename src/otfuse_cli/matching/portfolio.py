"""Searches over all maps of one source, and the best of several: `--matcher auto`.

Every search maximises one objective (module `similarity`), so that the best is known without data.
Each is planned in floating point operations before it runs; what does not fit `--effort` is named
in the report instead. Nothing depends on time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ..report.records import Candidate
from ..requests.recipe import Recipe
from ..running.chance import SEVERAL_TRY, clearly_more
from ..runtime import Runtime
from ..transport.maps import Permutation
from .alignment import Alignment, in_place
from .matchers.descent import MOST_PASSES, Found, descend, movable
from .matchers.matcher import Matcher, no_permutations
from .matchers.searches import DESCENT
from .models import Model
from .search_plan import FEW_PASSES, further_steps, takes_few_passes, usual_flop
from .similarity import Similarity

# Objectives closer than this are equal: the earlier candidate stays.
_EQUAL = 1e-6


# On which inputs the average under an alignment agrees with its parents.
Judge = Callable[[Alignment], Tensor]


@dataclass(frozen=True)
class Searched:
    """The alignment that a portfolio chose, all that were tried, and what was not."""

    best: Found
    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...]


class Portfolio:
    """Candidates for one source, by name; the best so far."""

    def __init__(
        self,
        source: Model,
        anchor: Model,
        recipe: Recipe,
        runtime: Runtime,
        swept: Found,
        judge: Judge | None = None,
    ) -> None:
        """Begin with the sweep's maps; their objective is computed here.

        With a `judge` what agrees most wins, or what it doesn't clearly beat; without, the largest
        objective.
        """
        self.judge = judge
        self.source, self.anchor, self.recipe, self.runtime = source, anchor, recipe, runtime
        self.work = Similarity(source, anchor, paper_scale=recipe.scale == "paper")
        self.spaces = movable(self.work, recipe)
        self.tried: list[tuple[str, Found]] = []
        self.left_out: list[Candidate] = []
        self.warnings: list[str] = []
        self.seen: Found | None = None
        self.swept = replace(swept, objective=self.work.objective(swept.alignment))
        self.tried.append(("sweep", self.swept))

    def outcome(self) -> Searched:
        """The largest objective of what agrees best, or of all; the earliest among equals."""
        name, best, agreements = self._judged()
        candidates = [
            Candidate(n, self.source.index, f.objective, agreement, f.flop, f is best)
            for (n, f), agreement in zip(self.tried, agreements, strict=True)
        ]
        self.warnings += in_place_warning(
            self.source, best.alignment, started_there=name.startswith("identity")
        )
        return Searched(best, (*candidates, *self.left_out), tuple(self.warnings))

    def observe(self, swept: Found) -> None:
        """Take in the maps of a sweep over activations."""
        self.seen = replace(swept, objective=self.work.objective(swept.alignment))

    def search(self, matcher: Matcher) -> bool:
        """One search and descent after it, whatever the effort; False where it can't be."""
        obstacle = matcher.hindered(self.source, self.anchor, self.recipe)
        if obstacle is not None:
            self._skip(matcher.label, 0.0, obstacle)
            return False
        start = matcher.begin(self.work, self.spaces, self.swept)
        self._descend(matcher.label, start, salt=0, passes=MOST_PASSES)
        return True

    def auto(self) -> None:
        """The whole portfolio, as far as the effort goes.

        The sweep and descent from it, in several orders; other searches; and the identity, improved
        by descent only where it beats the sweep: otherwise the order of the source's units says
        nothing, and the result must not depend on it.
        """
        soft = no_permutations(self.source, self.anchor, self.recipe)
        plain = None if soft else self._identity()
        if self._perfect() or not self.spaces:
            return
        usual = usual_flop(self.work, self.spaces)
        few = takes_few_passes(self._spent(), usual, self.recipe)
        passes = FEW_PASSES if few else MOST_PASSES
        self._descend(DESCENT.label, self.swept, salt=0, passes=passes)
        if self.seen is not None:
            self.tried.append(("activations", self.seen))
            label = "activations + descent"
            again = partial(self._descend, label, self.seen, salt=0, passes=passes)
            self._try(label, usual, again)
        for step in further_steps(self.work, self.spaces, self.recipe):
            if step.matcher is not None:
                run: Callable[[], object] = partial(self.search, step.matcher)
            else:
                start = self.swept if step.order else plain
                if start is None or (start is plain and not self._beats_the_sweep(plain)):
                    continue
                run = partial(self._descend, step.label, start, salt=step.order, passes=MOST_PASSES)
            self._try(step.label, step.flop, run)

    def _beats_the_sweep(self, start: Found) -> bool:
        return start.objective > self.swept.objective * (1 + _EQUAL)

    def _descend(self, name: str, start: Found, *, salt: int, passes: int) -> None:
        generator = self.runtime.generator(1000 * self.source.index + salt)
        descended = descend(self.work, start.alignment, self.recipe, generator, most_passes=passes)
        errors = {**start.errors, **descended.errors}
        self.tried.append(
            (name, replace(descended, flop=start.flop + descended.flop, errors=errors))
        )

    def _identity(self) -> Found:
        """Every unit in its place."""
        alignment = in_place(self.anchor.graph)
        identity = Found(alignment, self.work.objective(alignment))
        self.tried.append(("identity", identity))
        return identity

    def _try(self, name: str, estimate: float, run: Callable[[], object]) -> None:
        """Run a search if it can still help and its estimate fits what is left of the effort."""
        if self._perfect():
            return
        left = max(0.0, self.recipe.effort - self._spent())
        if estimate <= left:
            run()
        else:
            why = f"about {estimate:.1e} operations, {left:.1e} left of --effort"
            self._skip(name, estimate, why)

    def _skip(self, name: str, estimate: float, why: str) -> None:
        self.left_out.append(
            Candidate(f"{name} (skipped)", self.source.index, None, None, estimate, False)
        )
        self.warnings.append(f"checkpoint {self.source.index}: {name} skipped: {why}")

    def _best(self) -> tuple[str, Found]:
        name, best = self.tried[0]
        for other, candidate in self.tried[1:]:
            if candidate.objective > best.objective + _EQUAL * abs(best.objective):
                name, best = other, candidate
        return name, best

    def _judged(self) -> tuple[str, Found, list[float | None]]:
        """The winner's name, the winner, and how often each candidate agrees.

        An objective says more than a lead by chance does, and several try.
        """
        name, best = self._best()
        if self.judge is None or len(self.tried) < 2:
            return name, best, [None] * len(self.tried)
        hits = [self.judge(candidate.alignment) for _, candidate in self.tried]
        scores = [float(agreed.double().mean()) for agreed in hits]
        top = hits[scores.index(max(scores))]
        level: list[int] = []
        for at, agreed in enumerate(hits):
            if not clearly_more(top, agreed, errors=SEVERAL_TRY):
                level.append(at)
        chosen = max(level, key=lambda at: (self.tried[at][1].objective, -at))
        return *self.tried[chosen], [*scores]

    def _spent(self) -> float:
        return sum(candidate.flop for _, candidate in self.tried)

    def _perfect(self) -> bool:
        """Whether no alignment of these weights could be better."""
        return self._best()[1].objective >= (1 - _EQUAL) * self.work.bound


def in_place_warning(
    source: Model, alignment: Alignment, *, started_there: bool = False
) -> tuple[str, ...]:
    """A warning where the best maps leave every unit in its place."""
    if not any(source.graph.free()) or not (started_there or _in_place(alignment)):
        return ()
    return (
        f"the units of checkpoint {source.index} are in the anchor's order already, "
        "and these look like fine-tunes of one start: a plain average (--align none) is enough",
    )


def _in_place(alignment: Alignment) -> bool:
    every = [*alignment.maps.values(), *(m for ms in alignment.families.values() for m in ms)]
    return all(isinstance(m, Permutation) and m.identity for m in every)
