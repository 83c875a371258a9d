"""Libraries whose networks the tests merge, imported so that they load beside any torch."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import pytest
import torch


@cache
def _declare_operators() -> torch.library.Library | None:
    """Declare two compiled operators, which torchvision looks up at import, where they can't load.

    The wheel is built for another torch than the CPU build; only these two are missed.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    except ImportError:
        return None
    return None


def torchvision_models() -> ModuleType:
    """`torchvision.models`; the test is skipped where the package is absent."""
    _declare_operators()
    return pytest.importorskip("torchvision.models")


def timm() -> ModuleType:
    """timm, which imports torchvision; the test is skipped where the package is absent."""
    _declare_operators()
    return pytest.importorskip("timm")
