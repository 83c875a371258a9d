"""Time and memory of matching: `auto` against `sweep`, and the solver against SciPy and POT.

    python benchmarks/matching.py [--only pair|solve] [--pair A B] [--sizes 512,1024,4096]

The pair is that of VGG11 at half width in the folder that OTFUSE_SHARED names. Costs to solve are
those of units whose 512 random features (a falling spectrum, as weights have) are permuted and
blurred, at two strengths of noise: after `easy` each unit is still nearest to itself, after `hard`
most are not. Each measurement is a process of its own, on one thread; seconds are CPU seconds,
memory is by how much the peak of the process rises in the call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SHARED = Path(os.environ.get("OTFUSE_SHARED", Path(__file__).parents[2] / "shared"))
STEM = "cifar10-vgg11half-{}.safetensors"
NOISE = {"easy": 0.3, "hard": 2.0}
FEATURES = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="512,1024", help="units (default 512,1024)")
    parser.add_argument(
        "--pair", nargs=2, default=[SHARED / "checkpoints" / STEM.format(i) for i in (0, 1)]
    )
    parser.add_argument("--only", choices=("pair", "solve"))
    parser.add_argument("--solvers", default="otfuse,scipy,ot.emd", help="which; otfuse first")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)  # in a process of its own
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(*given.measure)))
        return
    if given.only != "solve":
        print(pair_table([str(p) for p in given.pair]), flush=True)
    if given.only != "pair":
        print("| units | cost | solver | seconds | ratio | memory | objective |\n|" + "---|" * 7)
        for size in map(int, given.sizes.split(",")):
            for kind in NOISE:
                for row in solver_rows(size, kind, given.solvers.split(",")):
                    print(row, flush=True)


def pair_table(pair: list[str]) -> str:
    """`auto` against `sweep` on two checkpoints."""
    found = {m: apart("pair", m, *pair) for m in ("sweep", "auto")}
    lines = ["| matcher | merge, s | ratio | peak, MiB |", "|---|---|---|---|"]
    for matcher, run in found.items():
        ratio = run["seconds"] / found["sweep"]["seconds"]
        lines.append(f"| {matcher} | {run['seconds']:.1f} | {ratio:.1f} | {run['peak']:.0f} |")
    return "\n".join(lines) + "\n"


def solver_rows(size: int, kind: str, solvers: list[str]) -> list[str]:
    """One line for each solver of one cost."""
    found = {s: apart("solve", s, str(size), kind) for s in solvers}
    return [
        f"| {size} | {kind} | {solver} | {run['seconds']:.3f} "
        f"| {run['seconds'] / found['otfuse']['seconds']:.1f} | {run['memory']:.0f} MiB "
        f"| {run['objective']:.6f} |"
        for solver, run in found.items()
    ]


def apart(*what: str) -> dict[str, float]:
    """A measurement in a process of its own."""
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, __file__, "--measure", *what]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return dict(json.loads(done.stdout))


def measure(what: str, *arguments: str) -> dict[str, float]:
    """What was asked for, here and now."""
    return {"pair": measure_pair, "solve": measure_solve}[what](*arguments)


def measure_pair(matcher: str, one: str, other: str) -> dict[str, float]:
    import otfuse_cli

    began = time.process_time()
    _, report = otfuse_cli.merge(one, other, matcher=matcher)
    return {
        "seconds": time.process_time() - began,
        "peak": report.peak_rss_bytes / 2**20,
    }


def measure_solve(solver: str, size: str, kind: str) -> dict[str, float]:
    import numpy as np
    import ot
    import torch
    from scipy.optimize import linear_sum_assignment

    from otfuse_cli.runtime import peak_rss_bytes
    from otfuse_cli.transport.cost import cost_matrix
    from otfuse_cli.transport.solve import solve

    cost_NN = structured_cost(int(size), NOISE[kind])
    n = len(cost_NN)
    solve(cost_matrix(torch.rand(8, 2), torch.rand(8, 2)))  # imports are not the solver's
    wide = None if solver == "otfuse" else cost_NN.double().numpy()
    mass = np.full(n, 1 / n)
    before = peak_rss_bytes()
    times: list[float] = []
    while sum(times) < 1 and len(times) < 5:  # the shortest of a few, where they are short
        began = time.process_time()
        if solver == "otfuse":
            objective = solve(cost_NN).ot_cost
        elif solver == "scipy":
            rows, columns = linear_sum_assignment(wide)
            objective = wide[rows, columns].mean()
        else:
            objective = float((ot.emd(mass, mass, wide, numItermax=10**9) * wide).sum())
        times.append(time.process_time() - began)
    return {
        "seconds": min(times),
        "memory": (peak_rss_bytes() - before) / 2**20,
        "objective": float(objective),
    }


def structured_cost(size: int, noise: float):
    """Euclidean cost, float32 (N, N), between features and the same, permuted and blurred."""
    import torch

    from otfuse_cli.transport.cost import cost_matrix

    generator = torch.Generator().manual_seed(size)
    spectrum_K = torch.arange(1, FEATURES + 1).float().rsqrt()
    features_NK = torch.randn(size, FEATURES, generator=generator) * spectrum_K
    order = torch.randperm(size, generator=generator)
    blur = noise * torch.randn(size, FEATURES, generator=generator) * spectrum_K
    return cost_matrix(features_NK, (features_NK + blur)[order])


if __name__ == "__main__":
    main()
