"""Figures 3 and S7: a VGG11 pruned, and the dense network fused into what is left.

cifar10-vgg11half-0: each convolution by itself and all of them, by norm and at random; on test
images drawn once: the pruned network, prune-fuse without data, and prune-fuse with 400 training
images without labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import evaluate
import torch
import torch.nn.functional as F
from jobs import Job, Values
from laboratory import Laboratory

import otfuse_cli

ITEM = "Fig. 3, S7"
DENSE = evaluate.SHARED / "checkpoints" / "cifar10-vgg11half-0.safetensors"
FACTORY = "examples/networks.py:vgg11half"
CONVOLUTIONS = tuple(f"features.{at}" for at in (0, 3, 6, 8, 11, 13, 16, 18))
POOLED = frozenset(CONVOLUTIONS[at] for at in (0, 1, 3, 5, 7))
AMOUNTS, QUICK_AMOUNTS = (0.2, 0.4, 0.6, 0.8, 0.9), (0.4, 0.8)
QUICK_LAYERS = ("all", CONVOLUTIONS[0], CONVOLUTIONS[4], CONVOLUTIONS[7])
CRITERIA = ("l1", "l2", "random")
IMAGES, INPUTS = 2000, 400
# What becomes of a pruned network: column to whether inputs are there.
FUSIONS = {"fused": False, "refit": True}


def jobs(lab: Laboratory) -> Iterator[Job]:
    """One for each layer and criterion."""
    bench = Bench()
    amounts = QUICK_AMOUNTS if lab.quick else AMOUNTS
    for layer in QUICK_LAYERS if lab.quick else ("all", *CONVOLUTIONS):
        # At random only all layers at once.
        for criterion in CRITERIA[: 1 if lab.quick else 3 if layer == "all" else 2]:
            seeds = list(range(3 if criterion == "random" else 1))
            yield Job(
                ITEM,
                f"{layer}, {criterion}",
                {"layer": layer, "criterion": criterion, "seeds": seeds, "amounts": amounts,
                 "images": IMAGES, "inputs": INPUTS},
                lambda layer=layer, criterion=criterion, seeds=seeds: bench.measure(
                    layer, criterion, seeds, amounts
                ),
                seconds=30 * len(seeds) * len(amounts),
            )  # fmt: skip


class Bench:
    """The VGG11 on fixed images; stages in front of the first changed weight are run once."""

    @cached_property
    def dense(self) -> dict[str, torch.Tensor]:
        """The network as it was trained."""
        return evaluate.load(DENSE)

    @cached_property
    def labels(self) -> torch.Tensor:
        """Of the test images."""
        return self._test[1]

    @cached_property
    def samples(self) -> torch.Tensor:
        """Training images."""
        images, _ = evaluate.cifar("train")
        return images[evaluate.draw(torch.zeros(len(images)), INPUTS, seed=1)]

    @cached_property
    def _test(self) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = evaluate.cifar()
        chosen = evaluate.draw(labels, IMAGES)
        return images[chosen], labels[chosen]

    @cached_property
    def _stages(self) -> list[torch.Tensor]:
        """What each convolution of the dense network is given, and what the last one gives."""
        values = [self._test[0]]
        for name in CONVOLUTIONS:
            values.append(_stage(name, self.dense, values[-1]))
        return values

    @torch.inference_mode()
    def accuracy(self, network: Mapping[str, torch.Tensor]) -> float:
        """Percent of the test images."""
        weights = {name: tensor.float() for name, tensor in network.items()}
        first = 0
        while first < len(CONVOLUTIONS) and torch.equal(
            weights[f"{CONVOLUTIONS[first]}.weight"], self.dense[f"{CONVOLUTIONS[first]}.weight"]
        ):
            first += 1
        values = self._stages[first]
        for name in CONVOLUTIONS[first:]:
            values = _stage(name, weights, values)
        logits = F.linear(values.flatten(1), weights["classifier.weight"])
        return 100.0 * float((logits.argmax(1) == self.labels).double().mean())

    def measure(
        self, layer: str, criterion: str, seeds: Sequence[int], amounts: Sequence[float]
    ) -> Values:
        """Dense, and `pruned @amount`, `fused @amount`, `refit @amount`."""
        found: dict[str, list[float]] = {"dense": [self.accuracy(self.dense)]}
        for amount in amounts:
            share = {"amount": amount} if layer == "all" else {"layer": {layer: amount}}
            for seed in seeds:
                pruned, _ = otfuse_cli.prune(DENSE, criterion=criterion, seed=seed, **share)
                found.setdefault(f"pruned @{amount}", []).append(self.accuracy(pruned))
                for name, inputs in FUSIONS.items():
                    with_inputs = {"samples": {"x": self.samples}, "arch": FACTORY}
                    fused, _ = otfuse_cli.prune_fuse(DENSE, pruned, **with_inputs if inputs else {})
                    found.setdefault(f"{name} @{amount}", []).append(self.accuracy(fused))
        return found


def _stage(name: str, weights: Mapping[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    parts = []
    for part in values.split(250):
        part = part.contiguous(memory_format=torch.channels_last)
        out = F.conv2d(part, weights[f"{name}.weight"], padding=1).relu()
        parts.append(F.max_pool2d(out, 2) if name in POOLED else out)
    return torch.cat(parts)
