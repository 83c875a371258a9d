"""Inputs to run a network on: read, drawn by seed, checked against what the network takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import UsageError
from .factory import Network
from .fit_samples import cast, checked_labels, fit_to_network, require_finite_samples, require_ids
from .inputs import (
    Slot,
    accepted_keywords,
    is_program,
    slots,
    vocabularies,
)
from .sample_files import Source, read_entries

INPUT_NAMES = ("x", "inputs")
LABEL_NAMES = ("y", "labels")


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
        args = tuple(tensor[at] for tensor in self.args)
        kwargs = {name: tensor[at] for name, tensor in self.kwargs.items()}
        return Samples(args, kwargs, labels)

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
        labels = checked_labels(labels if at is None else labels[at], label)
    return _assemble(chosen, wanted, network, labels, at, label)


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
    shapes: dict[str, tuple[int, ...]] = {}
    for slot in wanted:
        if chosen[slot.name].ndim == len(slot.shape) + 1:
            shapes[slot.name] = tuple(chosen[slot.name].shape[1:])
    fitted: dict[str, Tensor] = {}
    for name, stored in chosen.items():
        # A keyword that the network's example leaves out is taken as it comes.
        slot = by_name.get(name) or Slot(name, None, tuple(stored.shape[1:]), stored.dtype)
        where = f"{label}, {name}"
        drawn = stored if at is None else stored[at]
        tensor = cast(drawn, slot, where)
        fitted[name] = fit_to_network(tensor, slot, network, where, shapes)
        require_finite_samples(fitted[name], at, where)
        if name in limits:
            require_ids(fitted[name], limits[name], where)
    args = [slot for slot in wanted if slot.position is not None]
    return Samples(args=tuple(fitted.pop(slot.name) for slot in args), kwargs=fitted, labels=labels)


def _entries_of(samples: Samples, network: Network) -> dict[str, Tensor]:
    names = [slot.name for slot in slots(network) if slot.position is not None]
    entries = dict(zip(names, samples.args, strict=False)) | dict(samples.kwargs)
    return entries if samples.labels is None else entries | {LABEL_NAMES[1]: samples.labels}


def _labels_entry(entries: Mapping[str, Tensor], wanted: Sequence[Slot]) -> Tensor | None:
    taken = {slot.name for slot in wanted}
    return next((entries[n] for n in LABEL_NAMES if n in entries and n not in taken), None)


def _choose(
    entries: Mapping[str, Tensor], wanted: Sequence[Slot], network: Network, label: str
) -> dict[str, Tensor]:
    """The entry for every input, by the input's name; entries that nobody takes are left."""
    chosen: dict[str, Tensor] = {}
    for first, slot in enumerate(wanted):
        accepted = (slot.name,) if first else (slot.name, *INPUT_NAMES)
        entry = next((entries[name] for name in accepted if name in entries), None)
        if entry is not None:
            chosen[slot.name] = entry
    missing = [slot for slot in wanted if slot.name not in chosen]
    mask = next((slot for slot in missing if slot.name == "attention_mask"), None)
    if mask is not None and chosen:  # without padding every position counts
        like = next(iter(chosen.values()))
        chosen[mask.name] = torch.ones(like.shape[:2], dtype=mask.dtype)
        missing.remove(mask)
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
        accepted_names = accepted_keywords(network.module) - set(LABEL_NAMES)
        chosen |= {n: t for n, t in entries.items() if n in accepted_names and n not in chosen}
    return chosen


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
    # All are permuted and the first taken: more samples of one seed begin with the same ones.
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:number]
