"""Networks of different depth, fused: MNIST MLPs, and the CIFAR-10 pairs with shallower relatives.

    python examples/depth.py mnist [--seeds 0,1,2]
    python examples/depth.py cifar SOURCE:FACTORY ANCHOR:FACTORY [--num-samples 1000] [--seeds 0]

MNIST: 784-400-100, 784-400-200-100 and 784-400-300-200-100 in all pairs and all three, the last one
the anchor; `alone` gives the whole weight to the sources, so that the anchor only lends its shape.
CIFAR-10: FACTORY is one of networks.py. Test accuracy in percent on all test images, mean and
deviation over draws of the inputs, which come from the training split, without labels.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import evaluate
import mnist
import networks
import numpy as np
import torch
from torch import Tensor, nn

import otfuse_cli

SHAPES = ((400, 100), (400, 200, 100), (400, 300, 200, 100))
Images = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(required=True, dest="kind")
    for kind in ("mnist", "cifar"):
        options = kinds.add_parser(kind)
        options.add_argument("--seeds", default="0", help="of the draws (%(default)s)")
        if kind == "cifar":
            options.add_argument("checkpoints", nargs=2, metavar="FILE:FACTORY")
            options.add_argument("--num-samples", type=int, default=1000, help="(%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    seeds = [int(seed) for seed in given.seeds.split(",")]
    if given.kind == "mnist":
        measure_mlps(seeds)
    else:
        measure_cifar(given.checkpoints, given.num_samples, seeds)


def measure_mlps(seeds: Sequence[int]) -> None:
    """A row for each pair and for all three with each of them as the anchor."""
    cache, data = Path.home() / ".cache" / "otfuse-examples", evaluate.SHARED / "data" / "mnist.npz"
    test, train = mnist.load(data, "test"), mnist.load(data, "train")
    nets = []
    for seed, hidden in enumerate(SHAPES):
        student = mnist.Student(seed, seed)
        nets += mnist.students(mnist.Recipe(hidden), [student], data, cache)
    names = ["-".join(map(str, hidden)) for hidden in SHAPES]
    real = {"samples": {"x": train.images}, "num_samples": 2000}
    made = {"synthetic": True, "input_shape": (1, 28, 28)}
    print("| sources, anchor | parents | ensemble | 2,000 inputs | synthetic | alone |")
    print("|---" * 6 + "|")
    orders = [*itertools.permutations(range(3), 2), (1, 2, 0), (0, 2, 1), (0, 1, 2)]
    for order in orders:
        states = [nets[at] for at in order]
        weights = (1 / len(order),) * len(order)
        alone = (*(1 / (len(order) - 1),) * (len(order) - 1), 0.0)
        cells = [", ".join(names[at] for at in order)]
        cells.append(", ".join(f"{mnist.accuracy(s, test):.2f}" for s in states))
        cells.append(f"{mnist.ensemble(states, test, weights):.2f}")
        for how in ({**real}, {**made}, {**real, "weights": alone}):
            try:
                found = [mnist.accuracy(fused(states, seed, **how), test) for seed in seeds]
            except otfuse_cli.errors.IncompatibleModels:
                found = []
            cells.append(mean(found))
        print(f"| {' | '.join(cells)} |", flush=True)


def fused(states: Sequence[Any], seed: int, **how: Any) -> Any:
    """The tensors of a joint fusion."""
    return otfuse_cli.merge(*states, blend="joint", arch="mlp", seed=seed, **how)[0]


def mean(found: Iterable[float]) -> str:
    """Mean and deviation; a dash for nothing."""
    values = list(found)
    return f"{np.mean(values):.2f} ± {np.std(values):.2f}" if values else "-"


def measure_cifar(checkpoints: Sequence[str], count: int, seeds: Sequence[int]) -> None:
    """A row: the source into the anchor, at equal weights and alone."""
    paths, factories = zip(*(named.rsplit(":", 1) for named in checkpoints), strict=True)
    arch = {at: getattr(networks, factory) for at, factory in enumerate(factories)}
    test, (images, _) = evaluate.cifar("test"), evaluate.cifar("train")
    states = [evaluate.load(path) for path in paths]
    parents = [logits(arch[at], state, test[0]) for at, state in enumerate(states)]
    print("| source, anchor | parents | ensemble |", " | ".join(("joint", "alone")), "|")
    print("|---" * 5 + "|")
    cells = [", ".join(Path(path).stem for path in paths)]
    cells.append(", ".join(f"{right(said, test):.2f}" for said in parents))
    cells.append(f"{right(parents[0].softmax(1) + parents[1].softmax(1), test):.2f}")
    for weights in ((0.5, 0.5), (1.0, 0.0)):
        found = []
        for seed in seeds:
            how = {"samples": {"x": images}, "num_samples": count, "blend": "joint"}
            try:
                state, _ = otfuse_cli.merge(*states, arch=arch, weights=weights, seed=seed, **how)
            except otfuse_cli.errors.IncompatibleModels as error:
                print(error)
                continue
            found.append(right(logits(arch[1], state, test[0]), test))
        cells.append(mean(found))
    print(f"| {' | '.join(cells)} |", flush=True)


def logits(factory: Any, state: Any, images: Tensor) -> Tensor:
    """What a network says of images."""
    net: nn.Module = factory()[0].eval()
    net.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    with torch.inference_mode():
        return torch.cat([net(part) for part in images.split(50)])


def right(said: Tensor, test: Images) -> float:
    """Percent of the images that are told right."""
    return 100 * float((said.argmax(1) == test[1]).double().mean())


if __name__ == "__main__":
    main()
