"""What our ways cost beside peers, as ratios of CPU seconds: the table that `make bench` prints.

    python benchmarks/ratios.py [--repeat 3] [--line]

VGG11 at half width: `descent` and `auto` against Git Re-Basin, `--paper` against the published
algorithm, peers of our own writing (`peers.py`). MNIST: `--paper` less `import torch`, in seconds
(`start.py`). All in turns on one thread, medians after a round that warms up; no accuracies, which
`peers.py` measures. `--line` is what CI's log has: one round, one line, and no failure where there
are no checkpoints (OTFUSE_SHARED).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import peers
import start
import torch

GOALS = {"descent": 0.9, "auto": 2.5, "--paper": 0.6}
START_GOAL = 0.5


def measured(repeat: int) -> dict[str, tuple[float, float]]:
    """Every ratio, and the one it is to stay under."""
    layers, _ = peers.vgg_layers(peers.WIDTHS)
    every = peers.runs(layers, Path())
    rows = {name: run for name, run in every.items() if "--blend" not in name}
    with tempfile.TemporaryDirectory() as folder:
        seconds = peers.in_turns(rows, Path(folder), repeat)
    rebasin, published, *ours = rows
    found = {}
    for name in ours:
        way = name.split()[-1]
        peer = published if way == "--paper" else rebasin
        pairs = zip(seconds[name], seconds[peer], strict=True)
        found[f"VGG {way} / {peer}"] = median(a / b for a, b in pairs), GOALS[way]
    extra = start.difference(start.seconds_of_both(repeat))
    found["MNIST --paper less import torch, s"] = extra, START_GOAL
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3, help="rounds after the first (default 3)")
    parser.add_argument("--line", action="store_true", help="one round, one line; never fails")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.line and not all(Path(path).exists() for path in peers.PAIR):
        print("ratios: not measured, there are no checkpoints")
        return
    found = measured(1 if given.line else given.repeat)
    if given.line:
        print("ratios: " + ", ".join(f"{name} {ratio:.2f}" for name, (ratio, _) in found.items()))
        return
    print("| what | ratio | floor |\n|---|---|---|")
    for name, (ratio, goal) in found.items():
        print(f"| {name} | {ratio:.2f} | {goal} |")


if __name__ == "__main__":
    main()
