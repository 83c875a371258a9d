"""One-shot skill transfer (the paper, sections 5.1, S5, S6): test accuracy along w_B.

    python examples/skill_transfer/run.py [--seeds 5] [--settings 4-10,6-5] [--starts same,...]

A knows a digit that B has never seen, and some percent of the rest; B has the others of the rest.
Writes results.json, a plot per setting and the tables of README.md into --out (default: this
folder). The first run trains the networks; they are kept (--cache). Needs matplotlib.

Matching does not depend on w_B. So where widths are equal each A is aligned once, `otfuse merge A B
--weights 1,0`, and averaged many times, `otfuse merge ALIGNED B --align none --repair auto
--weights ...`: the same bits as a merge from the start. Of four models, B, C and D are aligned to A
in the same way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from mnist import Split, StateDict, accuracy, ensemble, load, options  # noqa: E402
from parents import fours, pairs  # noqa: E402
from tables import draw, four_table, pair_table  # noqa: E402

import otfuse_cli  # noqa: E402

SHARES_OF_B = tuple(round(0.1 * step, 1) for step in range(11))
# How A is aligned, and what repairs the average; None: A as it is.
METHODS: Mapping[str, tuple[Mapping[str, Any] | None, str]] = {
    "vanilla": (None, "none"),
    "paper": ({"paper": True}, "none"),
    "default": ({}, "auto"),
}
PROPORTIONS = (
    (0.7, 0.1, 0.2, 0.1),
    (0.6, 0.1, 0.2, 0.1),
    (0.7, 0.15, 0.2, 0.15),
    (0.7, 0.1, 0.3, 0.1),
)
MARK = "<!-- tables, written by run.py -->"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--settings", default="4-10,6-5", help="DIGIT-PERCENT,... of A's data")
    parser.add_argument("--starts", default="same,different,narrow", help="of A; some of these")
    parser.add_argument("--skip-four", action="store_true", help="without the four-model variant")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    train, test = load(given.data, "train"), load(given.data, "test")
    seeds = list(range(given.seed, given.seed + given.seeds))

    results: dict[str, Any] = {"seeds": seeds, "w_B": SHARES_OF_B, "settings": [], "four": None}
    for setting in given.settings.split(","):
        digit, percent = map(int, setting.split("-"))
        for start in given.starts.split(","):
            found = pairs(digit, percent, seeds, start, train, given.data, given.cache)
            entry = {"digit": digit, "percent": percent, "start": start, **measure(found, test)}
            results["settings"].append(entry)
            print(pair_table([entry]), flush=True)
    if not given.skip_four:
        found = fours(4, seeds, train, given.data, given.cache)
        results["four"] = measure_fours(found, test)
        print(four_table(results["four"]), flush=True)
    write(results, given.out)


def write(results: dict[str, Any], folder: Path) -> None:
    """Numbers, plots, and the tables at the end of README.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results) + "\n")
    draw(results, folder)
    tables = pair_table(results["settings"])
    if results["four"]:
        tables += "\n" + four_table(results["four"])
    readme = folder / "README.md"
    text = readme.read_text() if readme.exists() else ""
    before = text.partition(MARK)[0]
    readme.write_text(f"{before}{MARK}\n\n{tables}")


def measure(parents: Sequence[tuple[StateDict, StateDict]], test: Split) -> dict[str, Any]:
    """Accuracy of A, of B, and along w_B for each method; a list entry per seed."""
    found: dict[str, Any] = {
        "A": [accuracy(a, test) for a, _ in parents],
        "B": [accuracy(b, test) for _, b in parents],
        "curves": {},
    }
    for name, (how, repair) in METHODS.items():
        if how is None and not same_shape(*parents[0]):
            continue
        found["curves"][name] = [curve(a, b, how, repair, test) for a, b in parents]
    return found


def curve(
    a: StateDict, b: StateDict, how: Mapping[str, Any] | None, repair: str, test: Split
) -> list[float]:
    """Accuracy of the fusions of A and B, from w_B = 0 (A, aligned) to 1 (B)."""
    options: dict[str, Any]
    if how is not None and not same_shape(a, b):
        options = dict(how)  # the average, too, depends on what was merged into what
    else:
        a = a if how is None else align(a, b, how)
        options = {"align": "none", "repair": repair}
    return [
        accuracy(otfuse_cli.merge(a, b, weights=(1 - w, w), **options)[0], test)
        for w in SHARES_OF_B
    ]


def same_shape(a: StateDict, b: StateDict) -> bool:
    """Whether two networks have the same widths."""
    return all(a[name].shape == b[name].shape for name in a)


def align(source: StateDict, anchor: StateDict, how: Mapping[str, Any]) -> StateDict:
    """The source with its units in the anchor's order."""
    return otfuse_cli.merge(source, anchor, weights=(1, 0), **how)[0]


def measure_fours(networks: Sequence[Sequence[StateDict]], test: Split) -> list[dict[str, Any]]:
    """Accuracies of four models, their ensemble and their fusions, for each choice of weights."""
    found = [
        {
            "proportions": proportions,
            "parents": [[accuracy(n, test) for n in four] for four in networks],
            "ensemble": [ensemble(four, test, proportions) for four in networks],
        }
        for proportions in PROPORTIONS
    ]
    for name, (how, repair) in METHODS.items():
        for a, *others in networks:
            moved = others if how is None else [align(n, a, how) for n in others]
            for entry in found:
                options = {"align": "none", "repair": repair, "weights": entry["proportions"]}
                fused, _ = otfuse_cli.merge(a, *moved, anchor="first", **options)
                entry.setdefault(name, []).append(accuracy(fused, test))
    return found


if __name__ == "__main__":
    main()
