"""Table S9: fused accuracy against width; and sources fused into anchors of other widths.

Hidden layers 40-20-10 to 2000-1000-500, pairs of networks each. The relative gap is what a fused
network lacks on the better of its parents, in percent of it. Up to 400-200-100 networks are trained
as in the paper; wider ones for 2 epochs at a rate that falls from 0.1 to zero, a fifth of the work.
Of those there are three networks each, and each is fused with the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobs import Job, Values
from laboratory import WAYS, Laboratory
from mnist import Recipe, StateDict, Student, ensemble, students

# Hidden layers to the paper's A, B, ensemble, plain average and OT average.
EQUAL: Mapping[tuple[int, ...], tuple[float, ...]] = {
    (40, 20, 10): (96.69, 96.91, 97.50, 34.82, 82.91),
    (200, 100, 50): (98.00, 97.97, 98.16, 47.30, 93.93),
    (400, 200, 100): (98.13, 98.09, 98.21, 73.51, 96.70),
    (1000, 500, 250): (98.08, 98.21, 98.20, 78.21, 97.35),
    (2000, 1000, 500): (98.26, 98.16, 98.21, 85.71, 97.41),
}
MIXED = ((400, 200), (200, 400), (400, 40), (2000, 400))
PAIRS = 3
SCALES: Mapping[str, Mapping[str, Any]] = {
    "--scale paper": {"scale": "paper"},
    "--scale preserve --repair none": {"scale": "preserve", "repair": "none"},
    "--scale balanced": {"scale": "balanced"},
}
BY_WEIGHTS = {name: WAYS[name] for name in ("plain", "--paper", "default")}
WITH_INPUTS = {name: WAYS[name] for name in ("refit", "joint")}
SYNTHETIC = {"synthetic": {"synthetic": True, "input_shape": (1, 28, 28), "arch": "mlp"}}
MOST = 400  # wider networks are fused without inputs alone, but for synthetic ones


def jobs(lab: Laboratory) -> Iterator[Job]:
    """One for each shape, and for each two; --quick leaves out the widest."""
    most = MOST if lab.quick else max(EQUAL)[0]
    for hidden, figures in EQUAL.items():
        if hidden[0] > most:
            continue
        ways = {**BY_WEIGHTS, **SYNTHETIC, **(WITH_INPUTS if hidden[0] <= MOST else {})}
        columns = ("A", "B", "ensemble", "plain", "--paper")
        gap = 100 * (1 - figures[4] / max(figures[:2]))
        yield Job(
            "S9",
            "-".join(map(str, hidden)),
            {"hidden": hidden, "pairs": PAIRS, "ways": ways},
            lambda hidden=hidden, ways=ways: _equal(lab, hidden, ways),
            {**dict(zip(columns, figures, strict=True)), "--paper": f"{figures[4]} ({gap:.2f})"},
            seconds={40: 30, 200: 60, 400: 100, 1000: 120, 2000: 320}[hidden[0]],
        )
    for source, anchor in MIXED:
        if source > most:
            continue
        ways = {**BY_WEIGHTS, **SCALES, **(WITH_INPUTS if source <= MOST else {})}
        del ways["plain"]
        yield Job(
            "Two widths",
            f"{'-'.join(map(str, shape(source)))} into {'-'.join(map(str, shape(anchor)))}",
            {"source": source, "anchor": anchor, "pairs": PAIRS, "ways": ways},
            lambda source=source, anchor=anchor, ways=ways: _mixed(lab, source, anchor, ways),
            seconds=60,
        )


def shape(first: int) -> tuple[int, ...]:
    """Hidden widths: each half of the one before."""
    return (first, first // 2, first // 4)


def networks(lab: Laboratory, hidden: tuple[int, ...]) -> list[dict[str, Any]]:
    """Two for each pair; of the widest as many as there are pairs."""
    wide = hidden[0] > MOST
    recipe = Recipe(hidden, epochs=2, rate=0.1, decay=True) if wide else Recipe(hidden)
    wanted = [Student(at, at) for at in range(PAIRS if wide else 2 * PAIRS)]
    return students(recipe, wanted, lab.given.data, lab.given.cache)


def _equal(lab: Laboratory, hidden: tuple[int, ...], ways: Mapping[str, Any]) -> Values:
    nets = networks(lab, hidden)
    step = len(nets) // PAIRS  # 1: each with the next
    found: dict[str, list[float]] = {}
    for at in range(PAIRS):
        pair = nets[step * at], nets[(step * at + 1) % len(nets)]
        own = [lab.score(network) for network in pair]
        scores = {**dict(zip("AB", own, strict=True)),
                  "ensemble": ensemble(pair, lab.test, (0.5, 0.5))}  # fmt: skip
        for name, way in ways.items():
            score = lab.score(lab.fused(pair, way))
            scores[f"{name}, score"] = score
            scores[f"{name}, gap"] = 100 * (1 - score / max(own))
        for name, score in scores.items():
            found.setdefault(name, []).append(score)
    return found


def _mixed(lab: Laboratory, source: int, anchor: int, ways: Mapping[str, Any]) -> Values:
    sources, anchors = (networks(lab, shape(first)) for first in (source, anchor))
    pairs: list[Sequence[StateDict]] = list(zip(sources[:PAIRS], anchors[-PAIRS:], strict=True))
    found = {name: [lab.score(pair[at]) for pair in pairs]
             for at, name in enumerate(("source", "anchor"))}  # fmt: skip
    for name, way in ways.items():
        found[name] = [lab.score(lab.fused(pair, way)) for pair in pairs]
    return found
