"""Accuracy of a network of the demo's shape on otfuse's bundled digits; fails below a floor.

    python examples/ci/evaluate_digits.py CKPT [FLOOR]

Prints one line. Exits with 1 below FLOOR percent (default 90). Yours goes here.
"""

from __future__ import annotations

import sys
from importlib import resources

import numpy as np
import torch
from safetensors.torch import load_file

FLOOR = 90.0


def main(path: str, floor: float) -> int:
    with resources.as_file(resources.files("otfuse_cli") / "demo_pair" / "digits.npz") as file:
        digits = np.load(file)
        values, labels = torch.from_numpy(digits["x"]).float() / 16, torch.from_numpy(digits["y"])
    tensors = load_file(path)
    layers = sorted({name.split(".")[1] for name in tensors}, key=int)
    for at, layer in enumerate(layers):
        weight, bias = (tensors[f"layers.{layer}.{part}"] for part in ("weight", "bias"))
        values = torch.nn.functional.linear(values, weight, bias)
        values = torch.relu(values) if at + 1 < len(layers) else values
    accuracy = 100 * (values.argmax(1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.2f}")
    return int(accuracy < floor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else FLOOR))
