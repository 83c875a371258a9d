"""Four MNIST MLPs, trained apart, fused into one: parents, plain average, fused.

    python examples/four_mlps.py [--seed 0] [--epochs 10] [--passes 4] [--json FILE]

784-400-200-100-10 from four seeds. Data-free. The first run trains them: about four minutes on one
core.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from mnist import MLPNET, Recipe, Student, accuracy, ensemble, load, options, students

import otfuse_cli


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--epochs", type=int, default=10, help="of training (default 10)")
    parser.add_argument("--passes", type=int, default=4, help="up to which --passes (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
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
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
