"""Networks of different depth, fused: MNIST MLPs, CIFAR-10 pairs with shallower relatives, ViTs,
and small language models.

    python examples/depth.py mnist [--seeds 0,1,2]
    python examples/depth.py cifar SOURCE:FACTORY ANCHOR:FACTORY [--num-samples 1000] [--seeds 0]
    python examples/depth.py vit SHALLOW [--num-samples 1000] [--seeds 0]
    python examples/depth.py language [--kinds gpt2,llama] [--num-samples 400]

MNIST: 784-400-100, 784-400-200-100 and 784-400-300-200-100 in all pairs and all three, the last one
the anchor; `alone` gives the whole weight to the sources, so that the anchor only lends its shape.
CIFAR-10: FACTORY is one of networks.py; `vit` takes the pair's first ViT and one of train_vit.py
with four layers, both ways. Test accuracy in percent on all test images, mean and deviation over
draws of the inputs, which come from the training split, without labels. Language models: as in
language.py, with two layers and with four; perplexity per byte. `dropped`: the deeper model without
as many of its layers, of all choices the one that does best on the inputs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
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
    for kind in ("mnist", "cifar", "vit", "language"):
        options = kinds.add_parser(kind)
        options.add_argument("--seeds", default="0", help="of the draws (%(default)s)")
        if kind != "mnist":
            number = 400 if kind == "language" else 1000
            options.add_argument("--num-samples", type=int, default=number, help="(%(default)s)")
        if kind == "cifar":
            options.add_argument("checkpoints", nargs=2, metavar="FILE:FACTORY")
        if kind == "vit":
            options.add_argument("shallow", metavar="FILE")
        if kind == "language":
            options.add_argument("--kinds", default="gpt2,llama", help="(%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    seeds = [int(seed) for seed in given.seeds.split(",")]
    if given.kind == "mnist":
        measure_mlps(seeds)
    elif given.kind == "cifar":
        measure_cifar(given.checkpoints, given.num_samples, seeds)
    elif given.kind == "vit":
        measure_vits(given.shallow, given.num_samples, seeds)
    else:
        for kind in given.kinds.split(","):
            measure_language(kind, given.num_samples, seeds)


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
        said = [net(part) for part in images.split(50)]
    return torch.cat([part if isinstance(part, Tensor) else part.logits for part in said])


def right(said: Tensor, test: Images) -> float:
    """Percent of the images that are told right."""
    return 100 * float((said.argmax(1) == test[1]).double().mean())


def measure_vits(shallow: str, count: int, seeds: Sequence[int]) -> None:
    """Both ways, and the deeper one without two of its layers."""
    deep = evaluate.SHARED / "checkpoints" / "cifar10-vit-0.safetensors"
    measure_cifar((f"{deep}:vit", f"{shallow}:vit4"), count, seeds)
    measure_cifar((f"{shallow}:vit4", f"{deep}:vit"), count, seeds)
    test, (images, labels) = evaluate.cifar("test"), evaluate.cifar("train")
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]

    def agreement(state: Any) -> float:
        return right(logits(networks.vit4, state, images[chosen]), (images, labels[chosen]))

    best = max(without_layers(evaluate.load(deep), "vit.layers.", 4), key=agreement)
    print(f"dropped: {right(logits(networks.vit4, best, test[0]), test):.2f}", flush=True)


def without_layers(
    state: Any, prefix: str, left: int, only: Sequence[int] | None = None
) -> Iterator[dict[str, Tensor]]:
    """A transformer with `left` of its layers, in order: every choice, or one."""
    numbers = {n.removeprefix(prefix).partition(".")[0] for n in state if n.startswith(prefix)}
    every = itertools.combinations(sorted(map(int, numbers)), left)
    for kept in every if only is None else [tuple(only)]:
        places = {str(number): at for at, number in enumerate(kept)}
        some = dict[str, Tensor]()
        for name, tensor in state.items():
            number, _, rest = name.removeprefix(prefix).partition(".")
            if not name.startswith(prefix):
                some[name] = tensor
            elif number in places:
                some[f"{prefix}{places[number]}.{rest}"] = tensor
        yield some


def measure_language(kind: str, count: int, seeds: Sequence[int]) -> None:
    """Two layers and four, both ways; the deeper one without two of its layers."""
    import language

    cache, tokens = Path.home() / ".cache" / "otfuse-examples", language.text()
    rows = [
        language_figures(
            kind, language, tokens, len(tokens) * 9 // 10, cache=cache, count=count, seed=seed
        )
        for seed in seeds
    ]
    print("| kind | 2 layers, 4 layers | 4 into 2 | 2 into 4 | 4 alone, in 2 | dropped |")
    print("|---" * 6 + "|")
    cells = [kind, ", ".join(f"{score:.2f}" for score in rows[0]["parents"])]
    for name in ("into shallower", "into deeper", "alone", "dropped"):
        cells.append(mean(row[name] for row in rows))
    print(f"| {' | '.join(cells)} |", flush=True)


def language_figures(
    kind: str,
    language: Any,
    tokens: Tensor,
    cut: int,
    *,
    cache: Path,
    steps: int = 500,
    count: int = 400,
    seed: int = 0,
) -> dict[str, Any]:
    """Perplexities of two layers and four, fused; trained on the tokens before `cut`."""
    inputs = {"input_ids": language.windows(tokens[:cut])}
    held = {"input_ids": language.windows(tokens[cut:])}
    folders = {}
    for number, layers in enumerate((2, 4)):
        folders[layers] = language.trained(kind, number, tokens[:cut], steps, cache, layers=layers)

    def perplexity(net: Any, layers: int, samples: Any = held) -> float:
        arch = f"hf:{folders[layers]}"
        report = otfuse_cli.evaluate(net, arch=arch, samples=samples)
        assert report.evaluation is not None
        (score,) = report.evaluation["perplexity"].values()
        return float(score)

    def joined(source: int, anchor: int, weights: tuple[float, float]) -> float:
        arch = {0: f"hf:{folders[source]}", 1: f"hf:{folders[anchor]}"}
        how = {"samples": inputs, "num_samples": count, "blend": "joint", "arch": arch}
        pair = folders[source], folders[anchor]
        return perplexity(otfuse_cli.merge(*pair, weights=weights, seed=seed, **how)[0], anchor)

    few = {"input_ids": inputs["input_ids"][:: len(inputs["input_ids"]) // count]}
    prefix = {"gpt2": "transformer.h.", "llama": "model.layers."}[kind]
    every = without_layers(evaluate.load(folders[4]), prefix, 2)
    best = min(every, key=lambda state: perplexity(state, 2, few))
    return {
        "parents": [perplexity(folders[layers], layers) for layers in (2, 4)],
        "into shallower": joined(4, 2, (0.5, 0.5)),
        "into deeper": joined(2, 4, (0.5, 0.5)),
        "alone": joined(4, 2, (1.0, 0.0)),
        "dropped": perplexity(best, 2),
    }


if __name__ == "__main__":
    main()
