"""Merging on a GPU beside the CPU: wall seconds, their ratio, and the memory of the device.

    python benchmarks/gpu.py [--only vgg11,vit-b16] [--ways sweep,refit] [--repeat 3]
    python benchmarks/gpu.py --device cpu --only vgg11 --ways sweep

Networks of random weights in the shapes of VGG11 and ResNet50 (the second a permuted copy of the
first with noise), ViT-B/16, and one layer of Llama 3.2 1B (from two seeds, in float32; they need
transformers, and nothing is downloaded). Matching goes by `sweep` and by `auto`, from files to a
state dict; a refit takes drawn inputs, `--inputs` of them, where the network is small enough to be
run on a CPU. CPU and GPU take turns after a round that warms up; medians. The CPU uses all of its
cores. Memory is the peak of what torch has allocated on the device; on a CPU, of the process.

Without a GPU: exit 2, unless `--device cpu` asks for the CPU's column alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from baseline import MODELS, VGG11, write_pair
from torch import nn

WAYS = {
    "sweep": {"matcher": "sweep"},
    "auto": {"matcher": "auto"},
    "refit": {"matcher": "sweep", "blend": "average"},
}


@dataclass(frozen=True)
class Subject:
    """A pair of networks to be merged.

    Attributes:
        write: Leaves both in a folder; their paths.
        arch: What runs them; None where a refit is left out.
        shape: Of one input.
    """

    write: Callable[[Path], list[str]]
    arch: Callable[[], tuple[nn.Module, torch.Tensor]] | None = None
    shape: tuple[int, ...] = ()


def vgg11() -> tuple[nn.Module, torch.Tensor]:
    """VGG11 for images of 32 x 32 by the names of `baseline.py`, and an input."""
    layers: list[nn.Module] = []
    before = 3
    for at, width in enumerate(VGG11):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.ReLU()]
        if at in (0, 1, 3, 5, 7):
            layers.append(nn.MaxPool2d(2))
        before = width
    net = nn.Sequential()
    net.add_module("features", nn.Sequential(*layers))
    net.add_module("flatten", nn.Flatten())
    net.add_module("classifier", nn.Linear(before, 10, bias=False))
    return net, torch.randn(4, 3, 32, 32)


def by_names(name: str) -> Callable[[Path], list[str]]:
    """A network of `baseline.py`."""
    return lambda folder: write_pair(folder, *MODELS[name]())


def vit(folder: Path) -> list[str]:
    """ViT-B/16 as transformers saves it."""
    from transformers import ViTConfig, ViTForImageClassification

    return _saved(folder, lambda: ViTForImageClassification(ViTConfig()))


def llama(folder: Path) -> list[str]:
    """One layer of Llama 3.2 1B, and a vocabulary of 1,000."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1_000,
        hidden_size=2_048,
        intermediate_size=8_192,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    return _saved(folder, lambda: LlamaForCausalLM(config))


def _saved(folder: Path, make: Callable[[], Any]) -> list[str]:
    paths = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        paths.append(str(folder / str(seed)))
        make().save_pretrained(paths[-1])
    return paths


SUBJECTS = {
    "vgg11": Subject(by_names("vgg11"), vgg11, (3, 32, 32)),
    "resnet50": Subject(by_names("resnet50")),
    "vit-b16": Subject(vit),
    "llama-1b layer": Subject(llama),
}


def table(names: list[str], ways: list[str], devices: list[str], rounds: int, inputs: int) -> None:
    """Print a row for each network and way, as it is measured."""
    print(f"| network | way | {' | '.join(f'{d}, s' for d in devices)} | ratio | peak, MiB |")
    print("|" + "---|" * (4 + len(devices)), flush=True)
    for name in names:
        subject = SUBJECTS[name]
        with tempfile.TemporaryDirectory() as temporary:
            paths = subject.write(Path(temporary))
            for way in ways:
                options: dict[str, Any] = dict(WAYS[way])
                if "blend" in options and subject.arch is None:
                    continue
                if "blend" in options:
                    drawn = torch.Generator().manual_seed(0)
                    x = torch.randn(inputs, *subject.shape, generator=drawn)
                    options |= {"arch": subject.arch, "samples": x, "num_samples": inputs}
                seconds, peak = in_turns(paths, options, devices, rounds)
                cells = [f"{taken:.2f}" for taken in seconds]
                cells.append(f"**{seconds[0] / seconds[-1]:.1f}**")
                print(f"| {name} | {way} | {' | '.join(cells)} | {peak:.0f} |", flush=True)


def in_turns(
    paths: list[str], options: dict[str, Any], devices: list[str], rounds: int
) -> tuple[list[float], float]:
    """Wall seconds on each device, medians, and the peak of the last one in MiB."""
    import otfuse_cli

    seconds: dict[str, list[float]] = {device: [] for device in devices}
    peak = 0.0
    for round_ in range(rounds + 1):
        for device in devices:
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            _, report = otfuse_cli.merge(*paths, device=device, **options)  # ends on the CPU
            if round_:
                seconds[device].append(time.perf_counter() - began)
            peak = report.peak_rss_bytes if device == "cpu" else torch.cuda.max_memory_allocated()
    return [median(times) for times in seconds.values()], peak / 2**20


def main(arguments: list[str] | None = None) -> None:
    """Measure, or exit 2 where that can't be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(SUBJECTS), help="networks (default all)")
    parser.add_argument("--ways", default=",".join(WAYS), help="of merging (default all)")
    parser.add_argument("--device", default="cuda", help="beside the CPU (default cuda), or cpu")
    parser.add_argument("--repeat", type=int, default=3, help="rounds after the first (default 3)")
    parser.add_argument("--inputs", type=int, default=1_000, help="of a refit (default 1000)")
    given = parser.parse_args(arguments)
    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: run it where one is, or give --device cpu")
    names, ways = given.only.split(","), given.ways.split(",")
    for value in [*names, *ways]:
        if value not in SUBJECTS and value not in WAYS:
            parser.error(f"{value!r} is neither of {', '.join(SUBJECTS)} nor of {', '.join(WAYS)}")
    devices = ["cpu"] if given.device == "cpu" else ["cpu", given.device]
    what = "no GPU" if given.device == "cpu" else torch.cuda.get_device_name(given.device)
    print(f"{what}, {torch.get_num_threads()} threads of the CPU, torch {torch.__version__}\n")
    table(names, ways, devices, given.repeat, given.inputs)


if __name__ == "__main__":
    main()
