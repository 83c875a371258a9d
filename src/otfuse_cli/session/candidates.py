"""Candidates on held-out inputs: every way from the parents to one network is tried, one is taken.

They are judged on a fifth of the inputs by agreement with the parents' ensemble, or by accuracy
where inputs have labels; what is level there by chance, by how near its probabilities come to the
ensemble's. Cheap ones come first, grafts only as long as the best so far leaves them anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..errors import IncompatibleModels, UsageError
from ..graph.analysis.streams import TiedOutput
from ..report.records import StepRecord
from ..running.chance import SEVERAL_TRY, clearly_more, clearly_nearer
from ..runtime import Stopwatch
from .bench import Bench, Verdict
from .ways import Fitted, Ways

# Of the inputs, this part from the end is held out.
_HELD = 5
# Fits of candidates take this share of the rows of a convolution or of a sequence: enough to tell
# ways apart, at a tenth of the products.
_TRIAL_ROWS = 0.1
# Of the anchor's units, these shares are tried for units of other parents.
_GRAFTS = {"graft 10%": 0.10, "graft 25%": 0.25}
# Fits of one layer, or of none.
_CHEAP = ("head", "average")
# A lead has to be more than one input on which a coin decides.
_HOPELESS = 1

Way = Callable[[Bench], Fitted]


@dataclass(frozen=True)
class Chosen:
    """The candidate that is taken, and what all of them gave.

    Attributes:
        name: Of the candidate.
        way: What makes it.
        steps: The candidates in the order in which they were tried.
        remarks: What could not be tried.
        behind: By how much it agrees less than the anchor alone on inputs that were held out,
            where that is no chance.
    """

    name: str
    way: Way
    steps: tuple[StepRecord, ...]
    remarks: tuple[str, ...]
    behind: float | None = None


def ways(work: Ways, blend: str) -> dict[str, Way]:
    """What `--blend` tries, by name, in order of preference among what is as good by chance.

    The simplest comes first: the anchor with another output layer.
    """
    grafts: dict[str, Way] = {n: partial(work.graft, share=s) for n, s in _GRAFTS.items()}
    every: dict[str, Way] = {"head": work.head, "refit": work.refit, "joint": work.joint}
    if blend == "graft":
        return grafts
    if blend != "auto":
        name = "refit" if blend == "average" else blend
        return {name: every[name]}
    unfitted = {"average": partial(_unfitted, work)}
    if all(source.alignment.hard for source in work.fused.sources):
        return {**every, **unfitted}
    return {**every, **grafts, **unfitted}


def _unfitted(work: Ways, bench: Bench) -> Fitted:
    return bench.average(work.fused), (), ()


@dataclass
class _Trial:
    """Ways that were tried: fitted on some of the inputs, judged on those that are held out."""

    some: Bench
    held_out: Bench
    watch: Stopwatch
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def run(self, name: str, way: Way) -> None:
        """Try one way; why it can't be tried is a remark."""
        try:
            with self.watch(f"refit: {name}, held out"):
                tensors = way(self.some)[0]
        except (IncompatibleModels, UsageError) as error:
            fix = f" ({error.fix})" if isinstance(error.__cause__, TiedOutput) else ""
            self.remarks.append(
                f"--blend {name.partition(' ')[0]} was not tried: {error.what}{fix}"
            )
            return
        self.verdicts[name] = self.held_out.verdict(tensors)

    def may_win(self, name: str, order: Sequence[str]) -> bool:
        """Whether a graft is worth its fit; other ways always are.

        The best so far leaves something to win; joint fusion, a graft of whatever is best, is
        right no less often than that; and a smaller share leads already.
        """
        if name not in _GRAFTS or not self.verdicts:
            return True
        right = {n: float(verdict.hits.sum()) for n, verdict in self.verdicts.items()}
        best = max(right.values())
        left = next(iter(self.verdicts.values())).hits.numel() - best
        smaller = [
            other
            for other, share in _GRAFTS.items()
            if share < _GRAFTS[name] and other in self.verdicts
        ]
        leads = all(self.best(order) == other for other in smaller)
        return left > _HOPELESS and right.get("joint", best) >= best and leads

    def best(self, order: Sequence[str]) -> str:
        """Of those that the most frequently right one doesn't clearly beat, the first in order.

        Another is taken for it that comes clearly nearer to the ensemble's probabilities, which
        say more than its choices.
        """
        names = [name for name in order if name in self.verdicts]
        top = self.verdicts[max(names, key=lambda name: self.verdicts[name].hit_rate)]
        level = [
            name
            for name in names
            if not clearly_more(top.hits, self.verdicts[name].hits, errors=SEVERAL_TRY)
        ]
        best = level[0]
        for name in level[1:]:
            if clearly_nearer(self.verdicts[name].distances, self.verdicts[best].distances):
                best = name
        return best


def choose_way(work: Ways, every: Mapping[str, Way], watch: Stopwatch) -> Chosen:
    """Try ways on held-out inputs: cheap ones, then dear ones in order.

    Raises:
        UsageError: None of them can be tried.
    """
    bench = work.bench
    count = bench.samples.count
    cut = count - count // _HELD
    some = replace(bench.part(slice(0, cut)), rows=_TRIAL_ROWS)
    trial = _Trial(some, bench.part(slice(cut, count)), watch)
    order = list(every)
    for name in sorted(every, key=lambda name: name not in _CHEAP):
        if trial.may_win(name, order):
            trial.run(name, every[name])
    if not trial.verdicts:
        raise UsageError(trial.remarks[0], where="--blend", fix="use --blend average")
    name = trial.best(order)
    steps = tuple(
        verdict.step(f"{other}, held out", kept=other == name)
        for other, verdict in trial.verdicts.items()
    )
    anchor, taken = trial.held_out.anchor_verdict(), trial.verdicts[name]
    lost = anchor.hit_rate - taken.hit_rate if clearly_more(anchor.hits, taken.hits) else None
    return Chosen(name, every[name], steps, tuple(trial.remarks), lost)
