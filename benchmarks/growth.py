"""How `merge` grows with width, depth and the number of models.

    python benchmarks/growth.py [--only models] [--repeat 3] [--matcher sweep]

Plain chains of square layers with random weights; each merge is a process of its own on one thread.
Prints CPU seconds without the start of the program (a merge of two tiny networks), and the peak of
the process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import processes

OTFUSE = "import sys; from otfuse_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"
ROWS = [
    *(("width", width, 4, 2) for width in (256, 512, 1024, 2048)),
    *(("depth", 512, depth, 2) for depth in (4, 8, 16, 32)),
    *(("models", 512, 8, models) for models in (2, 4, 8, 16)),
]


def merge(folder: Path, width: int, depth: int, models: int, matcher: str) -> tuple[float, float]:
    """CPU seconds and peak memory in MiB of one merge."""
    paths = [str(folder / f"{width}-{depth}-{at}.safetensors") for at in range(models)]
    for seed, path in enumerate(paths):
        if not Path(path).exists():
            made = [sys.executable, __file__, path, str(width), str(depth), str(seed)]
            subprocess.run(made, check=True)
    out = str(folder / "out.safetensors")
    options = ["--arch", "mlp", "--matcher", matcher, "--overwrite", "-q"]
    command = [sys.executable, "-c", OTFUSE, "merge", *paths, "-o", out, *options]
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    taken = processes.run(command, environment)
    return taken.cpu, taken.peak


def write(path: str, width: int, depth: int, seed: int) -> None:
    """A chain of linear layers: 64 inputs, `depth` hidden layers, 10 outputs."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    sizes = [64, *[width] * depth, 10]
    save_file(
        {
            f"fc{at}.weight": torch.randn(n, k, generator=generator) / k**0.5
            for at, (k, n) in enumerate(pairwise(sizes), 1)
        },
        path,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = ("width", "depth", "models")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--repeat", type=int, default=3, help="runs; the least counts (default 3)")
    parser.add_argument("--matcher", default="sweep", help="of merge (default sweep)")
    given = parser.parse_args()
    print("| grows | width | depth | models | CPU s | peak, MiB |\n|" + "---|" * 6)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = min(merge(folder, 8, 2, 2, given.matcher)[0] for _ in range(given.repeat))
        for what, *sizes in ROWS:
            if what not in given.only:
                continue
            found = [merge(folder, *sizes, given.matcher) for _ in range(given.repeat)]
            seconds, peak = min(f[0] for f in found) - start, min(f[1] for f in found)
            cells = [what, *map(str, sizes), f"{seconds:.2f}", f"{peak:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].endswith(".safetensors"):
        write(sys.argv[1], *map(int, sys.argv[2:]))
    else:
        main()
