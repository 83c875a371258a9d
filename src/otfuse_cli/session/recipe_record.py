"""The recipe of a fusion as the report holds it: every option that shaped the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..requests.recipe import Recipe
from ..requests.requests import ImproveOptions, MergeRequest
from ..runtime import Runtime
from .architectures import arch_record
from .merge_plan import MergePlan


def recipe_record(plan: MergePlan, recipe: Recipe, runtime: Runtime) -> dict[str, Any]:
    """Options by name, plain JSON values."""
    options, target = plan.options, plan.target
    own = _own_record(options) if isinstance(options, MergeRequest) else {}
    rules = [{"pattern": pattern, "weights": list(weights)} for pattern, weights in plan.rules]
    return {
        **recipe.to_dict(),
        "weights": list(plan.weights),
        "anchor": plan.anchor_index,
        "arch": arch_record(options.arch, len(plan.checkpoints)),
        "paper": options.paper,
        **_inputs_record(options),
        "strict": options.strict,
        "vocab": options.vocab,
        **own,
        "weight_rules": rules,
        "skip": list(target.skip),
        "only": list(target.only),
        "keep_extras": target.keep_extras,
        "shard_size": target.shard_size,
        "dtype": target.dtype,
        "device": runtime.device,
    }


def _own_record(options: MergeRequest) -> dict[str, Any]:
    """What `merge` alone takes."""
    return {
        "untie": options.untie,
        "width": options.width,
        "layer": dict(options.layer or {}),
        "width_multiple": options.width_multiple,
    }


def _inputs_record(options: ImproveOptions) -> dict[str, Any]:
    """Which inputs were used, and what for."""
    samples = options.samples
    return {
        "samples": str(samples) if isinstance(samples, str | Path) else None,
        "synthetic": options.synthetic,
        "synthetic_kind": options.synthetic_kind,
        "synthetic_steps": options.synthetic_steps,
        "num_samples": options.num_samples,
        "input_shape": options.input_shape,
        "refit": options.refits,
        "ridge": options.ridge,
        "blend": options.blending,
        "require_gain": options.require_gain,
        "calibrate": options.calibration,
    }
