"""One fit of the refit: how long it takes to count rows and to solve, and the memory it needs.

    python benchmarks/refit.py [--inputs 4608] [--outputs 512] [--rows 6000]

The defaults are a 3 x 3 convolution of 512 channels into 512. Seconds of CPU time on one core;
memory beyond what the process had before, which a fit of many rows does not exceed.
"""

from __future__ import annotations

import argparse
import time

import torch

from otfuse_cli.fusion.ridge import Ridge
from otfuse_cli.runtime import peak_rss_bytes

_BATCH = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=4608)
    parser.add_argument("--outputs", type=int, default=512)
    parser.add_argument("--rows", type=int, default=6000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    d, o = given.inputs, given.outputs
    prior, truth = (torch.randn(1, o, d, generator=generator) / d**0.5 for _ in range(2))
    before = peak_rss_bytes()
    sums = Ridge(prior, torch.zeros(1, o), rows=given.rows)
    counted = 0.0
    for start in range(0, given.rows, _BATCH):
        rows = torch.randn(1, min(_BATCH, given.rows - start), d, generator=generator)
        target = rows @ truth.transpose(1, 2)
        began = time.process_time()
        sums.add(rows, target)
        counted += time.process_time() - began
    began = time.process_time()
    found = sums.solve(0.1, where="the layer")
    solved = time.process_time() - began
    assert found is not None
    form = "dual" if sums.dual else "primal"
    print(
        f"{o} x {d}, {given.rows} rows ({form}): residual {found.before:.2f} -> {found.after:.2f}"
    )
    print(f"rows {1000 * counted / given.rows:.2f} s per 1,000, solve {solved:.1f} s")
    print(f"memory {(peak_rss_bytes() - before) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
