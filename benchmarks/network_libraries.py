"""Networks of torchvision and timm: which are taken, how they are built, what they are run on."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from otfuse_cli.running.user_code import find_callable

SIDES = (64, 96, 128, 160, 192, 224, 256, 299, 320, 384, 448, 512)
CANDIDATES = 4  # members of a family of timm whose parameters are counted


def make_importable() -> None:
    """Let torchvision be imported beside any torch, and its detectors run."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import libraries

    libraries.make_importable()
    import torchvision

    if not torchvision.extension._has_ops():
        _define_operators()


def _define_operators() -> None:
    """What torchvision's detectors call, in Python, as its own operators are where they load."""
    from torchvision.ops import boxes, roi_align

    region = roi_align.__globals__
    torch.library.impl("torchvision::nms", "CPU", func=_nms)
    torch.library.define(
        "torchvision::roi_align",
        "(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor",
    )
    torch.library.impl("torchvision::roi_align", "CPU", func=region["_roi_align"].__wrapped__)
    torch.library.register_fake("torchvision::roi_align", _regions)
    boxes._assert_has_ops = region["_assert_has_ops"] = lambda: None
    region["_has_ops"] = lambda: True


def _regions(features: torch.Tensor, rois: torch.Tensor, scale: float, *size: Any) -> torch.Tensor:
    """The shape of (boxes, channels, height, width), from (n, channels, h, w) and (boxes, 5)."""
    return features.new_empty(len(rois), features.shape[1], size[0], size[1])


def _nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Non-maximum suppression, one box after the other."""
    from torchvision.ops import box_iou

    waiting = scores.argsort(descending=True, stable=True)
    kept = []
    while len(waiting):
        best, waiting = waiting[0], waiting[1:]
        kept.append(best)
        overlap = box_iou(dets[best][None], dets[waiting])[0]
        waiting = waiting[overlap <= iou_threshold]
    return torch.stack(kept) if kept else scores.new_zeros(0, dtype=torch.long)


def chosen_members(
    families: Mapping[str, Sequence[str]],
    count: int,
    seed: int,
    size: Callable[[str], float],
) -> list[str]:
    """Of every family the smallest of a few members drawn, then the smallest others drawn.

    Args:
        families: Members by family.
        count: How many, at least one of each family.
        seed: Of the draw.
        size: Parameters of a member, infinite where it can't be built.
    """
    draw = random.Random(seed)
    first: list[str] = []
    others: list[str] = []
    for family in sorted(families):
        members = sorted(families[family])
        drawn = draw.sample(members, min(CANDIDATES, len(members)))
        smallest, *rest = sorted(drawn, key=lambda name: (size(name), name))
        first.append(smallest)
        others += rest
    others.sort(key=lambda name: (size(name), name))
    return first + others[: max(0, count - len(first))]


def timm_families() -> dict[str, list[str]]:
    """Members of every module of timm."""
    import timm

    listed = {module: timm.list_models(module=module) for module in timm.list_modules()}
    return {module: names for module, names in listed.items() if names}


def torchvision_names() -> list[str]:
    """Everything that torchvision lists."""
    from torchvision.models import list_models

    return list(list_models())


def family_of(name: str) -> str:
    """The module of the library that LIBRARY/NAME comes from."""
    library, _, inner = name.partition("/")
    if library == "timm":
        from timm.models import model_entrypoint

        return str(model_entrypoint(inner).__module__)
    from torchvision.models import get_model_builder

    return str(get_model_builder(inner).__module__)


def build_torchvision(name: str) -> nn.Module:
    """A network without weights, its backbone without weights too."""
    slow = ("googlenet", "inception_v3", "quantized_googlenet", "quantized_inception_v3")
    # Their truncated normal draws by SciPy take a minute.
    options = ",init_weights=False" if name in slow else ""
    network: nn.Module = find_callable(f"torchvision:{name}{options}")()
    resize = getattr(network, "transform", None)
    if resize is not None and resize.fixed_size is None:  # detectors enlarge what they are given
        resize.min_size, resize.max_size = (128,), 128
    return network.eval()


def build_timm(name: str) -> nn.Module:
    """A network without weights."""
    network: nn.Module = find_callable(f"timm:{name}")()
    return network.eval()


def candidate_inputs(library: str, name: str, network: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Arguments to try, the smallest first."""
    if library == "torchvision":
        yield from _torchvision_inputs(name)
        return
    config = getattr(network, "pretrained_cfg", {})
    channels, *_ = config.get("input_size", (3, 224, 224))
    sides = [s for s in SIDES if s <= max(config.get("input_size", (3, 224, 224))[1:])]
    for side in sides or SIDES:
        yield (torch.randn(2, channels, side, side),)
    yield (torch.randn(2, *config.get("input_size", (3, 224, 224))),)


def _torchvision_inputs(name: str) -> Iterator[tuple[Any, ...]]:
    if "raft" in name:
        yield torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)
    elif "rcnn" in name or "retina" in name or "fcos" in name or "ssd" in name:
        yield ([torch.rand(3, 64, 64)],)
    elif name in ("r3d_18", "mc3_18", "r2plus1d_18", "swin3d_t", "swin3d_s", "swin3d_b"):
        yield (torch.randn(2, 3, 4, 64, 64),)
    elif name in ("s3d", "mvit_v1_b", "mvit_v2_s"):
        for side in (64, 224):
            yield (torch.randn(1, 3, 16, side, side),)
    else:
        for side in SIDES:
            yield (torch.randn(2, 3, side, side),)
