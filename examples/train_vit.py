"""Train a ViT like those of the CIFAR-10 pair, but narrower or shallower.

    python examples/train_vit.py OUT.safetensors [--hidden 96] [--layers 6] [--epochs 4] [--seed 2]

Heads of 32, MLPs of twice the width; AdamW, one cosine, flips and 4-pixel crops. An epoch of 50,000
images takes eight minutes of one core at 96 and six layers. The data come from OTFUSE_SHARED (see
evaluate.py); needs transformers.
"""

from __future__ import annotations

import argparse
import math
import time

import evaluate
import torch
import torch.nn.functional as F
from networks import vit
from safetensors.torch import save_file
from torch import Tensor, nn

BATCH, RATE, DECAY = 128, 2e-3, 0.05


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """A batch, every image shifted by up to four pixels and flipped every other time."""
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    down, right = (torch.randint(0, 9, (count, 1), generator=generator) for _ in range(2))
    across = torch.arange(width)[None].expand(count, -1)
    flip = torch.rand(count, 1, generator=generator) < 0.5
    across = torch.where(flip, across.flip(1), across) + right
    rows = (torch.arange(height)[None] + down)[:, None, :, None]
    every = torch.arange(count)[:, None, None, None]
    channels = torch.arange(images.shape[1])[None, :, None, None]
    return padded[every, channels, rows, across[:, None, None, :]]


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    peak: float,
    epochs: int,
    seed: int,
    *,
    bfloat16: bool = False,
) -> None:
    """Train in place on CIFAR-10: a tenth of the steps to warm up, then a cosine to zero.

    `bfloat16`: products in that precision, weights and their updates in float32; convolutions
    take less than half the time where the processor has such products.
    """
    images, labels = evaluate.cifar("train")
    generator = torch.Generator().manual_seed(seed)
    steps, done, start = epochs * math.ceil(len(images) / BATCH), 0, time.perf_counter()
    for epoch in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator).split(BATCH):
            done += 1
            rate = peak * min(10 * done / steps, (1 + math.cos(math.pi * done / steps)) / 2)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                said = net(augmented(images[chosen], generator))
            logits = getattr(said, "logits", said).float()
            F.cross_entropy(logits, labels[chosen]).backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--hidden", type=int, default=96, help="a multiple of 32 (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=2, help="(%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    net, _ = vit(given.hidden, given.layers)
    train(
        net, torch.optim.AdamW(net.parameters(), weight_decay=DECAY), RATE, given.epochs, given.seed
    )
    state = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    save_file(state, given.out, metadata={"format": "pt"})
    images, labels = evaluate.cifar("test")
    with torch.inference_mode():
        said = torch.cat([net.eval()(part).logits.argmax(1) for part in images.split(50)])
    print(f"{100 * float((said == labels).double().mean()):.2f} % of the test images")


if __name__ == "__main__":
    main()
