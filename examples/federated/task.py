"""MNIST for a federation: parts of the clients, the network, local training, test accuracy."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import evaluate

CLIENTS = 10
# Hidden widths: of the global model and of clients that have its widths; of the three kinds.
EQUAL = (128, 64)
THREE = ((64, 32), (128, 64), (192, 96))
SKEW = 0.3  # of the Dirichlet distribution of every class over the clients
RATE, BATCH = 0.1, 32


class Net(nn.Module):
    """Two hidden layers with ReLU."""

    def __init__(self, hidden: tuple[int, ...] = EQUAL) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(self.fc2(self.fc1(x).relu()).relu())


def hidden_of(client: int, widths: str) -> tuple[int, ...]:
    """Hidden widths of a client's model."""
    return THREE[client % len(THREE)] if widths == "three" else EQUAL


def start(seed: int, hidden: tuple[int, ...] = EQUAL) -> Net:
    """A network with initial weights of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(hidden)


@cache
def data(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels, read once in a process."""
    return evaluate.mnist(split)


@cache
def parts(kind: str, images: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Indices of the training images of each client, some `images` in all.

    `equal`: each client has equally many, of all classes. `skewed`: of every class, clients have
    shares from a Dirichlet distribution.
    """
    generator = np.random.default_rng(seed)
    labels = data("train")[1].numpy()
    chosen = generator.permutation(len(labels))[:images]
    if kind == "equal":
        return tuple(torch.from_numpy(part) for part in np.array_split(chosen, CLIENTS))
    of_client: list[list[np.ndarray]] = [[] for _ in range(CLIENTS)]
    for label in range(10):
        of_class = chosen[labels[chosen] == label]
        shares = generator.dirichlet([SKEW] * CLIENTS)
        cuts = (np.cumsum(shares)[:-1] * len(of_class)).astype(int)
        for client, part in enumerate(np.split(of_class, cuts)):
            of_client[client].append(part)
    return tuple(torch.from_numpy(np.concatenate(part)) for part in of_client)


def train(net: Net, part: torch.Tensor, epochs: int, seed: int) -> float:
    """Plain SGD; the mean loss of the last epoch."""
    images, labels = data("train")
    optimiser = torch.optim.SGD(net.parameters(), RATE)
    order = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        for batch in part[torch.randperm(len(part), generator=order)].split(BATCH):
            optimiser.zero_grad()
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
    return sum(losses) / max(1, len(losses))


def accuracy(tensors: dict[str, torch.Tensor]) -> float:
    """Percent of the 10,000 test images."""
    return evaluate.accuracy_on(tensors, *data("test"))
