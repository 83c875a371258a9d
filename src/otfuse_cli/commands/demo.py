"""`demo`: the main job on a bundled pair of digit classifiers, with nothing to download."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from ..checkpoint.open import open_checkpoint
from ..graph.model import LayerGraph
from ..graph.recognise import layer_graph
from ..network.mlp import accuracy, mlp_forward
from ..report import Report
from ..runtime import Progress, silent
from .merge import merge_tensors
from .parents import shapes_of
from .requests import DemoRequest, MergeRequest


def demo(request: DemoRequest, *, progress: Progress = silent) -> Report:
    """Fuse the bundled pair and measure parents, plain average and fused model on held-out digits.

    Raises:
        OtfuseError: A wrong option, or an output that is refused.
    """
    with ExitStack() as stack:
        folder = resources.files(__package__.rpartition(".")[0]) / "demo_pair"
        a, b, digits = (
            stack.enter_context(resources.as_file(folder / name))
            for name in ("a.safetensors", "b.safetensors", "digits.npz")
        )
        inputs, labels = _digits(digits)
        shared = {**vars(request), "checkpoints": (a, b)}
        fused, report = merge_tensors(MergeRequest(**shared), progress=progress)
        plain, _ = merge_tensors(MergeRequest(checkpoints=(a, b), align="none", device="cpu"))
        models: dict[str, Mapping[str, torch.Tensor]] = {}
        for name, path in (("parent a", a), ("parent b", b)):
            with open_checkpoint(path) as checkpoint:
                models[name] = {n: checkpoint.read(n) for n in checkpoint.infos}
                graph = layer_graph("auto", shapes_of(checkpoint))
        models |= {"plain average": plain, "fused": fused}
        scores = {name: _score(graph, tensors, inputs, labels) for name, tensors in models.items()}
    return replace(
        report,
        command="demo",
        inputs=tuple(replace(i, path=Path(i.path).name) for i in report.inputs),
        evaluation={"samples": len(labels), "accuracy": scores},
    )


def _digits(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The bundled test split: pixels from 0 to 1, and labels."""
    with np.load(path) as data:
        return torch.from_numpy(data["x"].astype(np.float32) / 16), torch.from_numpy(data["y"])


def _score(
    graph: LayerGraph,
    tensors: Mapping[str, torch.Tensor],
    inputs: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    return accuracy(mlp_forward(graph, tensors.__getitem__, inputs), labels)
