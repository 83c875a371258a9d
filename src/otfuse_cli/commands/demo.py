"""`demo`: the main job on a bundled pair of digit classifiers, with nothing to download."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from ..checkpoint.open import open_checkpoint
from ..checkpoint.publication import Publication
from ..report.records import Report
from ..requests.requests import DemoRequest, MergeRequest
from ..running.architecture import architecture
from ..running.evaluation import score
from ..running.factory import Network
from ..running.forward import logits
from ..running.samples import Samples
from ..runtime import Progress, silent
from ..session.find_architecture import shapes_of
from .merge import merge_tensors


def run_demo(request: DemoRequest, *, progress: Progress = silent) -> Report:
    """Fuse the bundled pair and measure parents, plain average and fused model on held-out digits.

    Raises:
        OtfuseError: A wrong option, or an output that is refused.
    """
    with Publication(overwrite=request.overwrite) as outputs, ExitStack() as stack:
        folder = resources.files(__package__.rpartition(".")[0]) / "demo_pair"
        a, b, digits = (
            stack.enter_context(resources.as_file(folder / name))
            for name in ("a.safetensors", "b.safetensors", "digits.npz")
        )
        samples = _digits(digits)
        shared = {**vars(request), "checkpoints": (a, b)}
        fused, report = merge_tensors(MergeRequest(**shared), progress=progress, outputs=outputs)
        plain, _ = merge_tensors(MergeRequest(checkpoints=(a, b), align="none", device="cpu"))
        models: dict[str, Mapping[str, torch.Tensor]] = {}
        for name, path in (("parent a", a), ("parent b", b)):
            with open_checkpoint(path) as checkpoint:
                models[name] = {n: checkpoint.read(n) for n in checkpoint.infos}
                network = architecture("mlp", shapes_of(checkpoint)).network
        models |= {"plain average": plain, "fused": fused}
        assert network is not None
        scores = {name: _accuracy(network, tensors, samples) for name, tensors in models.items()}
    return report.replace(
        command="demo",
        inputs=tuple(i.replace(path=Path(i.path).name) for i in report.inputs),
        evaluation={"samples": samples.count, "accuracy": scores},
    )


def _digits(path: Path) -> Samples:
    """The bundled test split: pixels from 0 to 1, and labels."""
    with np.load(path) as data:
        pixels = torch.from_numpy(data["x"].astype(np.float32) / 16)
        return Samples((pixels,), {}, torch.from_numpy(data["y"]))


def _accuracy(network: Network, tensors: Mapping[str, torch.Tensor], samples: Samples) -> float:
    return score(logits(network, tensors, samples), samples).accuracy
