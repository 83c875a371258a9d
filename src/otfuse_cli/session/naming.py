"""Models whose tensors have the same names but for a prefix: `net.fc.weight` and `fc.weight`.

Wrappers that are known by name are taken off when a file is opened (`checkpoint/names`); here two
files are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from ..checkpoint.open import Checkpoint
from ..checkpoint.renamed import Renamed
from ..errors import IncompatibleModels, few


def named_alike(checkpoints: Sequence[Checkpoint], anchor_index: int) -> tuple[Checkpoint, ...]:
    """The checkpoints, those under the anchor's names that differ from them by a whole prefix.

    A prefix is whole where every name of one file has it.

    Raises:
        IncompatibleModels: Most names differ by one that isn't, or both have one of their own.
    """
    anchor = checkpoints[anchor_index]
    wanted = _names(anchor)
    return tuple(
        checkpoint if _names(checkpoint) == wanted else _alike(checkpoint, anchor, wanted)
        for checkpoint in checkpoints
    )


def _alike(checkpoint: Checkpoint, anchor: Checkpoint, wanted: set[str]) -> Checkpoint:
    names = _names(checkpoint)
    best: Callable[[str], str] | None = None
    most = max(len(names & wanted), len(wanted) // 2)
    for rename in _renames(names, wanted):
        common = len({rename(name) for name in names} & wanted)
        if common > most:
            best, most = rename, common
    if best is not None:
        return Renamed(checkpoint, best)
    _refuse_prefix(checkpoint, anchor, names, wanted)
    return checkpoint


def _renames(names: set[str], wanted: set[str]) -> list[Callable[[str], str]]:
    """Taking a prefix off that all names have, or putting one before them that all wanted have."""
    off = [partial(_without, prefix=prefix) for prefix in _prefixes(names)]
    on = [partial(_with, prefix=prefix) for prefix in _prefixes(wanted)]
    return [*off, *on]


def _without(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)


def _with(name: str, prefix: str) -> str:
    return prefix + name


def _prefixes(names: Collection[str]) -> list[str]:
    """What all names begin with, up to a dot; the longest last."""
    first, last = min(names), max(names)
    prefixes = []
    for at, (one, other) in enumerate(zip(first, last, strict=False)):
        if one != other:
            break
        if one == ".":
            prefixes.append(first[: at + 1])
    return prefixes


def _refuse_prefix(
    checkpoint: Checkpoint, anchor: Checkpoint, names: set[str], wanted: set[str]
) -> None:
    """Refuse names most of which are the anchor's behind a prefix.

    Raises:
        IncompatibleModels: They are.
    """
    for holder, other, longer, shorter in (
        (checkpoint, anchor, names, wanted),
        (anchor, checkpoint, wanted, names),
    ):
        prefix, inside = _most_common_prefix(longer - shorter, shorter - longer)
        if 2 * inside > len(shorter):
            rest = [name for name in sorted(longer) if not name.startswith(prefix)]
            raise _differ(
                holder,
                other,
                prefix,
                f"{inside} tensors have the prefix {prefix} in {holder.label} and none in "
                f"{other.label}" + (f"; without it there are {few(rest)}" if rest else ""),
            )
    prefixes, anchor_prefixes = _prefixes(names), _prefixes(wanted)
    if prefixes and anchor_prefixes:
        bare = {_without(name, prefixes[-1]) for name in names}
        if 2 * len(bare & {_without(name, anchor_prefixes[-1]) for name in wanted}) > len(wanted):
            why = (
                f"they begin with {prefixes[-1]} in {checkpoint.label}, with "
                f"{anchor_prefixes[-1]} in {anchor.label}"
            )
            raise _differ(checkpoint, anchor, prefixes[-1], why)


def _most_common_prefix(longer: set[str], shorter: set[str]) -> tuple[str, int]:
    """The prefix that most of the longer names have before one of the shorter ones."""
    counts: Counter[str] = Counter()
    for name in longer:
        dots = (at for at, letter in enumerate(name) if letter == ".")
        counts.update(name[: at + 1] for at in dots if name[at + 1 :] in shorter)
    # Of equally common ones the shortest, then the first by name.
    ranked = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return ranked[0] if ranked else ("", 0)


def _differ(holder: Checkpoint, other: Checkpoint, prefix: str, why: str) -> IncompatibleModels:
    return IncompatibleModels(
        "the checkpoints name their tensors differently",
        where=f"{holder.label} and {other.label}",
        why=why,
        fix=f"if they are one network, save {holder.label} without it: "
        f"{{k.removeprefix({prefix!r}): v for k, v in state.items()}}",
    )


def _names(checkpoint: Checkpoint) -> set[str]:
    names = set(checkpoint.infos)
    return names.union(*checkpoint.aliases.values()) if checkpoint.aliases else names
