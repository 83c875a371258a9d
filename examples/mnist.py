"""MNIST MLPs for the scripts beside this one: data, training as in the paper, accuracy.

Networks have no biases, ReLU, and PyTorch's initial weights; training is SGD at a constant rate of
0.01, momentum 0.5, batches of 64, 10 epochs (the paper, S1.1). Networks of one shape are trained
together, as one network with a leading model axis; each has its own start, its own order of
examples and, if wanted, its own part of the training set. Trained networks are kept in a cache, so
that only the first run is slow. The same torch on the same machine trains the same bytes.

Not a script: see paper/run.py.

Shapes: G models, B examples of a batch, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import evaluate
import numpy as np
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

StateDict = Mapping[str, torch.Tensor]
# Logits (models, batch, 10) and which examples they are of (models, batch) to the loss's slope by
# the logits, of each example.
Slope = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
AfterEpoch = Callable[[int, "list[dict[str, torch.Tensor]]"], None]

MLPNET = (400, 200, 100)


@dataclass(frozen=True)
class Recipe:
    """How to train: hidden widths, and SGD. `decay`: the rate falls linearly to zero."""

    hidden: tuple[int, ...] = MLPNET
    epochs: int = 10
    rate: float = 0.01
    momentum: float = 0.5
    batch: int = 64
    decay: bool = False


@dataclass(frozen=True)
class Student:
    """One network: seed of its initial weights, seed of its order of examples, its part of them."""

    start: int
    order: int
    part: torch.Tensor | None = None  # indices into the training set, (n,) int64; None = all


@dataclass(frozen=True)
class Split:
    """Images (n, 784) as the networks take them, float32, and labels (n,), int64."""

    images: torch.Tensor
    labels: torch.Tensor


def options(description: str | None) -> argparse.ArgumentParser:
    """What every script takes."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first network (default 0)")
    parser.add_argument(
        "--data",
        type=Path,
        default=evaluate.SHARED / "data" / "mnist.npz",
        help="mnist.npz with x_train, y_train, x_test, y_test (default: that of OTFUSE_SHARED)",
    )
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument(
        "--cache",
        type=Path,
        default=home / "otfuse-examples",
        help="folder of trained networks (default: %(default)s)",
    )
    return parser


def load(data: Path, split: str) -> Split:
    """`train` or `test`."""
    with np.load(data) as file:
        x, y = file[f"x_{split}"], file[f"y_{split}"]
    images = (x.reshape(len(x), -1).astype(np.float32) / 255 - 0.1307) / 0.3081
    return Split(torch.from_numpy(images), torch.from_numpy(y.astype(np.int64)))


def accuracy(weights: StateDict, test: Split) -> float:
    """Percent of `test` that a network gets right."""
    with torch.inference_mode():
        found = evaluate.mlpnet(weights, test.images).argmax(1)
    return round(100 * float((found == test.labels).double().mean()), 2)


def ensemble(
    networks: Sequence[StateDict],
    test: Split,
    weights: Sequence[float],
    *,
    of_probabilities: bool = False,
) -> float:
    """Percent of `test` that the weighted sum of the networks' logits gets right."""
    with torch.inference_mode():
        logits = [evaluate.mlpnet(n, test.images) for n in networks]
        said = [one.softmax(1) for one in logits] if of_probabilities else logits
        total = sum(one * w for one, w in zip(said, weights, strict=True))
    hits = total.argmax(1) == test.labels  # type: ignore[union-attr]
    return round(100 * float(hits.double().mean()), 2)


def students(
    recipe: Recipe, wanted: Sequence[Student], data: Path, cache: Path
) -> list[dict[str, torch.Tensor]]:
    """Trained networks, from the cache where they are there; tensors fc1.weight, fc2.weight, ..."""
    paths = [cache / _name(recipe, student) for student in wanted]
    if not all(path.exists() for path in paths):
        cache.mkdir(parents=True, exist_ok=True)
        with ExitStack() as alone:
            # Each is trained by one process alone. All take their locks in one order.
            for path in sorted({path for path in paths if not path.exists()}):
                alone.enter_context(FileLock(path.with_suffix(".lock")))
            _train_missing(recipe, wanted, paths, load(data, "train"))
    return [load_file(path) for path in paths]


def _train_missing(
    recipe: Recipe, wanted: Sequence[Student], paths: Sequence[Path], train: Split
) -> None:
    missing = [at for at, path in enumerate(paths) if not path.exists()]
    for size in sorted({_size(wanted[at], train) for at in missing}):  # as many steps for each
        group = [at for at in missing if _size(wanted[at], train) == size]
        began = time.perf_counter()
        nets = fit(recipe, [wanted[at] for at in group], train)
        for at, net in zip(group, nets, strict=True):
            draft = paths[at].with_suffix(f".{os.getpid()}.tmp")
            save_file(net, draft, metadata={"format": "pt"})
            draft.replace(paths[at])
        hidden = "-".join(map(str, recipe.hidden))
        seconds = time.perf_counter() - began
        print(f"trained {len(group)} x {hidden} on {size} images in {seconds:.0f} s", flush=True)


def _size(student: Student, train: Split) -> int:
    return len(train.labels) if student.part is None else len(student.part)


def _name(recipe: Recipe, student: Student) -> str:
    part = b"" if student.part is None else student.part.numpy().tobytes()
    mark = hashlib.sha256(repr((recipe, student.start, student.order)).encode() + part).hexdigest()
    hidden = "-".join(map(str, recipe.hidden))
    return f"mlp-{hidden}-start{student.start}-order{student.order}-{mark[:12]}.safetensors"


def fit(
    recipe: Recipe,
    group: Sequence[Student],
    train: Split,
    *,
    begin: Sequence[StateDict] | None = None,
    slope: Slope | None = None,
    after_epoch: AfterEpoch | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Train networks that have equally many examples, together.

    Gradients are written out: momentum takes them in the product that makes them, which spares
    two passes over the weights per step, a fifth of the time.

    Args:
        recipe: Widths and SGD.
        group: The networks.
        train: Examples.
        begin: What they start from instead of what their seeds draw.
        slope: Of the loss; that of the cross entropy by default.
        after_epoch: Is told the epoch, counted from 1, and the networks after it.
    """
    weights = _starts(recipe, group, train) if begin is None else _stacked(begin)
    slope = slope or cross_entropy(train)
    momenta = [torch.zeros_like(w_GIO) for w_GIO in weights]
    orders = [torch.Generator().manual_seed(1_000_003 + s.order) for s in group]
    every = torch.arange(len(train.labels))
    parts = [every if s.part is None else s.part for s in group]
    size = len(parts[0])
    steps, step = recipe.epochs * math.ceil(size / recipe.batch), 0
    with torch.inference_mode():
        for epoch in range(1, recipe.epochs + 1):
            shuffled = [
                p[torch.randperm(size, generator=g)] for p, g in zip(parts, orders, strict=True)
            ]
            for index_GB in torch.stack(shuffled).split(recipe.batch, dim=1):
                rate = recipe.rate * (1 - step / steps if recipe.decay else 1)
                _step(weights, momenta, train.images[index_GB], index_GB, slope, rate, recipe)
                step += 1
            if after_epoch is not None:
                after_epoch(epoch, _apart(weights))
    return _apart(weights)


def cross_entropy(train: Split) -> Slope:
    """Of the labels."""

    def slope(logits_GBO: torch.Tensor, index_GB: torch.Tensor) -> torch.Tensor:
        found = logits_GBO.softmax(-1)
        labels_GB1 = train.labels[index_GB][..., None]
        return found.scatter_add_(-1, labels_GB1, torch.full_like(found[..., :1], -1.0))

    return slope


def _starts(recipe: Recipe, group: Sequence[Student], train: Split) -> list[torch.Tensor]:
    """PyTorch's initial weights, drawn by each network's seed: (models, inputs, outputs)."""
    shapes = itertools.pairwise((train.images.shape[1], *recipe.hidden, 10))
    drawn = [torch.Generator().manual_seed(s.start) for s in group]
    return [
        torch.stack([torch.empty(i, o).uniform_(-1, 1, generator=g) for g in drawn]) / math.sqrt(i)
        for i, o in shapes
    ]


def _stacked(networks: Sequence[StateDict]) -> list[torch.Tensor]:
    layers = range(1, len(networks[0]) + 1)
    return [torch.stack([n[f"fc{at}.weight"].T.contiguous() for n in networks]) for at in layers]


def _apart(weights: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [
        {f"fc{at}.weight": w[g].T.contiguous().clone() for at, w in enumerate(weights, start=1)}
        for g in range(len(weights[0]))
    ]


def _step(
    weights: list[torch.Tensor],
    momenta: list[torch.Tensor],
    x_GBI: torch.Tensor,
    index_GB: torch.Tensor,
    slope_of: Slope,
    rate: float,
    recipe: Recipe,
) -> None:
    """One step of SGD on the mean loss of each network's batch."""
    inputs = [x_GBI]
    for w_GIO in weights[:-1]:
        inputs.append(torch.bmm(inputs[-1], w_GIO).relu_())
    slope = slope_of(torch.bmm(inputs[-1], weights[-1]), index_GB)
    slope /= index_GB.shape[1]
    for at in reversed(range(len(weights))):
        momenta[at].baddbmm_(inputs[at].mT, slope, beta=recipe.momentum)
        if at:
            slope = torch.bmm(slope, weights[at].mT).mul_(inputs[at] > 0)
        weights[at].sub_(momenta[at], alpha=rate)
