"""Outputs of a network on samples, with the tensors of any checkpoint, batch by batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import IncompatibleModels
from ..graph.trace.export_settings import eval_mode, no_fast_path, without_cache
from ..graph.trace.network_outputs import pick_outputs
from ..runtime import full_precision
from .exported_file import load_program
from .factory import Network
from .inputs import is_program, slots, static_batch
from .once import run_once
from .samples import Samples

# Samples at a time: enough to keep the cores busy, and activations of small networks in memory.
BATCH = 250


def logits(
    network: Network,
    state: Mapping[str, Tensor],
    samples: Samples,
    *,
    batch: int = BATCH,
    device: str = "cpu",
) -> Tensor:
    """All outputs, on the CPU in float32: `logits` where there are any, else the first tensor.

    Raises:
        IncompatibleModels: See `logit_batches`.
    """
    return torch.cat(list(logit_batches(network, state, samples, batch=batch, device=device)))


def logit_batches(
    network: Network,
    state: Mapping[str, Tensor],
    samples: Samples,
    *,
    batch: int = BATCH,
    device: str = "cpu",
) -> Iterator[Tensor]:
    """Outputs for the samples in order, batch by batch: memory for one batch only.

    Args:
        network: With real tensors; it is left as it is.
        state: Tensors by the module's names (`architecture.module_state`), of any widths that the
            module can run with. Floating ones are computed with in float32.
        samples: Its inputs.
        batch: Samples at a time. An exported program with a batch size of its own runs with that:
            the last batch is filled up, and what comes of the filling is cut off.
        device: Where it runs.

    Yields:
        On the CPU in float32; axis 0 counts samples.

    Raises:
        IncompatibleModels: The network fails on these tensors or inputs, or returns no tensor with
            a row for each sample.
    """
    module = _on_device(network, device)
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        computed_in = tensor.float() if tensor.is_floating_point() else tensor
        tensors[name] = computed_in.to(device)
    fixed = static_batch(network)
    for part in samples.batches(fixed or batch):
        filled = part if fixed is None else _filled(part, fixed)
        args, kwargs = _call(network, filled, device)
        with eval_mode(module), no_fast_path(), full_precision(), torch.inference_mode():
            try:
                made = run_once(module, tensors, args, kwargs)
            except Exception as error:
                raise _failed(network, error) from error
        yield _rows(made, filled.count, network)[: part.count].to("cpu", torch.float32)


def _on_device(network: Network, device: str) -> nn.Module:
    """The module, or a copy elsewhere: buffers that no checkpoint holds have to move too."""
    if device == "cpu":
        return network.module
    if is_program(network):
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(load_program(Path(network.source)), device)
        return program.module(check_guards=False)
    return copy.deepcopy(network.module).to(device)


def _call(
    network: Network, samples: Samples, device: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the call: the samples in their slots, the network's constants in the others."""
    args, kwargs = list(network.args), dict(network.kwargs)
    positions = [slot.position for slot in slots(network) if slot.position is not None]
    for position, tensor in zip(positions, samples.args, strict=True):
        args[position] = tensor.to(device)
    kwargs |= {name: tensor.to(device) for name, tensor in samples.kwargs.items()}
    return tuple(args), without_cache(network.module, kwargs)


def _filled(samples: Samples, size: int) -> Samples:
    """`size` samples, the last one repeated."""
    if samples.count == size:
        return samples
    return samples.take(torch.arange(size).clamp_max(samples.count - 1))


def _rows(made: Any, count: int, network: Network) -> Tensor:
    outputs = pick_outputs(made)
    if not outputs or not outputs[0].ndim or outputs[0].shape[0] != count:
        shape = list(outputs[0].shape) if outputs else "no tensor"
        raise IncompatibleModels(
            "the network does not return a row for each sample",
            where=f"{network.source}: {shape} for {count} samples",
            why="axis 0 of inputs and outputs must count samples",
            fix="give a network whose forward takes and returns batches",
        )
    return outputs[0]


def _failed(network: Network, error: Exception) -> IncompatibleModels:
    return IncompatibleModels(
        "the network can't be run on these tensors",
        where=network.source,
        why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
        fix="check that samples and checkpoint belong to it; an exported program takes no other "
        "widths than its own, nor does code that fixes them: --arch INDEX=SPEC names a network "
        "for each checkpoint",
    )
