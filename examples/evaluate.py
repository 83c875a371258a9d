"""Test accuracy of the real pairs: mnist-mlpnet, cifar10-vgg11half, -resnet18w16, -vit.

    python examples/evaluate.py CKPT...

The network is told from the tensor names. Data and pairs come from the folder that OTFUSE_SHARED
names (default: ../shared beside the checkout), the full test sets unless --limit N says otherwise:
N images drawn by --seed, of each class its share. CIFAR-10 needs Pillow, and is decoded once into
the folder for temporary files.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.running.factory import build
from otfuse_cli.running.runnable import with_tensors

StateDict = Mapping[str, torch.Tensor]

SHARED = Path(os.environ.get("OTFUSE_SHARED", Path(__file__).parents[2] / "shared"))
CIFAR_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
CIFAR_STD = np.array([0.2470, 0.2435, 0.2616], np.float32)


def load(path: str | Path) -> dict[str, torch.Tensor]:
    """A checkpoint as float32 tensors by name."""
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name).float() for name in checkpoint.infos}


def mnist(split: str = "test") -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 784) as the parents were trained on them, and labels."""
    with np.load(SHARED / "data" / "mnist.npz") as data:
        x, y = data[f"x_{split}"], data[f"y_{split}"]
    images = (x.reshape(len(x), -1).astype(np.float32) / 255 - 0.1307) / 0.3081
    return torch.from_numpy(images), torch.from_numpy(y.astype(np.int64))


def cifar(split: str = "test") -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 3, 32, 32), normalised, and labels."""
    archive = SHARED / "data" / f"cifar10-{split}.tar.xz"
    mark = hashlib.sha256(f"{archive.stat().st_size}{archive.name}".encode()).hexdigest()[:12]
    cache = Path(tempfile.gettempdir()) / f"otfuse-cifar10-{split}-{mark}.npz"
    if not cache.exists():
        _decode(archive, cache)
    with np.load(cache) as data:
        x, y = data["x"], data["y"]
    images = (x.astype(np.float32) / 255 - CIFAR_MEAN) / CIFAR_STD
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y)


def mnist_train() -> tuple[torch.Tensor, torch.Tensor]:
    """The training split, for --samples evaluate.py:mnist_train."""
    return mnist("train")


def cifar_train() -> tuple[torch.Tensor, torch.Tensor]:
    """The training split, for --samples evaluate.py:cifar_train."""
    return cifar("train")


def _decode(archive: Path, cache: Path) -> None:
    from PIL import Image

    with tarfile.open(archive) as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar if m.name.endswith(".jpg")}
    classes = sorted({name.split("/")[-2] for name in files})
    x = np.stack([np.asarray(Image.open(io.BytesIO(files[n]))) for n in sorted(files)])
    y = np.array([classes.index(n.split("/")[-2]) for n in sorted(files)])
    draft = cache.with_name(f"{cache.stem}.{os.getpid()}.npz")
    np.savez(draft, x=x, y=y)
    draft.replace(cache)


def mlpnet(w: StateDict, x: torch.Tensor) -> torch.Tensor:
    """Logits of fc1..fcN with ReLU, biases where there are any."""
    last = sum(n.endswith(".weight") for n in w)
    for at in range(1, last + 1):
        x = F.linear(x, w[f"fc{at}.weight"], w.get(f"fc{at}.bias"))
        x = x.relu() if at < last else x
    return x


def vgg11(w: StateDict, x: torch.Tensor) -> torch.Tensor:
    """Logits of VGG11: pooled after the 1st, 2nd, 4th, 6th and 8th convolution."""
    for count, at in enumerate((0, 3, 6, 8, 11, 13, 16, 18), start=1):
        x = F.conv2d(x, w[f"features.{at}.weight"], w.get(f"features.{at}.bias"), padding=1).relu()
        if count in (1, 2, 4, 6, 8):
            x = F.max_pool2d(x, 2)
    return F.linear(x.flatten(1), w["classifier.weight"], w.get("classifier.bias"))


def resnet18(w: StateDict, x: torch.Tensor) -> torch.Tensor:
    """Logits of the CIFAR ResNet18, with BatchNorm in eval mode where there is one."""

    def block(conv: str, norm: str, x: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
        x = F.conv2d(x, w[f"{conv}.weight"], w.get(f"{conv}.bias"), stride, padding)
        if f"{norm}.running_mean" not in w:
            return x
        statistics = w[f"{norm}.running_mean"], w[f"{norm}.running_var"]
        return F.batch_norm(x, *statistics, w[f"{norm}.weight"], w[f"{norm}.bias"])

    x = block("conv1", "bn1", x, 1, 1).relu()
    for layer in range(1, 5):
        for at in range(2):
            name = f"layer{layer}.{at}"
            stride = 2 if layer > 1 and at == 0 else 1
            out = block(f"{name}.conv1", f"{name}.bn1", x, stride, 1).relu()
            out = block(f"{name}.conv2", f"{name}.bn2", out, 1, 1)
            if f"{name}.shortcut.0.weight" in w:
                x = block(f"{name}.shortcut.0", f"{name}.shortcut.1", x, stride, 0)
            x = (out + x).relu()
    return F.linear(x.mean((2, 3)), w["linear.weight"], w["linear.bias"])


def vit(w: StateDict, x: torch.Tensor) -> torch.Tensor:
    """Logits of the ViT of networks.py, which needs transformers; pruned ones too."""
    module = build(f"{Path(__file__).with_name('networks.py')}:vit", device="cpu").module
    logits: torch.Tensor = with_tensors(module, w).eval()(x).logits
    return logits


def draw(labels: torch.Tensor, number: int, seed: int = 0) -> torch.Tensor:
    """Positions of `number` samples, drawn by seed, every class in proportion; in order.

    Test sets are often sorted by class: the first thousand images of CIFAR-10 show two classes.
    """
    if not 1 <= number <= len(labels):
        raise SystemExit(f"--limit {number}: there are {len(labels)} images")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    # How far through its class each sample stands; classes of any size are used up side by side.
    place = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        own = order[labels[order] == label]
        place[own] = (torch.arange(len(own), dtype=torch.float64) + 0.5) / len(own)
    chosen = order[place[order].argsort(stable=True)[:number]]
    return chosen.sort().values


def accuracy(w: StateDict, limit: int | None = None, seed: int = 0) -> float:
    """Percent of the test set, or of `limit` images of it, that a state dict gets right."""
    x, y = (mnist if "fc1.weight" in w else cifar)()
    if limit is None:
        return accuracy_on(w, x, y)
    chosen = draw(y, limit, seed)
    return accuracy_on(w, x[chosen], y[chosen])


def logits_on(w: StateDict, x: torch.Tensor) -> torch.Tensor:
    """What a state dict makes of images `x`."""
    forward = next(
        forward
        for name, forward in (
            ("fc1.weight", mlpnet),
            ("features.18.weight", vgg11),
            ("layer1.0.conv1.weight", resnet18),
            ("vit.layernorm.weight", vit),
        )
        if name in w
    )
    with torch.inference_mode():
        # So few at a time that what is computed stays in the cache: a third faster than by 500.
        return torch.cat([forward(w, part) for part in x.split(50)])


def accuracy_on(w: StateDict, x: torch.Tensor, y: torch.Tensor) -> float:
    """Percent of images `x` with labels `y` that it gets right."""
    return 100.0 * float((logits_on(w, x).argmax(1) == y).sum()) / len(y)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT")
    parser.add_argument("--limit", type=int, help="only N test images, of each class its share")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of --limit")
    arguments = parser.parse_args()
    for path in arguments.checkpoints:
        print(f"{accuracy(load(path), arguments.limit, arguments.seed):6.2f} %  {path}")
