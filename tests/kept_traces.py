"""Networks that are exported once for all tests that ask for it (`kept_graphs`).

What torch exports is a function of a network's code, settings, shapes and buffers, and of no weight
or input: those are fake tensors then. A test of what comes after may take what an earlier test
exported, which is most of what a merge costs. Whatever can't be compared with certainty is exported
again: closures, long buffers, objects of any kind but those below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.modules.module import _WrappedHook
from torch.utils import _pytree as pytree

from otfuse_cli.graph.model import LayerGraph

PLAIN = (
    int, float, str, bool, bytes, type(None), BuiltinFunctionType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
# What a module keeps for itself, and where transformers read it; what is held has its own keys.
WITHIN = ("_parameters", "_buffers", "_modules", "training", "name_or_path")
LONGEST = 4096  # numbers of a buffer, which are compared by value
GRAPHS: dict[object, LayerGraph] = {}
PROGRAMS: dict[object, ExportedProgram] = {}


class Unknown(Exception):
    """An object that two networks can't be compared by."""


def kept_graphs(trace: Callable[..., LayerGraph]) -> Callable[..., LayerGraph]:
    """`trace` that looks first whether the same network was traced before."""

    def traced(
        module: nn.Module, args: Any = (), kwargs: Any = None, *, source: str = "", **options: Any
    ) -> LayerGraph:
        try:
            key = network_key(module, (args, dict(kwargs or {})), options)
        except Unknown:
            return trace(module, args, kwargs, source=source, **options)
        if key not in GRAPHS:
            GRAPHS[key] = trace(module, args, kwargs, **options)
        return replace(GRAPHS[key], source=source)

    return traced


def kept_programs(export: Callable[..., ExportedProgram]) -> Callable[..., ExportedProgram]:
    """`export` that looks first whether the same network was exported before."""

    def exported(
        module: nn.Module, args: Any = (), kwargs: Any = None, **options: Any
    ) -> ExportedProgram:
        try:
            key = network_key(module, (args, dict(kwargs or {})), options)
        except Unknown:
            return export(module, args, kwargs, **options)
        if key not in PROGRAMS:
            PROGRAMS[key] = export(module, args, kwargs, **options)
        return PROGRAMS[key]

    return exported


def network_key(module: nn.Module, inputs: object, options: Mapping[str, Any]) -> object:
    """All that an export depends on, to be compared.

    Raises:
        Unknown: The network has something that can't be compared.
    """
    numbers: dict[int, int] = {}
    tensors = []
    for name, tensor in module.named_parameters(remove_duplicate=False):
        # Which names share one tensor is the network's as well.
        number = numbers.setdefault(id(tensor), len(numbers))
        tensors.append((name, number, tensor.requires_grad, _outside(tensor)))
    for name, tensor in module.named_buffers(remove_duplicate=False):
        number = numbers.setdefault(id(tensor), len(numbers))
        tensors.append((name, number, False, _comparable(tensor)))
    layers = []
    for name, part in module.named_modules(remove_duplicate=False):
        own = {k: v for k, v in vars(part).items() if k not in WITHIN}
        layers.append((name, _code(type(part)), tuple(part._modules), _comparable(own)))
    leaves, form = pytree.tree_flatten(inputs)
    given = [_outside(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    said = _comparable(given), repr(form), _comparable(options)
    return tuple(layers), tuple(tensors), tuple(module.state_dict()), said


def _outside(tensor: torch.Tensor) -> object:
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device


def _code(kind: type | FunctionType) -> object:
    """A class or a function; of a file that is loaded again each time, its text."""
    if kind.__module__ == "torch.nn.utils.parametrize" and isinstance(kind, type):
        return kind.__name__, kind.__bases__  # made for each layer that has a parametrisation
    if not kind.__module__.startswith("otfuse_user_"):
        return kind
    file = sys.modules[kind.__module__].__file__
    assert file is not None
    return kind.__qualname__, Path(file).read_text()


def _comparable(value: object) -> object:
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or (value.numel() > LONGEST and not value.is_meta):
            raise Unknown
        return _outside(value), None if value.is_meta else repr(value.tolist())
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, type):
        return _code(value)
    if isinstance(value, FunctionType):
        if value.__closure__ is not None:
            raise Unknown
        return _code(value)
    if isinstance(value, partial):
        return "partial", _comparable([value.func, value.args, value.keywords])
    if isinstance(value, Mapping):
        return type(value), tuple((_comparable(k), _comparable(v)) for k, v in value.items())
    if isinstance(value, list | tuple | torch.Size):
        return type(value), tuple(_comparable(v) for v in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_comparable(v) for v in value)
    if isinstance(value, nn.Module):
        return _code(type(value)), repr(value)
    if type(value).__name__.endswith("Config") and hasattr(value, "to_dict"):
        settings = {k: v for k, v in value.to_dict().items() if k != "_name_or_path"}
        return type(value), repr(settings), getattr(value, "_attn_implementation", None)
    if type(value) is _WrappedHook:
        return _comparable([value.hook, value.with_module])
    if type(value).__module__.startswith("torch.nn.utils."):  # a hook of a layer
        return type(value), _comparable(vars(value))
    raise Unknown
