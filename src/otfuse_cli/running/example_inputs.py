"""Inputs to trace a module on: those that its factory gives, or guessed from its first layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import IncompatibleModels
from ..graph.trace.export_settings import eval_mode
from .diffusers_inputs import diffusers_inputs
from .transformers_inputs import image_sides, transformers_inputs

# Sizes of images to try, the usual ones of data sets first; what a network is built for decides.
_SIDES = (32, 64, 224, 28, 96, 299)
_SIDES_3D = (16, 32)


def example_inputs(
    module: nn.Module, inputs: Any, where: str, device: str
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments and keywords of a call: `inputs` as a factory returns them, or guessed.

    Raises:
        IncompatibleModels: There are none, and the module accepts no guess.
    """
    if inputs is None:
        return _guess(module, where, device)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _guess(module: nn.Module, where: str, device: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Example inputs from the first layer; the first that the module accepts."""
    tried = []
    with torch.device(device), torch.no_grad():
        for args, kwargs in _candidates(module):
            try:
                with eval_mode(module):
                    module(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever the user's forward raises
                tried.append(str(error).strip().partition("\n")[0])
                continue
            return args, kwargs
    raise IncompatibleModels(
        "no example inputs",
        where=where,
        why=f"guessed ones did not run: {tried[-1]}" if tried else "its first layer is unknown",
        fix="let the factory return the module and example inputs: return net, (x,)",
    )


def _candidates(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    for keywords in (*transformers_inputs(module), *diffusers_inputs(module)):
        yield (), keywords
    if dummy := getattr(module, "dummy_inputs", None):
        main = getattr(module, "main_input_name", None)
        yield (), {k: v for k, v in dummy.items() if main in (None, k)}
    for layer in module.modules():
        match layer:
            case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
                axes = len(layer.kernel_size)
                usual = [(size,) * axes for size in (_SIDES if axes < 3 else _SIDES_3D)]
                for sides in (*(s for s in _sizes_said(module) if len(s) == axes), *usual):
                    yield (torch.rand(2, layer.in_channels, *sides),), {}
                return
            case nn.Linear():
                yield (torch.rand(2, layer.in_features),), {}
                yield (torch.rand(2, 5, layer.in_features),), {}
                return
            case nn.Embedding():
                yield (torch.zeros(2, 7, dtype=torch.long),), {}
                yield (), {"input_ids": torch.zeros(2, 7, dtype=torch.long)}
                return
            case nn.LSTM() | nn.GRU() | nn.RNN():
                yield (torch.rand(3, 2, layer.input_size),), {}
                return


def _sizes_said(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Sizes of images that a network names: of transformers, torchvision or timm."""
    for holder in (getattr(module, "config", None), module):
        if sides := image_sides(holder):
            yield sides
    settings = getattr(module, "default_cfg", None)
    if isinstance(settings, Mapping) and settings.get("input_size"):
        yield tuple(settings["input_size"][1:])
