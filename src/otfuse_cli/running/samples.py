"""Inputs to run a network on: read, drawn by seed, checked against what the network takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ..errors import UnreadableInput, UsageError
from ..graph.trace.export_settings import eval_mode, no_fast_path
from ..graph.trace.from_module import pick_outputs
from .factory import Network
from .inputs import (
    Slot,
    accepted_keywords,
    callable_form,
    example_call,
    is_program,
    slots,
    vocabularies,
)
from .sample_files import Source, read_entries

INPUT_NAMES = ("x", "inputs")
LABEL_NAMES = ("y", "labels")
IGNORED = -100  # the label that losses skip


@dataclass(frozen=True)
class Samples:
    """Inputs of a network, and labels where they are known. Axis 0 of every tensor: samples.

    Attributes:
        args: Positional tensor inputs, in order.
        kwargs: Keyword tensor inputs.
        labels: Class indices, one for each sample (or for each position of it); or None.
    """

    args: tuple[Tensor, ...] = ()
    kwargs: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(next(iter((*self.args, *self.kwargs.values()))))

    def take(self, indices: Tensor | Sequence[int] | slice) -> Samples:
        """The samples at `indices`, in that order."""
        at = indices if isinstance(indices, slice | Tensor) else torch.tensor(indices)
        labels = None if self.labels is None else self.labels[at]
        return Samples(
            tuple(t[at] for t in self.args), {n: t[at] for n, t in self.kwargs.items()}, labels
        )

    def batches(self, size: int) -> Iterator[Samples]:
        """The samples in order, `size` at a time; the last batch may be smaller."""
        for start in range(0, self.count, size):
            yield self.take(slice(start, start + size))


def load_samples(
    source: Source | Samples,
    network: Network,
    *,
    number: int | None = None,
    seed: int = 0,
    need_labels: bool = False,
) -> Samples:
    """Read samples, draw `number` of them, and check that the network takes them.

    Args:
        source: `.npz .npy .safetensors .pt`, `file.py:loader` (executes user code), or arrays in
            memory. Inputs are called `x`, `inputs`, or like parameters of the network's forward;
            labels `y` or `labels`.
        network: Its example inputs say what one sample looks like. On any device.
        number: Drawn without replacement; where it is larger, all of them in a drawn order (files
            are often sorted by class, and some are held out); all, in order, when None.
        seed: Of the draw, which depends on nothing else but the number of samples there are.
        need_labels: Refuse samples without labels.

    Returns:
        On the CPU: floating inputs in float32, integers as the network's example has them.

    Raises:
        UsageError: Wrong names, shapes, dtypes; no samples; labels missing or not class indices.
        UnreadableInput: Missing or broken; NaN or infinity, naming the sample.
    """
    if isinstance(source, Samples):
        entries, label = _entries_of(source, network), "the samples"
    else:
        entries, label = read_entries(source)
    wanted = slots(network)
    labels = _labels_entry(entries, wanted)
    if labels is None and need_labels:
        raise UsageError(
            "samples without labels",
            where=f"{label} holds {', '.join(entries)}",
            fix=f"add class indices as {' or '.join(LABEL_NAMES)}",
        )
    chosen = _choose(entries, wanted, network, label)
    count = _count(chosen, labels, label)
    at = _draw(count, number, seed)
    if labels is not None:
        labels = _checked_labels(labels if at is None else labels[at], label)
    return _assemble(chosen, wanted, network, labels, at, label)


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
    given = tuple(tensor.shape[1:])
    if given == slot.shape:
        return tensor
    vector, plane = len(slot.shape) == 1, len(slot.shape) == 3 and slot.shape[0] == 1
    if not slot.integer and prod(given) == prod(slot.shape) and (vector or plane):
        return tensor.reshape(len(tensor), *slot.shape)
    may_differ = len(given) == len(slot.shape) and not is_program(network)
    if may_differ and _runs(network, {**(beside or {}), slot.name: given}):
        return tensor
    fix = "bring the samples into the shape that the network was trained on"
    if len(given) == 3 and len(slot.shape) == 3 and given[2] == slot.shape[0] != given[0]:
        fix = "channels come last here and first in the network: x.transpose(0, 3, 1, 2)"
    elif len(given) == 1 and prod(given) == prod(slot.shape):
        fix = (
            f"reshape the vectors yourself: the order of their {len(slot.shape)} axes is not known"
        )
    raise UsageError(
        "samples of the wrong shape",
        where=f"{where} {list(tensor.shape)}",
        why=f"the network takes {['n', *slot.shape]}".replace("'", ""),
        fix=fix,
    )


def _assemble(
    chosen: Mapping[str, Tensor],
    wanted: Sequence[Slot],
    network: Network,
    labels: Tensor | None,
    at: Tensor | None,
    label: str,
) -> Samples:
    by_name = {slot.name: slot for slot in wanted}
    limits = vocabularies(network) if any(slot.integer for slot in wanted) else {}
    shapes = {
        slot.name: tuple(chosen[slot.name].shape[1:])
        for slot in wanted
        if chosen[slot.name].ndim == len(slot.shape) + 1
    }
    fitted: dict[str, Tensor] = {}
    for name, stored in chosen.items():
        slot = by_name.get(name) or Slot(name, None, tuple(stored.shape[1:]), stored.dtype)
        where = f"{label}, {name}"
        drawn = stored if at is None else stored[at]
        tensor = _cast(drawn, slot, where)
        fitted[name] = fit_to_network(tensor, slot, network, where, shapes)
        _require_finite(fitted[name], at, where)
        if name in limits:
            _require_ids(fitted[name], limits[name], where)
    args = [slot for slot in wanted if slot.position is not None]
    return Samples(args=tuple(fitted.pop(slot.name) for slot in args), kwargs=fitted, labels=labels)


def _entries_of(samples: Samples, network: Network) -> dict[str, Tensor]:
    names = [slot.name for slot in slots(network) if slot.position is not None]
    found = dict(zip(names, samples.args, strict=False)) | dict(samples.kwargs)
    return found if samples.labels is None else found | {LABEL_NAMES[1]: samples.labels}


def _labels_entry(entries: Mapping[str, Tensor], wanted: Sequence[Slot]) -> Tensor | None:
    taken = {slot.name for slot in wanted}
    return next((entries[n] for n in LABEL_NAMES if n in entries and n not in taken), None)


def _choose(
    entries: Mapping[str, Tensor], wanted: Sequence[Slot], network: Network, label: str
) -> dict[str, Tensor]:
    """The entry for every input, by the input's name; entries that nobody takes are left."""
    found: dict[str, Tensor] = {}
    for first, slot in enumerate(wanted):
        accepted = (slot.name,) if first else (slot.name, *INPUT_NAMES)
        given = next((entries[name] for name in accepted if name in entries), None)
        if given is not None:
            found[slot.name] = given
    missing = [slot for slot in wanted if slot.name not in found]
    for slot in [slot for slot in missing if slot.name == "attention_mask" and found]:
        like = next(iter(found.values()))
        found[slot.name] = torch.ones(like.shape[:2], dtype=slot.dtype)
        missing.remove(slot)
    if missing:
        names = ", ".join(s.name for s in missing)
        one = "x" if len(wanted) == 1 else names
        raise UsageError(
            f"no inputs for {names}",
            where=f"{label} holds {', '.join(entries) or 'nothing'}",
            why="inputs go by the names x or inputs, or by those of the network's parameters",
            fix=f"store them as {one}",
        )
    if not is_program(network):
        known = accepted_keywords(network.module) - set(LABEL_NAMES)
        found |= {n: t for n, t in entries.items() if n in known and n not in found}
    return found


def _count(chosen: Mapping[str, Tensor], labels: Tensor | None, label: str) -> int:
    arrays = dict(chosen) if labels is None else {**chosen, "labels": labels}
    counts = {name: t.shape[0] if t.ndim else 0 for name, t in arrays.items()}
    if len(set(counts.values())) > 1:
        raise UsageError(
            "inputs and labels of different length",
            where=f"{label}: " + ", ".join(f"{n} {list(arrays[n].shape)}" for n in arrays),
            why="axis 0 counts the samples",
            fix="store as many labels as inputs",
        )
    count = next(iter(counts.values()))
    if not count:
        raise UsageError("no samples", where=label, why="axis 0 is empty")
    return count


def _draw(count: int, number: int | None, seed: int) -> Tensor | None:
    """Positions of the drawn samples, in a drawn order; None for all of them in order."""
    if number is not None and number < 1:
        raise UsageError("at least one sample is needed", where=f"--num-samples {number}")
    if number is None:
        return None
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:number]


def _checked_labels(labels: Tensor, label: str) -> Tensor:
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


def _cast(tensor: Tensor, slot: Slot, where: str) -> Tensor:
    """Floating inputs as float32, integers as the example's dtype; never one for the other."""
    integer = not (tensor.is_floating_point() or tensor.is_complex())
    if integer is slot.integer and not tensor.is_complex():
        return tensor.to(slot.dtype if integer else torch.float32)
    given, needed = _name(tensor.dtype), _name(slot.dtype)
    if integer:
        what, fix = "integers where the network takes real numbers", "normalise them as in training"
        if tensor.dtype is torch.uint8:
            what = "raw pixels"
            fix += ", for example ((x / 255 - mean) / std).astype('float32')"
    else:
        what, fix = "real numbers where the network takes integers", "store ids as int64"
    raise UsageError(what, where=where, why=f"dtype {given}, the network takes {needed}", fix=fix)


def _runs(network: Network, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the network takes samples of other sizes, and returns as many axes as before."""
    network = callable_form(network)
    module, wanted = network.module, slots(network)
    before, positional, kwargs = example_call(network)
    args = list(positional)
    for slot in wanted:
        given = kwargs[slot.name] if slot.position is None else args[slot.position]
        trial = given.new_zeros((given.shape[0], *shapes.get(slot.name, slot.shape)))
        if slot.position is None:
            kwargs[slot.name] = trial
        else:
            args[slot.position] = trial
    with eval_mode(module), no_fast_path(), torch.no_grad():
        try:
            after = module(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever the user's forward raises
            return False
    axes = [[t.ndim for t in pick_outputs(made)] for made in (before, after)]
    return axes[0] == axes[1]


def _require_finite(tensor: Tensor, at: Tensor | None, where: str) -> None:
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


def _require_ids(tensor: Tensor, rows: int, where: str) -> None:
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
