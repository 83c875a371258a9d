"""Tables 1 and S5 and figure S2: networks of images, one-shot, several at once, and trained on.

The VGG and the ResNet with BatchNorm are pairs that lie in OTFUSE_SHARED; ResNets without
BatchNorm, which is what the paper has, VGGs of other widths and shallower ones are trained here
(--full): for a few epochs, by SGD with momentum and one cosine, not for the paper's 300.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import depth
import evaluate
import networks
import torch
import train_cifar
from filelock import FileLock
from jobs import Job, Values
from laboratory import COUNTS, OF_FOUR, OF_MANY, WAYS, Laboratory, Way, more_inputs
from safetensors.torch import load_file, save_file

import otfuse_cli

Networks = Sequence[Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Kind:
    """An architecture: a factory of networks.py, and where trained ones are.

    Attributes:
        factory: Its name there.
        pair: Stem of checkpoints in OTFUSE_SHARED; empty: they are trained here.
        paper: The paper's A, B, ensemble, plain average and OT average.
        epochs: For which they are trained here.
    """

    factory: str
    pair: str = ""
    paper: tuple[float, ...] = ()
    epochs: int = 0


VGG = Kind("vgg11half", "cifar10-vgg11half", (90.31, 90.50, 91.34, 17.02, 85.98))
RESNET = Kind("resnet18w16", "cifar10-resnet18w16")
PLAIN = Kind("resnet18w16plain", "", (93.11, 93.20, 93.89, 18.49, 77.00), epochs=8)
SHALLOW = Kind("vgg9half", epochs=4)
TITLES = {
    "VGG11, half width": VGG,
    "ResNet18, width 16, BatchNorm": RESNET,
    "ResNet18, width 16, no BatchNorm": PLAIN,
}
# One difference from the paper's networks at a time.
APART = {
    "ResNet18, width 8, 3 epochs": Kind("resnet18w8plain", epochs=3),
    "ResNet18, width 16, 3 epochs": Kind("resnet18w16plain", epochs=3),
    "ResNet18, width 32, 3 epochs": Kind("resnet18w32plain", epochs=3),
    "VGG11, quarter width, 2 epochs": Kind("vgg11quarter", epochs=2),
    "VGG11, half width, 2 epochs": Kind("vgg11half", epochs=2),
}
COLUMNS = ("A", "B", "ensemble", "plain", "--paper, activations")
# How the pair is trained on; the paper: 120 epochs.
TRAIN_ON_RATE, TRAIN_ON_EPOCHS = 0.01, 2
# Of an epoch of 50,000 images at width 16, roughly.
EPOCH_SECONDS = 75
# A fit of 512 units on 200 images is none: these have more.
MORE_INPUTS = 1000


def jobs(lab: Laboratory) -> Iterator[Job]:
    """All of them; what needs networks that are trained for hours of a core with --full alone."""
    cifar = Cifar(lab)
    seeds = list(range(1 if lab.quick else 3))
    ways = more_inputs(WAYS, MORE_INPUTS)
    for title, kind in TITLES.items():
        if lab.quick and not kind.pair:
            continue
        about = {"kind": vars(kind), "seeds": seeds}
        yield Job(
            "Table 1",
            title,
            {**about, "ways": ways},
            lambda kind=kind: cifar.one_shot(cifar.networks(kind, 2), kind, ways, seeds),
            dict(zip(COLUMNS, kind.paper, strict=False)),
            seconds=250 * len(seeds),
        )
        if kind is not VGG:
            yield Job(
                "Fig. S2",
                title,
                about,
                lambda kind=kind: cifar.costs(kind, seeds),
                seconds=20 * len(seeds),
            )
    if not lab.quick:
        yield from _trained_here(cifar, seeds)


def _trained_here(cifar: Cifar, seeds: list[int]) -> Iterator[Job]:
    """What takes networks that are trained first, or trains them on."""
    ways, of_many, of_four = (more_inputs(w, MORE_INPUTS) for w in (WAYS, OF_MANY, OF_FOUR))
    few = {name: ways[name] for name in ("plain", "--paper", "--paper, activations", "default")}
    for title, kind in APART.items():
        yield Job(
            "Table 1 apart",
            title,
            {"kind": vars(kind), "seeds": seeds, "ways": few},
            lambda kind=kind: cifar.one_shot(cifar.networks(kind, 2), kind, few, seeds),
            seconds=2 * EPOCH_SECONDS * kind.epochs,
        )
    for count in COUNTS:
        yield Job(
            "N models",
            f"{count} VGG9, half width",
            {"kind": vars(SHALLOW), "count": count, "ways": of_many},
            lambda count=count: cifar.one_shot(
                cifar.networks(SHALLOW, count), SHALLOW, of_many, [0]
            ),
            seconds=EPOCH_SECONDS * SHALLOW.epochs * 2 + 60 * count,
        )
    for title, kind, count, starts in (
        ("ResNet18, width 16, BatchNorm", RESNET, 2, ways),
        ("four VGG9, half width", SHALLOW, 4, of_four),
    ):
        yield Job(
            "Table 1 trained on",
            title,
            {"rate": TRAIN_ON_RATE, "epochs": TRAIN_ON_EPOCHS, "kind": vars(kind), "ways": starts},
            lambda kind=kind, count=count, starts=starts: cifar.trained_on(
                cifar.networks(kind, count), kind, starts
            ),
            seconds=EPOCH_SECONDS * TRAIN_ON_EPOCHS * (2 + len(starts)),
        )


class Cifar:
    """CIFAR-10, and networks of it."""

    def __init__(self, lab: Laboratory) -> None:
        self.lab = lab

    @cached_property
    def test(self) -> depth.Images:
        """Test images and labels."""
        return evaluate.cifar("test")

    @cached_property
    def images(self) -> torch.Tensor:
        """Training images."""
        return evaluate.cifar("train")[0]

    def networks(self, kind: Kind, count: int) -> Networks:
        """From OTFUSE_SHARED, or trained and kept."""
        if kind.pair:
            stem = evaluate.SHARED / "checkpoints" / kind.pair
            return [evaluate.load(f"{stem}-{at}.safetensors") for at in range(count)]
        folder = self.lab.given.cache
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for at in range(count):
            path = folder / f"{kind.factory}-epochs{kind.epochs}-bfloat16-{at}.safetensors"
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():
                    state = train_cifar.trained(kind.factory, kind.epochs, at, bfloat16=True)
                    save_file(state, path, metadata={"format": "pt"})
            found.append(load_file(path))
        return found

    def logits(self, kind: Kind, network: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What it says of the test images."""
        return depth.logits(getattr(networks, kind.factory), network, self.test[0])

    def score(self, kind: Kind, network: Mapping[str, torch.Tensor]) -> float:
        """Percent of the test images."""
        return depth.right(self.logits(kind, network), self.test)

    def options(self, kind: Kind, way: Way) -> dict[str, Any]:
        """Of `otfuse_cli.merge`."""
        options = dict(way)
        number = options.pop("inputs", None)
        if number is not None:
            factory = f"{networks.__file__}:{kind.factory}"
            options |= {"arch": factory, "samples": {"x": self.images}, "num_samples": number}
        return options

    def fused(self, nets: Networks, kind: Kind, way: Way, seed: int) -> Any:
        """In one way."""
        return otfuse_cli.merge(*nets, seed=seed, **self.options(kind, way))[0]

    def one_shot(
        self, nets: Networks, kind: Kind, ways: Mapping[str, Way], seeds: list[int]
    ) -> Values:
        """Parents, ensemble, and every way; those with inputs over seeds."""
        said = [self.logits(kind, network) for network in nets]
        own = [depth.right(logits, self.test) for logits in said]
        together = depth.right(torch.stack(said).mean(0), self.test)
        found: dict[str, list[float]] = {"A": own[:1], "B": own[1:2], "ensemble": [together]}
        if len(nets) > 2:
            found = {"parents": own, "ensemble": [together]}
        for name, way in ways.items():
            drawn = seeds if "inputs" in way else [0]
            found[name] = [self.score(kind, self.fused(nets, kind, way, seed)) for seed in drawn]
        return found

    def costs(self, kind: Kind, seeds: list[int]) -> Values:
        """OT cost of each layer, on the activations of 200 images."""
        found: dict[str, list[float]] = {}
        for seed in seeds:
            options = self.options(kind, WAYS["--paper, activations"])
            _, report = otfuse_cli.merge(*self.networks(kind, 2), seed=seed, **options)
            for layer in report.layers:
                if layer.ot_cost is not None and layer.diagonal_mass is None:
                    found.setdefault(layer.name.removesuffix(".weight"), []).append(layer.ot_cost)
        return found

    def trained_on(self, nets: Networks, kind: Kind, ways: Mapping[str, Way]) -> Values:
        """The first two parents and the fusions of all before and after, one seed."""
        starts = dict(zip("AB", nets, strict=False))
        starts |= {name: self.fused(nets, kind, way, 0) for name, way in ways.items()}
        found: dict[str, list[float]] = {}
        for name, network in starts.items():
            found[f"{name}, start"] = [self.score(kind, network)]
            module = getattr(networks, kind.factory)()[0]
            module.load_state_dict({n: t.float() for n, t in network.items()})
            train_cifar.train(module, TRAIN_ON_RATE, TRAIN_ON_EPOCHS, seed=0, bfloat16=True)
            found[f"{name}, last"] = [self.score(kind, module.state_dict())]
        return found
