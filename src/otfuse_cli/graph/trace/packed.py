"""Packed sequences, traced as the padded ones that they stand for.

How many rows a packed sequence has depends on the lengths, so that `torch.export` can't follow it.
Which axes carry which units does not: for a layer graph every sequence may be as long as the
longest. What is computed is another thing: a program that is to be run must not be traced so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import IncompatibleModels

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class _EqualLengths:
    """Stands for the `batch_sizes` of sequences that are all as long as the longest."""

    device = torch.device("cpu")

    def __init__(self, steps: int, batch: int) -> None:
        self.steps, self.batch = steps, batch

    def __getitem__(self, step: int) -> int:
        return self.batch

    def size(self, dim: int = 0) -> int:
        return self.steps


@contextmanager
def packed_sequences(*, padded: bool) -> Iterator[None]:
    """While it is entered, packing a sequence only flattens it (`padded`), or is refused.

    Raises:
        IncompatibleModels: A sequence is packed, and it is not to be taken for a padded one.
    """
    names: dict[str, Callable[..., Any]] = {"_pack_padded_sequence": _pack if padded else _refuse}
    if padded:
        names["_pad_packed_sequence"] = _unpack
        names |= {name: _unpacked(getattr(torch._VF, name)) for name in _LAYERS}
    # Attributes of the module object hide torch's own functions, which it looks up when asked.
    for name, function in names.items():
        setattr(torch._VF, name, function)
    try:
        yield
    finally:
        for name in names:
            delattr(torch._VF, name)


def _refuse(values: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    raise IncompatibleModels(
        "packed sequences can't be exported to be run on inputs",
        where="torch.nn.utils.rnn.pack_padded_sequence",
        why="how many rows a packed sequence has depends on the lengths of its samples",
        fix="merge without --samples, --synthetic and --align acts, which need no such program; "
        "or give a network that takes padded sequences",
    )


def _pack(values: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, _EqualLengths]:
    """(steps, batch, ...) as rows."""
    by_step = values.transpose(0, 1) if batch_first else values
    steps, batch = by_step.shape[:2]
    return by_step.reshape(steps * batch, *by_step.shape[2:]), _EqualLengths(steps, batch)


def _unpack(
    rows: Tensor, sizes: _EqualLengths, batch_first: bool, value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    by_step = rows.view(sizes.steps, sizes.batch, *rows.shape[1:])
    if total_length > sizes.steps:
        rest = by_step.new_full((total_length - sizes.steps, *by_step.shape[1:]), value)
        by_step = torch.cat([by_step, rest])
    lengths = torch.full((sizes.batch,), sizes.steps)
    return by_step.transpose(0, 1) if batch_first else by_step, lengths


def _unpacked(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer that takes what `_pack` makes, beside what it takes anyway."""

    def run(values: Tensor, second: Any, *rest: Any) -> Any:
        if not isinstance(second, _EqualLengths):
            return layer(values, second, *rest)
        state: Tensor | Sequence[Tensor] = rest[0]
        by_step = values.view(second.steps, second.batch, *values.shape[1:])
        made, *states = layer(by_step, state, *rest[1:], False)
        return made.reshape(-1, made.shape[-1]), *states

    return run
