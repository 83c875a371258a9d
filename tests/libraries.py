"""Libraries whose networks the tests merge, importable beside any build of torch.

torchvision's wheel is built for one torch; beside another one its compiled operators don't load,
and its import fails for two that it looks up. They are declared here, without an implementation,
which is all that building and tracing its classification networks needs. transformers and timm
import torchvision too.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Declare(MetaPathFinder):
    """Declares the operators when torchvision is first imported, if its own can't be loaded."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            if not _loads():
                self.library = torch.library.Library("torchvision", "DEF")
                for operator in _OPERATORS:
                    self.library.define(operator + _SIGNATURE)


_DECLARE = _Declare()


def _loads() -> bool:
    """Whether torchvision's compiled operators work with this torch (none can't be missed)."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return True
    try:
        torch.ops.load_library(Path(package.origin).with_name("_C.so"))
    except OSError:
        return False
    return True


def make_importable() -> None:
    """Let `import torchvision` work from now on."""
    sys.meta_path.insert(0, _DECLARE)


def torchvision_models() -> ModuleType:
    """`torchvision.models`; the test is skipped where the package is absent."""
    return pytest.importorskip("torchvision.models")


def timm() -> ModuleType:
    """timm, which imports torchvision; the test is skipped where the package is absent."""
    return pytest.importorskip("timm")
