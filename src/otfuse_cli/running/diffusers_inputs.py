"""Example inputs of a diffusers module, from its config and what its forward pass takes.

Imports nothing of diffusers: a module of its is told by its config, a mapping with `_class_name`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_BATCH, _WORDS = 2, 5
_SIDE = 32  # where the config names none


def diffusers_inputs(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Keywords to try; none for a module that is not of diffusers or takes what isn't known."""
    config = getattr(module, "config", None)
    if not isinstance(config, Mapping) or "_diffusers_version" not in config:
        return
    keywords: dict[str, Any] = {}
    for name, parameter in inspect.signature(module.forward).parameters.items():
        made = _MAKERS[name](config) if name in _MAKERS else None
        if made is not None:
            keywords[name] = made
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            return
    yield keywords


def _image(config: Mapping[str, Any]) -> Tensor | None:
    channels, side = config.get("in_channels"), config.get("sample_size") or _SIDE
    sides = (side, side) if isinstance(side, int) else tuple(side)
    return torch.rand(_BATCH, channels, *sides) if isinstance(channels, int) else None


def _times(config: Mapping[str, Any]) -> Tensor:
    return torch.arange(1, _BATCH + 1)


def _words(config: Mapping[str, Any]) -> Tensor | None:
    for name in ("cross_attention_dim", "joint_attention_dim", "caption_channels"):
        if isinstance(size := config.get(name), int):
            return torch.rand(_BATCH, _WORDS, size)
    return None


def _pooled(config: Mapping[str, Any]) -> Tensor | None:
    size = config.get("pooled_projection_dim")
    return torch.rand(_BATCH, size) if isinstance(size, int) else None


def _classes(config: Mapping[str, Any]) -> Tensor | None:
    wanted = config.get("num_embeds_ada_norm") or config.get("num_class_embeds")
    return torch.zeros(_BATCH, dtype=torch.long) if wanted else None


_MAKERS = {
    "sample": _image,
    "hidden_states": _image,
    "timestep": _times,
    "encoder_hidden_states": _words,
    "pooled_projections": _pooled,
    "class_labels": _classes,
}
