"""Two CIFAR-10 ViTs fused: streams permuted, turned, and reduced jointly; what inputs are worth.

    python examples/streams.py A B [--numbers 200,1000] [--seeds 0,1,2] [--only joint]

Test accuracy in percent on the full test set, mean and standard deviation over the seeds of the
inputs. B is the anchor. Inputs are drawn by seed from the training split, without labels. The data
come from OTFUSE_SHARED (see evaluate.py); needs transformers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import evaluate
import torch

import otfuse_cli

ARCH = f"{Path(__file__).with_name('networks.py')}:vit"


def rows(numbers: Sequence[int]) -> Iterator[tuple[str, dict[str, Any], int | None]]:
    """What is compared: a name, options of `merge`, and how many inputs."""
    turned = {"arch": ARCH, "residual": "orthogonal"}
    yield "plain", {"align": "none"}, None
    yield "permuted", {}, None
    yield "turned", turned, None
    for number in numbers:
        yield f"turned, refit, {number:,}", turned, number
        # Nothing has to be aligned for the union: the cheapest matching will do.
        yield f"joint, {number:,}", {"arch": ARCH, "blend": "joint", "matcher": "sweep"}, number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoints", nargs=2, metavar="CKPT")
    parser.add_argument("--numbers", default="200,1000", help="of real inputs (%(default)s)")
    parser.add_argument("--seeds", default="0", help="of the inputs (%(default)s)")
    parser.add_argument("--only", default="", help="rows whose names hold this")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    numbers, seeds = ([int(n) for n in text.split(",")] for text in (given.numbers, given.seeds))
    images = evaluate.cifar("train")[0]
    print("| fused | test accuracy | seconds |\n|---|---|---|", flush=True)
    for name, options, number in rows(numbers):
        if given.only not in name:
            continue
        found, start = [], time.perf_counter()
        for seed in seeds if number is not None else seeds[:1]:
            inputs = {} if number is None else {"samples": {"x": images}, "num_samples": number}
            fused, _ = otfuse_cli.merge(*given.checkpoints, seed=seed, **options, **inputs)
            found.append(fused)
        seconds = (time.perf_counter() - start) / len(found)
        scores = [evaluate.accuracy({n: t.float() for n, t in f.items()}) for f in found]
        spread = f" ± {pstdev(scores):.2f}" if len(scores) > 1 else ""
        print(f"| {name} | {mean(scores):.2f}{spread} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
