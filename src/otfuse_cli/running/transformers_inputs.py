"""Example inputs of a transformers module, from its config and what its forward pass takes.

Imports nothing of transformers: a module of its is told by its config.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_BATCH, _LENGTH, _TARGET = 2, 7, 5
# Samples of sound: a few frames, whatever the strides.
_SOUND = 4_000
_FRAMES = 64


def transformers_inputs(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Keywords to try, most complete first; none for a module that is not of transformers."""
    config = getattr(module, "config", None)
    main = getattr(module, "main_input_name", None)
    if config is None or not isinstance(main, str):
        return
    taken = inspect.signature(module.forward).parameters
    every = {name: made for name, make in _MAKERS.items() if (made := make(config)) is not None}
    if main not in every:
        return
    target: dict[str, Any] = {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        target = {"decoder_input_ids": _tokens(_TARGET)}
    # Models of two kinds of inputs need both; others would be given too much.
    both: dict[str, Any] = {
        name: every[name] for name in ("input_ids", "pixel_values") if name in every
    }
    if len(both) == 2 and both.keys() <= taken.keys():
        yield {**both, **target}
    yield {main: every[main], **target}


def image_sides(holder: object) -> tuple[int, ...]:
    """Height and width that a module or a config names as `image_size`; empty for none."""
    said = getattr(holder, "image_size", None)
    sides = (said, said) if isinstance(said, int) else said
    if isinstance(sides, tuple | list) and all(isinstance(side, int) for side in sides):
        return tuple(sides)
    return ()


def _tokens(length: int) -> Tensor:
    # Ids that every vocabulary has, and none of the special ones that end or pad a text.
    return torch.arange(_BATCH * length).reshape(_BATCH, length) % 5 + 5


def _input_ids(config: Any) -> Tensor:
    return _tokens(_LENGTH)


def _pixel_values(config: Any) -> Tensor | None:
    """An image of the size that the config, or the part of it for images, names."""
    vision = getattr(config, "vision_config", config)
    sides = image_sides(vision)
    return torch.rand(_BATCH, getattr(vision, "num_channels", 3), *sides) if sides else None


def _input_values(config: Any) -> Tensor | None:
    """Sound, or for transformers of spectrograms frames of it."""
    if (length := getattr(config, "max_length", None)) and hasattr(config, "num_mel_bins"):
        return torch.rand(_BATCH, length, config.num_mel_bins)
    return torch.rand(_BATCH, _SOUND) if hasattr(config, "conv_kernel") else None


def _input_features(config: Any) -> Tensor | None:
    """A spectrogram: channels first where its length is fixed, else frames first."""
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return torch.rand(_BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    for name in ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins"):
        if isinstance(size := getattr(config, name, None), int):
            return torch.rand(_BATCH, _FRAMES, size)
    return None


_MAKERS = {
    "input_ids": _input_ids,
    "pixel_values": _pixel_values,
    "input_values": _input_values,
    "input_features": _input_features,
}
