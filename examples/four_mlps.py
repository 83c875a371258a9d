"""Four MNIST MLPs, trained apart, fused into one: parents, plain average, fused.

    python examples/four_mlps.py [--seed 0] [--epochs 10] [--passes 4] [--json FILE]
        [--inputs 200,2000] [--draws 5]

784-400-200-100-10 from four seeds. Data-free, then with inputs: training images without labels,
the mean over several draws. The first run trains them: about four minutes on one core.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from mnist import MLPNET, Recipe, Student, accuracy, ensemble, load, options, students

import otfuse_cli

BLENDS = ("average", "joint", "auto")  # average: refit of the average


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--epochs", type=int, default=10, help="of training (default 10)")
    parser.add_argument("--passes", type=int, default=4, help="up to which --passes (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--inputs", default="200,2000", help="how many (default 200,2000)")
    parser.add_argument("--draws", type=int, default=5, help="of inputs (default 5)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    test = load(given.data, "test")
    wanted = [Student(given.seed + at, given.seed + at) for at in range(4)]
    parents = students(Recipe(MLPNET, epochs=given.epochs), wanted, given.data, given.cache)

    results: dict[str, Any] = {"parents": [accuracy(p, test) for p in parents]}
    print("parents              ", "  ".join(f"{a:.2f}" for a in results["parents"]))
    results["ensemble of logits"] = ensemble(parents, test, (0.25,) * 4)
    print(f"{'ensemble of logits':21} {results['ensemble of logits']:.2f}")
    runs: dict[str, dict[str, Any]] = {
        "--align none": {"align": "none"},
        "--paper": {"paper": True},
        "--paper --passes 2": {"paper": True, "passes": 2},
        "default": {},
    }
    for passes in range(2, given.passes + 1):
        runs[f"--passes {passes}"] = {"passes": passes}
    for name, chosen in runs.items():
        fused, _ = otfuse_cli.merge(*parents, **chosen)
        results[name] = accuracy(fused, test)
        print(f"{name:21} {results[name]:.2f}", flush=True)
    images = load(given.data, "train").images
    for number in map(int, given.inputs.split(",")):
        for blend in BLENDS:
            found = [
                otfuse_cli.merge(
                    *parents,
                    arch="mlp",
                    samples={"x": images},
                    num_samples=number,
                    blend=blend,
                    matcher="sweep",
                    seed=draw,
                )[0]
                for draw in range(given.draws)
            ]
            name = f"{number:,} inputs, {blend}"
            results[name] = [accuracy(fused, test) for fused in found]
            low, high = min(results[name]), max(results[name])
            print(f"{name:21} {mean(results[name]):.2f} ({low:.2f} to {high:.2f})", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
