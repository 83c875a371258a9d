"""Inputs made up for a network, so that a fusion needs no data (docs/methods/inputs.md).

| kind | for | what it is |
| --- | --- | --- |
| `leaves` | images | dead leaves (`dead_leaves`) |
| `noise` | images, sequences | smooth 1/f noise; white for plain vectors |
| `rows` | vectors | rows of the parents' first layers and mixtures of them, at unit RMS |
| `class` | images | leaves, to be driven toward the parents' classes (`class_driven`) |
| `balanced` | images | leaves, to be chosen among by class (`class_balance`) |
| `statistics` | floating inputs | what `auto` draws, to be moved to where BatchNorms see what |
| | | they saw in training (`norm_memory`) |
| `tokens` | integer inputs | ids drawn evenly from the vocabulary; masks are ones |

`auto` takes `tokens` for integers, `leaves` for images, `rows` for vectors where rows are given,
and `noise` for the rest. `leaves+noise` draws equal parts of both, shuffled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..graph.axes import axis_units
from ..graph.model import LayerGraph, OpKind, Role
from .dead_leaves import dead_leaves, smooth_noise
from .factory import Network
from .fit_samples import fit_to_network
from .inputs import Slot, slots, vocabularies
from .samples import Samples

KINDS = ("auto", "leaves", "noise", "rows", "tokens", "class", "statistics", "balanced")
_MOVED = ("class", "statistics", "balanced")  # only a start is drawn here

_MOST_MIXED = 8  # rows in one sample


def synthetic_samples(
    network: Network,
    first_layers: Mapping[str, Tensor] | None = None,
    *,
    number: int,
    seed: int = 0,
    input_shape: Sequence[int] | None = None,
    kind: str = "auto",
) -> Samples:
    """Draw `number` inputs for `network`; the same ones for the same seed and number.

    Args:
        network: Its example inputs say what one sample looks like. On any device.
        first_layers: Weights that read the input (units x inputs, or convolutions), of all parents,
            by any name (see `first_layer_names`). Only `rows` needs them.
        number: Of samples.
        seed: Of everything random.
        input_shape: Of one sample: another size of images, or the images (1, 28, 28) that vectors
            were flattened from.
        kind: One of the table above, or several joined by `+`.

    Raises:
        UsageError: A kind that doesn't fit the network, a shape that it does not take, or integer
            inputs whose vocabulary can't be told.
    """
    if number < 1:
        raise UsageError("at least one sample is needed", where=f"--num-samples {number}")
    kinds = _kinds(kind)
    made: dict[str, Tensor] = {}
    wanted = slots(network)
    limits = vocabularies(network) if any(slot.integer for slot in wanted) else {}
    for at, slot in enumerate(wanted):
        # A prime: inputs of neighbouring seeds share no draw, for fewer than 1,009 inputs.
        slot_seed = seed * 1_009 + at
        if slot.integer:
            made[slot.name] = _integers(slot, limits, number, slot_seed)
        else:
            shape = tuple(input_shape) if input_shape else slot.shape
            drawn = _mixed(slot, kinds, shape, first_layers or {}, number, slot_seed)
            made[slot.name] = fit_to_network(drawn, slot, network, "--input-shape")
    args = tuple(made.pop(slot.name) for slot in wanted if slot.position is not None)
    return Samples(args, made)


def first_layer_names(graph: LayerGraph) -> tuple[str, ...]:
    """Weights of the layers that read the network's input and nothing else.

    Where the data flow is known, layers without inputs from another operation; otherwise those
    that read the axis pinned as the input.
    """
    names = []
    for op in graph.ops:
        weight = op.tensors.get("weight")
        if op.kind not in (OpKind.LINEAR, OpKind.CONV) or weight is None:
            continue
        pins: set[str | None] = set()
        for axis in graph.tensors[weight].axes:
            if Role.CONSUME in axis.roles:
                pins.update(graph.spaces[unit].pinned for unit in axis_units(axis.expr))
        if (op.inputs and not any(op.inputs)) or (not op.inputs and pins == {"input"}):
            names.append(weight)
    return tuple(dict.fromkeys(names))


def _kinds(text: str) -> list[str]:
    kinds = text.split("+")
    if any(kind not in KINDS for kind in kinds):
        raise UsageError(
            f"unknown value {text!r}",
            where="--synthetic-kind",
            fix=f"use one of {', '.join(KINDS)}, or several joined by +",
        )
    alone = [kind for kind in kinds if kind in _MOVED]
    if alone and len(kinds) > 1:
        raise UsageError(
            f"{alone[0]} stands alone", where=f"--synthetic-kind {text}", fix=f"use {alone[0]}"
        )
    return kinds


def _mixed(
    slot: Slot,
    kinds: Sequence[str],
    shape: tuple[int, ...],
    first_layers: Mapping[str, Tensor],
    number: int,
    seed: int,
) -> Tensor:
    parts: list[Tensor] = []
    for at, kind in enumerate(kinds):
        # Equal shares but for rounding, which add up to `number`.
        count = number * (at + 1) // len(kinds) - number * at // len(kinds)
        if count:
            parts.append(_floats(slot, kind, shape, first_layers, count, seed * 31 + at))
    if len(parts) == 1:
        return parts[0]
    # Shuffled: whoever takes the first of them gets some of every kind.
    order = np.random.default_rng([seed, 3]).permutation(number)
    return torch.cat([p.reshape(len(p), *parts[0].shape[1:]) for p in parts])[torch.tensor(order)]


def _floats(
    slot: Slot,
    kind: str,
    shape: tuple[int, ...],
    first_layers: Mapping[str, Tensor],
    number: int,
    seed: int,
) -> Tensor:
    rows = _matching_rows(first_layers, prod(slot.shape))
    if kind in ("auto", "statistics"):
        if len(shape) == 3:
            kind = "leaves"
        elif len(shape) == 1 and rows is not None:
            kind = "rows"
        else:
            kind = "noise"
    if kind in ("leaves", "class", "balanced"):
        if len(shape) != 3:
            raise _misfit(kind, slot, "leaves are images: channels, height, width")
        return torch.from_numpy(dead_leaves(number, *shape, seed=seed))
    if kind == "noise":
        if len(shape) == 1:
            white = np.random.default_rng([seed, 4]).standard_normal((number, *shape), np.float32)
            return torch.from_numpy(white)
        return torch.from_numpy(smooth_noise(number, shape[0], shape[1:], seed))
    if kind == "rows":
        if rows is None:
            raise _misfit(kind, slot, f"no first layer reads {prod(slot.shape)} numbers")
        return _row_mixtures(rows, number, seed).reshape(number, *slot.shape)
    raise _misfit(kind, slot, "tokens are integers")


def _misfit(kind: str, slot: Slot, why: str) -> UsageError:
    return UsageError(
        f"synthetic inputs of kind {kind} don't fit the network",
        where=f"input {slot.name} of shape {list(slot.shape)}",
        why=why,
        fix="give --input-shape (for example 1,28,28), another kind, or real inputs by --samples",
    )


def _matching_rows(first_layers: Mapping[str, Tensor], width: int) -> Tensor | None:
    """All rows that read `width` numbers, at unit RMS; None when there are none."""
    flat: list[Tensor] = []
    for weight in first_layers.values():
        if weight.ndim > 1 and prod(weight.shape[1:]) == width:
            flat.append(weight.detach().cpu().float().flatten(1))
    if not flat:
        return None
    rows = torch.cat(flat)
    rms = rows.square().mean(1).sqrt()
    alive = rms > 1e-6 * rms.max()  # a row of zeros has no direction to draw
    return rows[alive] / rms[alive, None] if bool(alive.any()) else None


def _row_mixtures(rows: Tensor, number: int, seed: int) -> Tensor:
    """A random row, and for most samples up to seven others with random coefficients."""
    rng = np.random.default_rng([seed, 5])
    chosen = rng.integers(len(rows), size=(number, _MOST_MIXED))
    factor = rng.standard_normal((number, _MOST_MIXED)).astype(np.float32)
    factor[:, 0] = 1
    # 1, 2, 4 or 8 rows, equally often
    count = 1 << rng.integers(4, size=number)
    factor *= np.arange(_MOST_MIXED) < count[:, None]
    mixed = torch.zeros(number, rows.shape[1])
    for at in range(_MOST_MIXED):
        mixed += torch.from_numpy(factor[:, at])[:, None] * rows[torch.from_numpy(chosen[:, at])]
    rms = mixed.square().mean(1, keepdim=True).sqrt().clamp_min(1e-6)
    return mixed / rms


def _integers(slot: Slot, limits: Mapping[str, int], number: int, seed: int) -> Tensor:
    """Ids below the vocabulary; ones for a mask, zeros for segments, places in order."""
    shape = (number, *slot.shape)
    if slot.dtype is torch.bool or slot.name.endswith("mask"):
        return torch.ones(shape, dtype=slot.dtype)
    if slot.name == "token_type_ids":
        return torch.zeros(shape, dtype=slot.dtype)
    if slot.name == "position_ids":
        return torch.arange(slot.shape[-1], dtype=slot.dtype).expand(shape).contiguous()
    if slot.name not in limits:
        raise UsageError(
            "no vocabulary for an integer input",
            where=f"input {slot.name}",
            why="no embedding of the network reads it directly",
            fix="give real inputs by --samples",
        )
    ids = np.random.default_rng([seed, 6]).integers(limits[slot.name], size=shape)
    return torch.from_numpy(ids).to(slot.dtype)
