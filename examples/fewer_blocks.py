"""Residual blocks taken out of a CIFAR-10 network, with and without fits to what it computed.

    python examples/fewer_blocks.py FILE:FACTORY [--depths 1,2] [--num-samples 1000] [--seed 0]

FACTORY is one of networks.py. Test accuracy in percent on all test images; the inputs come from the
training split, without labels. `dropped`: the same blocks are gone, the others are as they were.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import evaluate
import networks
import torch
from torch import Tensor, nn

import otfuse_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", metavar="FILE:FACTORY")
    parser.add_argument("--depths", default="1,2", help="blocks that go (%(default)s)")
    parser.add_argument("--num-samples", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    path, _, name = given.checkpoint.rpartition(":")
    factory, state = getattr(networks, name), evaluate.load(path)
    images, test = evaluate.cifar("train")[0], evaluate.cifar("test")
    whole = factory()[0]
    whole.load_state_dict(state)
    print("| gone | dropped | `--depth` |\n|---|---|---|")
    print(f"| none | {right(whole, test):.2f} | |", flush=True)
    for depth in map(int, given.depths.split(",")):
        options: dict[str, Any] = {"samples": images, "num_samples": given.num_samples}
        fitted, report = otfuse_cli.prune(
            state, depth=depth, arch=factory, seed=given.seed, **options
        )
        gone = [block.name for block in report.pruning.blocks]
        whole = factory()[0]
        whole.load_state_dict(state)
        small = without(whole, gone)
        cells = [", ".join(gone), f"{right(small, test):.2f}"]
        small.load_state_dict(fitted)
        print(f"| {' | '.join([*cells, f'{right(small, test):.2f}'])} |", flush=True)


def without(net: nn.Module, gone: Sequence[str]) -> nn.Module:
    """The network with some modules taken out of the lists that hold them; the others close up."""
    for name in sorted(gone, key=lambda name: int(name.rpartition(".")[2]), reverse=True):
        path, _, number = name.rpartition(".")
        modules = net.get_submodule(path)
        assert isinstance(modules, nn.Sequential | nn.ModuleList)
        del modules[int(number)]
    return net


def right(net: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """Percent of the images that are told right."""
    images, classes = test
    hits = 0
    with torch.inference_mode():
        for at in torch.arange(len(images)).split(200):
            said = net.eval()(images[at])
            hits += int((getattr(said, "logits", said).argmax(1) == classes[at]).sum())
    return 100 * hits / len(images)


if __name__ == "__main__":
    main()
