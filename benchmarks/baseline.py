"""`merge --matcher sweep` against a straightforward implementation of the published algorithm.

    python benchmarks/baseline.py [--only vgg11half] [--repeat 7]

The baseline is Singh & Jaggi's algorithm written down as it reads: unit rows, a Euclidean cost from
one matrix product, `ot.emd`, and dense products with the maps (our own writing). Both go from two
files to one, on one thread, in turns; results must agree. Seconds are CPU seconds: the machine
may have other work, and waiting for the disk is not measured (`large.py` does).

Pairs: the trained VGG11 at half width in
the folder that OTFUSE_SHARED names, and random weights in the shapes of VGG11, ResNet18 and
ResNet50, the second network a permuted copy of the first with noise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

SHARED = Path(os.environ.get("OTFUSE_SHARED", Path(__file__).parents[2] / "shared"))
VGG11 = (64, 128, 256, 256, 512, 512, 512, 512)
NOISE = 0.3


@dataclass(frozen=True)
class Layer:
    """A weight, the spaces of what it reads and makes ("" where nothing moves), its BatchNorm."""

    weight: str
    reads: str
    makes: str
    norm: str = ""


@dataclass
class Clock:
    """CPU seconds by part."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - began


# The baseline.


def fuse(one: str, other: str, out: str, layers: list[Layer], clock: Clock) -> dict[str, float]:
    """The published algorithm on files; returns the OT cost of each space by its first weight."""
    import ot
    from safetensors.torch import load_file, save_file

    stored = load_file(one), load_file(other)
    source, anchor = ({n: t.float() for n, t in s.items()} for s in stored)
    maps: dict[str, torch.Tensor] = {}
    costs = {}
    for space, made in makers(layers).items():
        sides = []
        for net in (source, anchor):
            moves = maps if net is source else {}
            rows = [unit_rows(folded(net, layer, moves)) for layer in made]
            sides.append(torch.cat(rows, 1) / len(rows) ** 0.5)
        cost = euclidean(*sides)
        with clock("solve + apply"):
            mass = [ot.unif(n) for n in cost.shape]
            plan = ot.emd(*mass, cost.double().numpy(), numItermax=10**9)
            plan = torch.from_numpy(plan)
        costs[made[0].weight] = float((plan * cost).sum())
        maps[space] = (plan * cost.shape[1]).float()
    with clock("solve + apply"):
        aligned = {n: apply(n, t, layers, maps) for n, t in source.items()}
    fused = {n: ((t + anchor[n]) / 2).to(stored[1][n].dtype) for n, t in aligned.items()}
    save_file({n: t.contiguous() for n, t in fused.items()}, out)
    return costs


def makers(layers: list[Layer]) -> dict[str, list[Layer]]:
    """Space to the layers that it is matched by: those whose inputs are known by then."""
    found: dict[str, list[Layer]] = {}
    first = {layer.makes: at for at, layer in reversed(list(enumerate(layers)))}
    for space in sorted(filter(None, first), key=first.get):
        ready = {"", *found}
        made = [layer for layer in layers if layer.makes == space and layer.reads in ready]
        found[space] = made
    return found


def folded(
    net: dict[str, torch.Tensor], layer: Layer, maps: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Incoming weights, inputs mapped, BatchNorm folded in as gain and bias."""
    weight = net[layer.weight]
    columns = []
    if layer.norm:
        part = {p: net[f"{layer.norm}.{p}"] for p in ("weight", "bias", *STATISTICS)}
        gain = part["weight"] * (part["running_var"] + 1e-5).rsqrt()
        weight = weight * gain.view([-1] + [1] * (weight.dim() - 1))
        columns = [(part["bias"] - part["running_mean"] * gain)[:, None]]
    if layer.reads in maps:
        weight = consumed(weight, maps[layer.reads])
    return torch.cat([weight.flatten(1), *columns], 1)


def apply(
    name: str, tensor: torch.Tensor, layers: list[Layer], maps: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Both sides of a weight, or the vectors of a BatchNorm, by dense maps."""
    for layer in layers:
        if name == layer.weight:
            if layer.reads in maps:
                tensor = consumed(tensor, maps[layer.reads])
            if layer.makes in maps:
                tensor = (maps[layer.makes].T @ tensor.flatten(1)).view(-1, *tensor.shape[1:])
            return tensor
        if layer.norm and name.startswith(f"{layer.norm}.") and tensor.dim() == 1:
            return maps[layer.makes].T @ tensor
    return tensor


def consumed(weight: torch.Tensor, map: torch.Tensor) -> torch.Tensor:
    if weight.dim() == 2:
        return weight @ map
    return torch.matmul(weight.permute(2, 3, 0, 1), map).permute(2, 3, 0, 1)


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.norm(dim=1, keepdim=True)


def euclidean(source: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    squares = source.square().sum(1)[:, None] + anchor.square().sum(1)
    return (squares - 2 * source @ anchor.T).clamp(min=0).sqrt()


# What is fused.

STATISTICS = ("running_mean", "running_var")


def vgg_layers(widths: tuple[int, ...] = VGG11) -> tuple[list[Layer], dict[str, tuple[int, ...]]]:
    """VGG11 without biases, as in the shared folder."""
    names = [f"features.{at}.weight" for at in (0, 3, 6, 8, 11, 13, 16, 18)]
    layers, shapes, before, size = [], {}, "", 3
    for name, width in zip(names, widths, strict=True):
        layers.append(Layer(name, before, name))
        shapes[name] = (width, size, 3, 3)
        before, size = name, width
    layers.append(Layer("classifier.weight", before, ""))
    shapes["classifier.weight"] = (10, size)
    return layers, shapes


def resnet_layers(
    depths: tuple[int, ...], *, bottleneck: bool
) -> tuple[list[Layer], dict[str, tuple[int, ...]]]:
    """ResNet at full width, by torchvision's names."""
    layers = [Layer("conv1.weight", "", "stream0", "bn1")]
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}
    stream, size = "stream0", 64
    for stage, depth in enumerate(depths, 1):
        inner, wide = 64 << (stage - 1), (64 << (stage - 1)) * (4 if bottleneck else 1)
        for block in range(depth):
            path = f"layer{stage}.{block}"
            out = stream if wide == size else f"stream{stage}"
            kernels = (1, 3, 1) if bottleneck else (3, 3)
            space, width = stream, size
            for at, kernel in enumerate(kernels, 1):
                last = at == len(kernels)
                makes, made = (out, wide) if last else (f"{path}.{at}", inner)
                name = f"{path}.conv{at}.weight"
                layers.append(Layer(name, space, makes, f"{path}.bn{at}"))
                shapes[name] = (made, width, kernel, kernel)
                space, width = makes, made
            if wide != size:
                name = f"{path}.downsample.0.weight"
                layers.append(Layer(name, stream, out, f"{path}.downsample.1"))
                shapes[name] = (wide, size, 1, 1)
            stream, size = out, wide
    layers.append(Layer("fc.weight", stream, ""))
    shapes["fc.weight"] = (1000, size)
    return layers, shapes


def write_pair(folder: Path, layers: list[Layer], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Random weights, and a permuted copy with noise."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    first, second, order = {}, {}, {}
    for layer in layers:
        shape = shapes[layer.weight]
        if layer.makes not in order:
            order[layer.makes] = torch.randperm(shape[0], generator=generator)
        tensors = {layer.weight: torch.randn(shape, generator=generator)}
        tensors[layer.weight] *= (2 / tensors[layer.weight][0].numel()) ** 0.5
        if layer.norm:
            for part in ("weight", "running_var"):
                tensors[f"{layer.norm}.{part}"] = torch.rand(shape[0], generator=generator) + 0.5
            for part in ("bias", "running_mean"):
                values = torch.randn(shape[0], generator=generator) * 0.1
                tensors[f"{layer.norm}.{part}"] = values
        for name, tensor in tensors.items():
            first[name] = tensor
            blur = torch.randn(tensor.shape, generator=generator) * tensor.std() * NOISE
            moved = (tensor + blur).abs() if name.endswith("_var") else tensor + blur
            if layer.makes:
                moved = moved[order[layer.makes]]
            if layer.reads and tensor.dim() > 1:
                moved = moved[:, order[layer.reads]]
            second[name] = moved.contiguous()
    paths = [str(folder / f"{at}.safetensors") for at in (0, 1)]
    for path, tensors in zip(paths, (first, second), strict=True):
        save_file(tensors, path)
    return paths


MODELS: dict[str, Callable[[], tuple[list[Layer], dict[str, tuple[int, ...]]]]] = {
    "vgg11half": lambda: vgg_layers((64, 64, 128, 128, 256, 256, 256, 512)),
    "vgg11": vgg_layers,
    "resnet18": lambda: resnet_layers((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: resnet_layers((3, 4, 6, 3), bottleneck=True),
}


# Ours, and the comparison.


def merge(one: str, other: str, out: str, clock: Clock) -> dict[str, float]:
    """The command, with the parts of solving and applying timed inside it."""
    from otfuse_cli.commands.merge import run_merge as run
    from otfuse_cli.fusion import average
    from otfuse_cli.fusion import row_blocks as rows
    from otfuse_cli.matching import match_space
    from otfuse_cli.requests.requests import MergeRequest

    request = MergeRequest(
        checkpoints=(Path(one), Path(other)),
        output=Path(out),
        matcher="sweep",
        repair="none",
        overwrite=True,
    )

    solving = timed(match_space, "solve", clock)
    moving = timed(average, "transport", clock), timed(rows._Part, "rows", clock)
    with solving, moving[0], moving[1]:
        report = run(request)
    return {space.tensors[0]: space.ot_cost for space in report.spaces}


@contextmanager
def timed(module: object, name: str, clock: Clock) -> Iterator[None]:
    """Count what a module spends in one of the functions it uses."""
    original = getattr(module, name)

    def counting(*arguments: object, **options: object) -> object:
        with clock("solve + apply"):
            return original(*arguments, **options)

    setattr(module, name, counting)
    try:
        yield
    finally:
        setattr(module, name, original)


def compare(name: str, repeat: int) -> str:
    """One row of the table."""
    layers, shapes = MODELS[name]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if name == "vgg11half":
            stem = SHARED / "checkpoints" / "cifar10-vgg11half"
            pair = [f"{stem}-{at}.safetensors" for at in (0, 1)]
        else:
            pair = write_pair(folder, layers, shapes)
        outs = [str(folder / f"{side}.safetensors") for side in ("theirs", "ours")]
        whole: dict[str, list[float]] = {"theirs": [], "ours": []}
        parts: dict[str, list[float]] = {"theirs": [], "ours": []}
        for at in range(repeat + 1):
            found = {}
            for side in ("theirs", "ours"):
                clock = Clock()
                with clock("whole"):
                    if side == "theirs":
                        found[side] = fuse(*pair, outs[0], layers, clock)
                    else:
                        found[side] = merge(*pair, outs[1], clock)
                if at:  # the first round warms up
                    whole[side].append(clock.seconds["whole"])
                    parts[side].append(clock.seconds["solve + apply"])
        agreement = agree(found["theirs"], found["ours"], outs)
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    cells = [name, f"{numbers / 1e6:.1f} M"]
    for seconds in (parts, whole):
        ratio = median(t / o for t, o in zip(seconds["theirs"], seconds["ours"], strict=True))
        cells += [f"{median(seconds[s]):.3f}" for s in ("theirs", "ours")] + [f"**{ratio:.1f}**"]
    return f"| {' | '.join([*cells, agreement])} |"


def agree(theirs: dict[str, float], ours: dict[str, float], outs: list[str]) -> str:
    """Largest relative difference of OT costs; share of output numbers that differ visibly."""
    from safetensors.torch import load_file

    assert theirs.keys() == ours.keys(), (list(theirs), list(ours))
    worst = max(abs(theirs[n] - ours[n]) / theirs[n] for n in theirs)
    first, second = map(load_file, outs)
    far = max(float((first[n].float() - second[n].float()).abs().max()) for n in first)
    assert worst < 1e-5, worst
    return f"{worst:.0e}, {far:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeat", type=int, default=7, help="rounds after the first (default 7)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | parameters | solve + apply: baseline, s | otfuse, s | ratio", end="")
    print(" | all: baseline, s | otfuse, s | ratio | differences of cost, output |")
    print("|" + "---|" * 9)
    for name in given.only:
        print(compare(name, given.repeat), flush=True)


if __name__ == "__main__":
    main()
