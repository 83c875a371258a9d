"""Samples as a network takes them: shapes, dtypes, finite numbers, ids of its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from ..errors import UnreadableInput, UsageError
from ..graph.trace.export_settings import eval_mode, no_fast_path
from ..graph.trace.network_outputs import pick_outputs
from .factory import Network
from .inputs import (
    Slot,
    callable_form,
    example_call,
    is_program,
    slots,
)

IGNORED = -100  # the label that losses skip


def fit_to_network(
    tensor: Tensor,
    slot: Slot,
    network: Network,
    where: str,
    beside: Mapping[str, tuple[int, ...]] | None = None,
) -> Tensor:
    """`tensor` with samples as the network takes them.

    Vectors take images flattened row by row; images of one channel take vectors, and a missing
    channel axis. Other sizes than the example's pass if the network runs on them
    (and on the shapes `beside` of its other inputs).

    Raises:
        UsageError: Any other shape.
    """
    shape = tuple(tensor.shape[1:])
    if shape == slot.shape:
        return tensor
    # Row by row is the one order that everybody means; of several channels there are two.
    vector, plane = len(slot.shape) == 1, len(slot.shape) == 3 and slot.shape[0] == 1
    if not slot.integer and prod(shape) == prod(slot.shape) and (vector or plane):
        return tensor.reshape(len(tensor), *slot.shape)
    may_differ = len(shape) == len(slot.shape) and not is_program(network)
    if may_differ and _runs(network, {**(beside or {}), slot.name: shape}):
        return tensor
    fix = "bring the samples into the shape that the network was trained on"
    if len(shape) == 3 and len(slot.shape) == 3 and shape[2] == slot.shape[0] != shape[0]:
        fix = "channels come last here and first in the network: x.transpose(0, 3, 1, 2)"
    elif len(shape) == 1 and prod(shape) == prod(slot.shape):
        fix = (
            f"reshape the vectors yourself: the order of their {len(slot.shape)} axes is not known"
        )
    raise UsageError(
        "samples of the wrong shape",
        where=f"{where} {list(tensor.shape)}",
        why=f"the network takes {['n', *slot.shape]}".replace("'", ""),
        fix=fix,
    )


def checked_labels(labels: Tensor, label: str) -> Tensor:
    """Labels as int64.

    Raises:
        UsageError: They are no class indices: real numbers, or negative ones that losses count.
    """
    where = f"{label}, labels {list(labels.shape)} {_name(labels.dtype)}"
    if labels.is_floating_point() or labels.dtype is torch.bool or labels.is_complex():
        raise UsageError(
            "labels must be class indices",
            where=where,
            why="they are integers from 0 on, one for each sample",
            fix="turn scores or one-hot rows into indices: y.argmax(1)",
        )
    labels = labels.to(torch.int64)
    bad = ((labels < 0) & (labels != IGNORED)).nonzero()
    if len(bad):
        value = int(labels[tuple(bad[0])])
        raise UsageError(
            "a label is negative", where=where, why=f"it is {value}", fix="classes count from 0"
        )
    return labels


def cast(tensor: Tensor, slot: Slot, where: str) -> Tensor:
    """Floating inputs as float32, integers as the example's dtype; never one for the other."""
    integer = not (tensor.is_floating_point() or tensor.is_complex())
    if integer is slot.integer and not tensor.is_complex():
        return tensor.to(slot.dtype if integer else torch.float32)
    stored, needed = _name(tensor.dtype), _name(slot.dtype)
    if integer:
        what, fix = "integers where the network takes real numbers", "normalise them as in training"
        if tensor.dtype is torch.uint8:
            what = "raw pixels"
            fix += ", for example ((x / 255 - mean) / std).astype('float32')"
    else:
        what, fix = "real numbers where the network takes integers", "store ids as int64"
    raise UsageError(what, where=where, why=f"dtype {stored}, the network takes {needed}", fix=fix)


def _runs(network: Network, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the network takes samples of other sizes, and returns as many axes as before."""
    network = callable_form(network)
    module, wanted = network.module, slots(network)
    before, positional, kwargs = example_call(network)
    args = list(positional)
    for slot in wanted:
        example = kwargs[slot.name] if slot.position is None else args[slot.position]
        trial = example.new_zeros((example.shape[0], *shapes.get(slot.name, slot.shape)))
        if slot.position is None:
            kwargs[slot.name] = trial
        else:
            args[slot.position] = trial
    with eval_mode(module), no_fast_path(), torch.no_grad():
        try:
            after = module(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever the user's forward raises
            return False
    return _ranks(before) == _ranks(after)


def _ranks(returned: object) -> list[int]:
    """Number of axes of every output."""
    return [tensor.ndim for tensor in pick_outputs(returned)]


def require_finite_samples(tensor: Tensor, at: Tensor | None, where: str) -> None:
    """Refuse samples that hold no numbers; `at` gives their places in the file, where drawn.

    Raises:
        UnreadableInput: NaN or infinity, naming the first sample that has one.
    """
    if not tensor.is_floating_point():
        return
    bad = (~torch.isfinite(tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None])).any(1)
    if not bool(bad.any()):
        return
    first = int(bad.nonzero()[0])
    raise UnreadableInput(
        "a sample holds NaN or infinity",
        where=f"{where}, sample {first if at is None else int(at[first])}",
        why=f"{int(bad.sum())} of {len(bad)} samples do",
        fix="leave such samples out",
    )


def require_ids(tensor: Tensor, rows: int, where: str) -> None:
    """Refuse ids that an embedding of `rows` rows doesn't have.

    Raises:
        UsageError: There is one.
    """
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= rows:
        raise UsageError(
            "an id outside the vocabulary",
            where=where,
            why=f"ids go from {low} to {high}, the embedding has {rows} rows",
            fix="encode the samples with the network's own tokenizer",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
