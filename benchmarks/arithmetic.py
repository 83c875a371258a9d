"""How near a merge comes to the limit of its arithmetic: its products over what the core could do.

    python benchmarks/arithmetic.py [--repeat 3]

Counts the operations of every matrix product and convolution that torch is asked for (two for each
multiplication and addition; solvers of assignments, sorting and copies count as none), and divides
by CPU seconds of the same command and by what products of 1024 x 1024 in float32 reach beside it:
on one thread, in turns, medians. VGG11 at half width with `descent` and `auto`; the ResNet with a
refit on 1,000 inputs. Needs OTFUSE_SHARED.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from peers import EXAMPLES, PAIR
from torch.utils.flop_counter import FlopCounterMode

from otfuse_cli.cli.app import main as otfuse

_SIZE, _PRODUCTS = 1024, 20
RESNETS = [path.replace("vgg11half", "resnet18w16") for path in PAIR]
WAYS: dict[str, list[str]] = {
    "VGG descent": [*PAIR, "--matcher", "descent"],
    "VGG auto": [*PAIR, "--matcher", "auto"],
    "ResNet refit": [
        *RESNETS, "--arch", f"{EXAMPLES / 'networks.py'}:resnet18w16", "--blend", "average",
        "--samples", f"{EXAMPLES / 'evaluate.py'}:cifar_train", "--num-samples", "1000",
    ],
}  # fmt: skip


def merge(options: list[str], folder: str) -> float:
    """CPU seconds of a command line in this process."""
    out = str(Path(folder) / "fused.safetensors")
    began = time.process_time()
    if otfuse(["merge", *options, "-o", out, "--overwrite", "--quiet"]):
        raise SystemExit(f"otfuse merge {' '.join(options)} failed")
    return time.process_time() - began


def counted(options: list[str], folder: str) -> int:
    """Operations of the products that a command line asks for."""
    with FlopCounterMode(display=False) as counter:
        merge(options, folder)
    return counter.get_total_flops()


def reached() -> float:
    """Operations in a second of large products."""
    one, two = torch.randn(2, _SIZE, _SIZE)
    began = time.process_time()
    for _ in range(_PRODUCTS):
        torch.mm(one, two)
    return 2.0 * _SIZE**3 * _PRODUCTS / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3, help="runs (default 3)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    reached()
    print("| merge | products, GFLOP | CPU s | large products, GFLOP/s | of the limit |")
    print("|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, options in WAYS.items():
            flop = counted(options, folder)  # and everything is imported
            rounds = [(reached(), merge(options, folder)) for _ in range(given.repeat)]
            speed, seconds = (median(column) for column in zip(*rounds, strict=True))
            share = median(flop / (s * t) for s, t in rounds)
            print(
                f"| {name} | {flop / 1e9:.0f} | {seconds:.1f} | {speed / 1e9:.0f} | {share:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
