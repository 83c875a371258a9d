"""What inputs are worth: pairs of checkpoints fused without any, on synthetic and on real ones.

    python examples/with_inputs.py A B [A B ...] [--numbers 200,2000] [--seeds 0,1,2,3,4]
    python examples/with_inputs.py 40-20-10@0 40-20-10@1

A and B are checkpoints, or MNIST MLPs by hidden widths and seed, which are trained (mnist.py) and
kept in a cache.

Test accuracy in percent on the full test set, mean and standard deviation over the seeds. Networks
are told from the tensor names: MNIST MLPs of any width, without user code; the CIFAR-10 VGG11 and
ResNet18. B is the anchor. Real inputs are drawn by seed from the training split, without labels;
synthetic ones are made by seed. The data come from OTFUSE_SHARED (see evaluate.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import evaluate
import mnist
import torch
import widths

import otfuse_cli

NETWORKS = Path(__file__).with_name("networks.py")


@dataclass(frozen=True)
class Kind:
    """A kind of network: how it is run, what its synthetic inputs are, its data."""

    arch: str
    synthetic: dict[str, Any]
    inputs: torch.Tensor
    test: tuple[torch.Tensor, torch.Tensor]

    def accuracy(self, tensors: evaluate.StateDict) -> float:
        """Percent of the test set."""
        return evaluate.accuracy_on({n: t.float() for n, t in tensors.items()}, *self.test)


def kind_of(tensors: evaluate.StateDict) -> Kind:
    """Told from the names."""
    if "fc1.weight" in tensors:
        image = {"input_shape": (1, 28, 28)}
        return Kind("mlp", image, evaluate.mnist("train")[0], evaluate.mnist())
    name = "vgg11half" if "features.18.weight" in tensors else "resnet18w16"
    return Kind(f"{NETWORKS}:{name}", {}, evaluate.cifar("train")[0], evaluate.cifar())


def read(name: str) -> dict[str, torch.Tensor]:
    """A checkpoint, or a network that is named by its hidden widths and seed."""
    hidden, at, seed = name.partition("@")
    if not at or Path(name).exists():
        return evaluate.load(name)
    recipe = widths.recipe(tuple(int(n) for n in hidden.split("-")))
    student = mnist.Student(int(seed), int(seed))
    usual = mnist.options(None).parse_args([])
    return mnist.students(recipe, [student], usual.data, usual.cache)[0]


def columns(kind: Kind, numbers: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compared: a name, and options of `merge`."""
    yield "`--paper`", {"paper": True}
    yield "data-free", {}
    yield "synthetic", {"arch": kind.arch, "synthetic": True, **kind.synthetic}
    for number in numbers:
        options = {"arch": kind.arch, "samples": {"x": kind.inputs}, "num_samples": number}
        yield f"{number:,} real", options


def row(
    names: Sequence[str], numbers: Sequence[int], seeds: Sequence[int], more: dict[str, str]
) -> dict[str, str]:
    """A line of the table, by column."""
    parents = [read(name) for name in names]
    kind = kind_of(parents[1])
    cells = {
        "source, anchor": ", ".join(Path(name).name for name in names),
        "parents": ", ".join(f"{kind.accuracy(p):.2f}" for p in parents),
    }
    for column, options in columns(kind, numbers):
        # The published method has its own matcher; without inputs there is nothing to blend.
        own = {} if options.get("paper") else dict(more)
        if "arch" not in options:
            own.pop("blend", None)
        found = [
            kind.accuracy(otfuse_cli.merge(*parents, seed=seed, **options, **own)[0])
            for seed in seeds
        ]
        cells[column] = f"{mean(found):.2f} ± {pstdev(found):.2f}"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="or 40-20-10@SEED")
    parser.add_argument("--numbers", default="200,2000", help="of real inputs (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="of the inputs (%(default)s)")
    parser.add_argument("--matcher", default="auto", help="as of otfuse merge (%(default)s)")
    parser.add_argument("--blend", default="auto", help="as of otfuse merge (%(default)s)")
    given = parser.parse_args()
    if len(given.checkpoints) % 2:
        parser.error("checkpoints come in pairs")
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    numbers, seeds = ([int(n) for n in text.split(",")] for text in (given.numbers, given.seeds))
    pairs = list(zip(given.checkpoints[::2], given.checkpoints[1::2], strict=True))
    for at, pair in enumerate(pairs):
        cells = row(pair, numbers, seeds, {"matcher": given.matcher, "blend": given.blend})
        if not at:
            print(f"| {' | '.join(cells)} |\n" + "|---" * len(cells) + "|")
        print(f"| {' | '.join(cells.values())} |", flush=True)


if __name__ == "__main__":
    main()
