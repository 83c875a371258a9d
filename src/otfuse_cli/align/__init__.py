"""From a pair of graphs to maps to aligned tensors.

The room is also a verb: `otfuse_cli.align(source, anchor)` matches two layers.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verb(ModuleType):
    """This package, callable: the library's verb has the name of the room it lives in."""

    def __call__(self, source: Any, anchor: Any, **options: Any) -> Any:
        """Match two layers; see `align.layers.align_layers`."""
        from .layers import align_layers

        return align_layers(source, anchor, **options)


sys.modules[__name__].__class__ = _Verb
