"""Train the bundled pair of digit classifiers (what `otfuse demo` fuses) and write it out.

    python examples/train_digits.py [FOLDER]

Two MLPs 64-48-32-10 learn scikit-learn's 8x8 digits from different seeds: a.safetensors,
b.safetensors. The quarter of the digits that neither has seen goes to digits.npz: `x` (n, 64) in
grey levels 0..16, `y` (n,). The networks read x / 16. FOLDER defaults to the package's own.
Needs the `dev` extra; the same torch on the same machine writes the same bytes.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits

PACKAGED = Path(__file__).parents[1] / "src" / "otfuse_cli" / "demo_pair"
SEEDS = {"a": 2, "b": 4}
HELD_OUT = 450
EPOCHS = 60
BATCH = 64
NOISE = 0.2  # on inputs in 0..1: the smallest remedy against overfitting 1,347 images


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    x = torch.from_numpy(digits.data).float() / 16
    y = torch.from_numpy(digits.target)

    folder.mkdir(parents=True, exist_ok=True)
    nets = {name: fit(x[train], y[train], seed) for name, seed in SEEDS.items()}
    for name, net in nets.items():
        save_file(net.state_dict(), folder / f"{name}.safetensors", metadata={"format": "pt"})
        print(f"{name}: {accuracy(net, x[test], y[test]):.2f} % of {HELD_OUT} unseen digits")
    np.savez_compressed(
        folder / "digits.npz",
        x=digits.data[test].astype(np.uint8),
        y=digits.target[test].astype(np.uint8),
    )


def fit(x: torch.Tensor, y: torch.Tensor, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, 48),
        torch.nn.ReLU(),
        torch.nn.Linear(48, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 10),
    )
    net = torch.nn.Sequential(OrderedDict(layers=layers))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):
            noisy = x[batch] + NOISE * torch.randn(len(batch), 64, generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(noisy), y[batch]).backward()
            optimizer.step()
    return net


def accuracy(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return 100 * float((net(x).argmax(dim=1) == y).double().mean())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGED)
