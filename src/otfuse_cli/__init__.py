"""Fuse trained neural-network checkpoints into one, by optimal transport.

The verbs of the command line as functions. They take paths or state dicts (mappings of names to
tensors) and the command line's options as keywords, print nothing, and raise `OtfuseError`.
Nothing heavy is imported before the first call. `align(source, anchor)` matches two layers
(`align.layers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Loaded before `def prune`, which takes its name: the first import of a room binds it here.
from . import align
from . import prune as _room  # noqa: F401
from .errors import OtfuseError
from .report import Report

if TYPE_CHECKING:
    import torch

    from .commands.requests import Source

__version__ = "0.1.0"

__all__ = [
    "OtfuseError",
    "Report",
    "__version__",
    "align",
    "check",
    "curve",
    "evaluate",
    "inspect",
    "merge",
    "prune",
    "prune_fuse",
]


def merge(*checkpoints: Source, **options: Any) -> tuple[dict[str, torch.Tensor], Report]:
    """Fuse two or more models into the shape of the anchor (the last, unless `anchor` says).

    Args:
        checkpoints: Paths or state dicts.
        options: Fields of `MergeRequest`; with `output` the fused model is written too.

    Returns:
        The fused state dict and the report.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.merge import merge_tensors
    from .commands.requests import MergeRequest

    return merge_tensors(MergeRequest(checkpoints=checkpoints, **options))


def prune_fuse(
    dense: Source, pruned: Source, **options: Any
) -> tuple[dict[str, torch.Tensor], Report]:
    """Fuse a dense network into its pruned version; the result has the pruned one's shape.

    Args:
        dense: Path or state dict.
        pruned: Path or state dict.
        options: Fields of `PruneFuseRequest`; with `output` the fused model is written too.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.prune_fuse import prune_fuse_tensors
    from .commands.requests import PruneFuseRequest

    return prune_fuse_tensors(PruneFuseRequest(dense=dense, pruned=pruned, **options))


def prune(checkpoint: Source, **options: Any) -> tuple[dict[str, torch.Tensor], Report]:
    """Remove whole units from a network; the result is smaller.

    Args:
        checkpoint: Path or state dict.
        options: Fields of `PruneRequest`, for example `amount=0.5`, `criterion="ot"` or
            `layer={"fc1": 0.9}`; with `output` the pruned model is written too.

    Returns:
        The pruned state dict and the report.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.prune import prune_tensors
    from .commands.requests import PruneRequest

    return prune_tensors(PruneRequest(checkpoint=checkpoint, **options))


def inspect(*checkpoints: Source, **options: Any) -> Report:
    """Describe one model, or compare several with the anchor.

    Args:
        checkpoints: Paths or state dicts.
        options: Fields of `InspectRequest`, for example `ot_costs=True`.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.inspect import inspect as verb
    from .commands.requests import InspectRequest

    return verb(InspectRequest(checkpoints=checkpoints, **options))


def check(checkpoint: Source, arch: str, **options: Any) -> Report:
    """Prove a layer graph on the network that `arch` names (its code is executed).

    Args:
        checkpoint: Path or state dict.
        arch: `pkg.mod:factory`, `file.py:factory`, `graph.pt2`, `hf:DIR`, ...
        options: Fields of `CheckRequest`, for example `spec="net.yaml"`.

    Raises:
        GateFailed: The graph is wrong; carries the report.
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.check import check as verb
    from .commands.requests import CheckRequest

    return verb(CheckRequest(checkpoint=checkpoint, arch=arch, **options))


def evaluate(*checkpoints: Source, samples: Any, **options: Any) -> Report:
    """Measure models on labelled samples; the numbers are in the report's `evaluation`.

    Args:
        checkpoints: Paths or state dicts.
        samples: A file, `file.py:loader`, (inputs, labels), or a mapping of names to arrays.
        options: Fields of `EvaluateRequest`, for example `arch="net.py:make_net"`.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.evaluate import evaluate as verb
    from .commands.requests import EvaluateRequest

    return verb(EvaluateRequest(checkpoints=checkpoints, samples=samples, **options))


def curve(source: Source, anchor: Source, *, samples: Any, **options: Any) -> Report:
    """Measure what lies between two models; the numbers are in the report's `evaluation`.

    Args:
        source: Path or state dict; it is aligned to the anchor.
        anchor: Path or state dict; it has the weight 1 at the end of the curve.
        samples: As for `evaluate`.
        options: Fields of `CurveRequest`, for example `steps=21`.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.curve import curve as verb
    from .commands.requests import CurveRequest

    return verb(CurveRequest(checkpoints=(source, anchor), samples=samples, **options))
