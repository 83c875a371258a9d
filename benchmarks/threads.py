"""What threads cost that spin while they wait: a merge with torch's threads as they come, and ours.

    python benchmarks/threads.py [--busy N]

The shared VGG pair (OTFUSE_SHARED), default threads, in turns; `--busy N` runs N processes beside
it that want a core each, as other jobs of a CI machine do. Wall and CPU seconds, medians of three.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import processes

SHARED = Path(os.environ.get("OTFUSE_SHARED", Path(__file__).parents[2] / "shared"))
OTFUSE = "import sys; from otfuse_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"
# Once torch is loaded, its threads wait as they do by default.
SPINNING = f"import torch; {OTFUSE}"


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process with the default number of threads."""
    unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    taken = processes.run([sys.executable, "-c", *command], environment)
    return taken.wall, taken.cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--busy", type=int, default=0, help="processes beside it")
    busy = parser.parse_args().busy
    pair = [str(SHARED / "checkpoints" / f"cifar10-vgg11half-{at}.safetensors") for at in (0, 1)]
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    found: dict[str, list[tuple[float, float]]] = {SPINNING: [], OTFUSE: []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = ["-o", f"{folder}/out.safetensors", "--overwrite", "-q"]
            for _ in range(3):
                for program, times in found.items():
                    times.append(seconds([program, "merge", *pair, *out]))
    finally:
        for process in beside:
            process.kill()
    print(f"{busy} processes beside it\n\n| threads that wait | wall s | CPU s |\n|---|--:|--:|")
    for name, times in zip(("spin", "sleep"), found.values(), strict=True):
        wall, cpu = (median(column) for column in zip(*times, strict=True))
        print(f"| {name} | {wall:.1f} | {cpu:.1f} |")


if __name__ == "__main__":
    main()
