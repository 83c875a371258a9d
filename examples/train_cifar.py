"""Train a relative of a CIFAR-10 pair: shallower (depth.py), of other widths, or without BatchNorm.

    python examples/train_cifar.py resnet10w16|vgg9half|resnet18w16plain|... OUT.safetensors
        [--epochs 4] [--seed 2] [--bfloat16]

SGD with momentum, a rate that rises for a tenth of the steps and falls to zero along a cosine,
flips and 4-pixel crops. An epoch of 50,000 images takes some four minutes of one core, or one with
`--bfloat16`, as paper/ trains. The data come from OTFUSE_SHARED (see evaluate.py); the same torch
on the same machine writes the same bytes.
"""

from __future__ import annotations

import argparse

import depth
import evaluate
import networks
import torch
import train_vit
from safetensors.torch import save_file
from torch import nn

MOMENTUM, DECAY = 0.9, 5e-4
# Without BatchNorm a high rate never gets off the ground.
RATES = {
    "resnet10w16": 0.2,
    "resnet18w8plain": 0.05,
    "resnet18w16plain": 0.05,
    "resnet18w32plain": 0.05,
    "vgg9half": 0.05,
    "vgg11half": 0.05,
    "vgg11quarter": 0.05,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("network", choices=sorted(RATES))
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--epochs", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--bfloat16", action="store_true", help="products in that precision")
    given = parser.parse_args()
    torch.set_num_threads(1)
    state = trained(given.network, given.epochs, given.seed, bfloat16=given.bfloat16)
    save_file(state, given.out, metadata={"format": "pt"})
    test = evaluate.cifar("test")
    factory = getattr(networks, given.network)
    print(f"{depth.right(depth.logits(factory, state, test[0]), test):.2f} % of the test images")


def trained(
    network: str, epochs: int, seed: int, *, bfloat16: bool = False
) -> dict[str, torch.Tensor]:
    """A factory of networks.py with its weights trained."""
    torch.manual_seed(seed)
    net, _ = getattr(networks, network)()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    for module in net.modules():
        if isinstance(module, networks.Block) and isinstance(module.bn2, nn.Identity):
            # Else the stream grows with every block, and no rate trains it.
            module.conv2.weight.data *= 0.25
    train(net, RATES[network], epochs, seed, bfloat16=bfloat16)
    return {name: tensor.contiguous() for name, tensor in net.state_dict().items()}


def train(net: nn.Module, rate: float, epochs: int, seed: int, *, bfloat16: bool = False) -> None:
    """Train in place by SGD."""
    if bfloat16:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(
        net.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True
    )
    train_vit.train(net, optimizer, rate, epochs, seed, bfloat16=bfloat16)


if __name__ == "__main__":
    main()
