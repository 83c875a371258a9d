"""Fuse trained neural-network checkpoints into one, by optimal transport.

The verbs of the command line as functions. They take paths or state dicts (mappings of names to
tensors; a module gives its own) and the command line's options as keywords, in the types that are
natural in Python, print nothing, and raise `OtfuseError`.
Nothing heavy is imported before the first call. `align(source, anchor)` matches two layers
(`matching.layers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import OtfuseError

if TYPE_CHECKING:
    import torch

    from .report.records import Report
    from .requests.requests import Source

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


def __getattr__(name: str) -> Any:
    """The report's type, once it is asked for: its many records take a while to be made."""
    if name != "Report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .report.records import Report

    return Report


def merge(*checkpoints: Source, **options: Any) -> tuple[dict[str, torch.Tensor], Report]:
    """Fuse two or more models into the shape of the anchor (the last, unless `anchor` says).

    Args:
        checkpoints: Paths or state dicts, or one sequence of them.
        options: Fields of `MergeRequest`, for example `weights=[0.7, 0.3]`, `anchor=0` or
            `arch={0: make_wide, 1: make_narrow}`; with `output` the fused model is written too.

    Returns:
        The fused state dict and the report.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.merge import merge_tensors
    from .requests import keywords
    from .requests.requests import MergeRequest

    sources = keywords.checkpoints(checkpoints)
    return merge_tensors(keywords.request(MergeRequest, checkpoints=sources, **options))


def align(source: torch.Tensor, anchor: torch.Tensor, **options: Any) -> Any:
    """Match the units of two layers: their plan, their map, what it costs.

    Args:
        source: Weights, a row per unit.
        anchor: The same of the other layer.
        options: As `matching.layers.align_layers` takes them.

    Raises:
        OtfuseError: Rows that can't be compared, options that can't be.
    """
    from .matching.layers import align_layers

    return align_layers(source, anchor, **options)


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
    from .requests import keywords
    from .requests.requests import PruneFuseRequest

    request = keywords.request(PruneFuseRequest, dense=dense, pruned=pruned, **options)
    return prune_fuse_tensors(request)


def prune(checkpoint: Source, **options: Any) -> tuple[dict[str, torch.Tensor], Report]:
    """Remove whole units, or blocks, from a network; the result is smaller.

    Args:
        checkpoint: Path or state dict.
        options: Fields of `PruneRequest`, for example `amount=0.5`, `criterion="ot"`,
            `layer={"fc1": 0.9}` or `depth=2`; with `output` the pruned model is written too.

    Returns:
        The pruned state dict and the report.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.prune import prune_tensors
    from .requests import keywords
    from .requests.requests import PruneRequest

    return prune_tensors(keywords.request(PruneRequest, checkpoint=checkpoint, **options))


def inspect(*checkpoints: Source, **options: Any) -> Report:
    """Describe one model, or compare several with the anchor.

    Args:
        checkpoints: Paths or state dicts.
        options: Fields of `InspectRequest`, for example `ot_costs=True`.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.inspect import run_inspect as verb
    from .requests import keywords
    from .requests.requests import InspectRequest

    sources = keywords.checkpoints(checkpoints)
    return verb(keywords.request(InspectRequest, checkpoints=sources, **options))


def check(checkpoint: Source, arch: Any, **options: Any) -> Report:
    """Prove a layer graph on the network that `arch` names, or is (its code is executed).

    Args:
        checkpoint: Path or state dict.
        arch: `pkg.mod:factory`, `file.py:factory`, `graph.pt2`, `hf:DIR`, ..., a function that
            returns a module, or a module.
        options: Fields of `CheckRequest`, for example `spec="net.yaml"`.

    Raises:
        GateFailed: The graph is wrong; carries the report.
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.check import run_check as verb
    from .requests import keywords
    from .requests.requests import CheckRequest

    return verb(keywords.request(CheckRequest, checkpoint=checkpoint, arch=arch, **options))


def evaluate(*checkpoints: Source, samples: Any, **options: Any) -> Report:
    """Measure models on labelled samples; the numbers are in the report's `evaluation`.

    Args:
        checkpoints: Paths or state dicts.
        samples: A file, `file.py:loader`, (inputs, labels), or a mapping of names to arrays.
        options: Fields of `EvaluateRequest`, for example `arch="net.py:make_net"`.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.evaluate import run_evaluate as verb
    from .requests import keywords
    from .requests.requests import EvaluateRequest

    sources = keywords.checkpoints(checkpoints)
    options |= {"checkpoints": sources, "samples": samples}
    return verb(keywords.request(EvaluateRequest, **options))


def curve(source: Source, anchor: Source, *others: Source, samples: Any, **options: Any) -> Report:
    """Measure what lies between two models; the numbers are in the report's `evaluation`.

    Args:
        source: Path or state dict; it is aligned to the anchor.
        anchor: Path or state dict; it has the weight 1 at the end of the curve.
        others: More of them, for `over="width"`, whose widths are relative to the last.
        samples: As for `evaluate`.
        options: Fields of `CurveRequest`, for example `steps=21`.

    Raises:
        OtfuseError: With the exit code that the command would have.
    """
    from .commands.curve import run_curve as verb
    from .requests import keywords
    from .requests.requests import CurveRequest

    options |= {"checkpoints": (source, anchor, *others), "samples": samples}
    return verb(keywords.request(CurveRequest, **options))
