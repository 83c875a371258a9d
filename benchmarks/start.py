"""What `merge --paper` on the MNIST pair costs beyond importing torch, in CPU seconds.

    python benchmarks/start.py

The shared pair (OTFUSE_SHARED); processes in turns, medians. Modules are compiled once before, as
pip does when it installs them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import processes

SHARED = Path(os.environ.get("OTFUSE_SHARED", Path(__file__).parents[2] / "shared"))
OTFUSE = "import sys; from otfuse_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"


def cpu(command: list[str], compiled: str) -> float:
    """CPU seconds of a process that finds and leaves compiled modules in a folder."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    return processes.run(command, environment).cpu


def seconds_of_both(rounds: int) -> dict[str, list[float]]:
    """CPU seconds of importing torch and of a merge that does it, in turns."""
    pair = [str(SHARED / "checkpoints" / f"mnist-mlpnet-{at}.checkpoint") for at in (0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        out = ["-o", f"{folder}/out.pt", "--overwrite", "-q"]
        commands = {
            "import torch": ["-c", "import torch"],
            "merge --paper": ["-c", OTFUSE, "merge", *pair, *out, "--paper"],
        }
        found: dict[str, list[float]] = {name: [] for name in commands}
        for at in range(rounds + 1):
            for name, command in commands.items():
                seconds = cpu([sys.executable, *command], f"{folder}/compiled")
                if at:  # the first round compiles
                    found[name].append(seconds)
    return found


def difference(found: dict[str, list[float]]) -> float:
    """What the merge takes beyond the import, the median of its rounds."""
    return median(merge - torch for torch, merge in zip(*found.values(), strict=True))


def main() -> None:
    found = seconds_of_both(7)
    print("| process | CPU s |\n|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {median(seconds):.2f} |")
    print(f"| difference | **{difference(found):.2f}** |")


if __name__ == "__main__":
    main()
