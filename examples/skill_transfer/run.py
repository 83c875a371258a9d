"""One-shot skill transfer (the paper, sections 5.1, S5, S6): test accuracy along w_B.

    python examples/skill_transfer/run.py [--seeds 5] [--settings 4-10,6-5] [--starts same,...]
        [--methods vanilla,paper,acts,default,refit,joint]

A knows a digit that B has never seen, and some percent of the rest; B has the others of the rest.
Writes results.json, a plot per setting and the tables of README.md into --out (default: this
folder). The first run trains the networks; they are kept (--cache). Needs matplotlib.

Matching does not depend on w_B. So where widths are equal each A is aligned once, `otfuse merge A B
--weights 1,0`, and averaged many times, `otfuse merge ALIGNED B --align none --repair auto
--weights ...`: the same bits as a merge from the start. Of four models, B, C and D are aligned to A
in the same way.

With inputs, 400 of A's own training images without their labels: `acts` is `--paper --align acts`,
the paper's own curve; `refit` fits the averages to the mean of A and B, `joint` is `--blend joint`.
What results.json has of other methods is kept.
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
from parents import fours, pairs, portions  # noqa: E402
from tables import draw, four_table, pair_table  # noqa: E402

import otfuse_cli  # noqa: E402

INPUTS = 400
SHARES_OF_B = tuple(round(0.1 * step, 1) for step in range(11))
# How A is aligned, and what repairs the average; None: A as it is.
METHODS: Mapping[str, tuple[Mapping[str, Any] | None, str]] = {
    "vanilla": (None, "none"),
    "paper": ({"paper": True}, "none"),
    "default": ({}, "auto"),
}
# The same where units are matched by what they do on inputs.
BY_ACTIVATIONS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "acts": ({"paper": True, "align": "acts"}, "none"),
}
# With inputs; where widths are equal the refit starts from A as `default` aligns it.
WITH_INPUTS: Mapping[str, Mapping[str, Any]] = {
    "refit": {"matcher": "descent"},
    "joint": {"matcher": "sweep", "blend": "joint"},  # the matcher counts for nothing here
}
EVERY = ("vanilla", "paper", "acts", "default", "refit", "joint")
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
    every = ",".join(EVERY)
    parser.add_argument("--methods", default=every, help="curves to measure (%(default)s)")
    parser.add_argument("--skip-four", action="store_true", help="without the four-model variant")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    train, test = load(given.data, "train"), load(given.data, "test")
    seeds = list(range(given.seed, given.seed + given.seeds))

    results = earlier(given.out, seeds)
    for setting in given.settings.split(","):
        digit, percent = map(int, setting.split("-"))
        for start in given.starts.split(","):
            found = pairs(digit, percent, seeds, start, train, given.data, given.cache)
            inputs = own_inputs(digit, percent, seeds, train)
            curves = measure(found, inputs, given.methods.split(","), test)
            entry = {"digit": digit, "percent": percent, "start": start, **curves}
            keep(results["settings"], entry)
            print(pair_table([entry]), flush=True)
            write(results, given.out)
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


def earlier(folder: Path, seeds: list[int]) -> dict[str, Any]:
    """The results that are there, if they are of the same seeds; else empty ones."""
    file = folder / "results.json"
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        if found["seeds"] == seeds:
            return found
    return {"seeds": seeds, "w_B": SHARES_OF_B, "settings": [], "four": None}


def keep(entries: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    """Put an entry among the others; curves that it lacks are those of the one it replaces."""
    case = ("digit", "percent", "start")
    for at, old in enumerate(entries):
        if all(old[name] == entry[name] for name in case):
            curves = {**old["curves"], **entry["curves"]}
            entry["curves"] = {n: curves[n] for n in EVERY if n in curves}
            entries[at] = entry
            return
    entries.append(entry)


def own_inputs(digit: int, percent: int, seeds: Sequence[int], train: Split) -> list[torch.Tensor]:
    """For each seed, images that A was trained on."""
    found = []
    for seed in seeds:
        part = portions(train, digit, (percent / 100, 1 - percent / 100), seed)[0]
        order = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))
        found.append(train.images[part[order[:INPUTS]]])
    return found


def measure(
    parents: Sequence[tuple[StateDict, StateDict]],
    inputs: Sequence[torch.Tensor],
    methods: Sequence[str],
    test: Split,
) -> dict[str, Any]:
    """Accuracy of A, of B, and along w_B for each method; a list entry per seed."""
    found: dict[str, Any] = {
        "A": [accuracy(a, test) for a, _ in parents],
        "B": [accuracy(b, test) for _, b in parents],
        "curves": {},
    }
    for name in methods:
        if name in WITH_INPUTS:
            curves = [
                curve_with(a, b, name, x, test) for (a, b), x in zip(parents, inputs, strict=True)
            ]
        elif name in BY_ACTIVATIONS:
            how, repair = BY_ACTIVATIONS[name]
            curves = [
                curve(a, b, {**how, **seen(x)}, repair, test)
                for (a, b), x in zip(parents, inputs, strict=True)
            ]
        elif name != "vanilla" or same_shape(*parents[0]):
            curves = [curve(a, b, *METHODS[name], test) for a, b in parents]
        else:
            continue
        found["curves"][name] = curves
    return found


def curve_with(
    a: StateDict, b: StateDict, name: str, inputs: torch.Tensor, test: Split
) -> list[float]:
    """Accuracy of the fusions on inputs, from w_B = 0 (A) to 1 (B); the ends are the models."""
    options = dict(WITH_INPUTS[name])
    if name == "refit" and same_shape(a, b):
        a = align(a, b, {})
        options = {"align": "none", "repair": "auto", "refit": True}
    options |= seen(inputs)
    inner = [
        accuracy(otfuse_cli.merge(a, b, weights=(1 - w, w), **options)[0], test)
        for w in SHARES_OF_B[1:-1]
    ]
    return [accuracy(a, test), *inner, accuracy(b, test)]


def seen(inputs: torch.Tensor) -> dict[str, Any]:
    """Options that give a fusion these inputs."""
    return {"arch": "mlp", "samples": {"x": inputs}, "num_samples": INPUTS}


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
