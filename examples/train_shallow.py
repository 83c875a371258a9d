"""Train a shallower relative of a CIFAR-10 pair, for `depth.py`.

    python examples/train_shallow.py resnet10w16|vgg9half OUT.safetensors [--epochs 4] [--seed 2]

SGD with momentum, a rate that rises for a tenth of the steps and falls to zero along a cosine,
flips and 4-pixel crops. An epoch of 50,000 images takes some four minutes of one core. The data
come from OTFUSE_SHARED (see evaluate.py); the same torch on the same machine writes the same bytes.
"""

from __future__ import annotations

import argparse
import math
import time

import depth
import evaluate
import networks
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from train_vit import augmented

BATCH, MOMENTUM, DECAY = 128, 0.9, 5e-4
# Without BatchNorm a high rate never gets off the ground.
RATES = {"resnet10w16": 0.2, "vgg9half": 0.05}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("network", choices=sorted(RATES))
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--epochs", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=2, help="(%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    factory = getattr(networks, given.network)
    net, _ = factory()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    train(net, RATES[given.network], given.epochs, given.seed)
    state = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    save_file(state, given.out, metadata={"format": "pt"})
    test = evaluate.cifar("test")
    print(f"{depth.right(depth.logits(factory, state, test[0]), test):.2f} % of the test images")


def train(net: nn.Module, rate: float, epochs: int, seed: int) -> None:
    """Train in place."""
    images, labels = evaluate.cifar("train")
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True
    )
    steps, done, start = epochs * math.ceil(len(images) / BATCH), 0, time.perf_counter()
    for epoch in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator).split(BATCH):
            done += 1
            now = rate * min(10 * done / steps, (1 + math.cos(math.pi * done / steps)) / 2)
            for group in optimizer.param_groups:
                group["lr"] = now
            optimizer.zero_grad()
            F.cross_entropy(net(augmented(images[chosen], generator)), labels[chosen]).backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
