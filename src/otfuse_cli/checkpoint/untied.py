"""A checkpoint whose tied output layer is seen as a tensor of its own: a copy of the embedding."""

from __future__ import annotations

from collections.abc import Iterable

from .open import Checkpoint

# Names of one tensor, by who keeps it: names in one inner tuple stay tied.
Split = tuple[tuple[str, ...], ...]


class Untied(Checkpoint):
    """The checkpoint `whole`, with one tensor for each class of names that its ties are split into.

    What the file stores under two names, or under one that stands for another, is there under each;
    what it stores twice already is left alone. Reads, hashes and reports like the checkpoint.
    """

    def __init__(self, whole: Checkpoint, splits: Iterable[Split]) -> None:
        entries, ties = dict(whole.entries), {n: list(o) for n, o in whole.aliases.items()}
        for split in splits:
            stored = next((n for kept in split for n in kept if n in whole.infos), None)
            if stored is None:
                continue
            others = set(ties.pop(stored, ()))
            for kept in split:
                present = [n for n in kept if n in whole.infos]
                named = [n for n in kept if n in others]
                if not present:
                    present, named = [(named or kept)[0]], named[1:]
                    entries[present[0]] = whole.entries[stored]
                if named:
                    ties.setdefault(present[0], []).extend(named)
            if rest := [n for n in whole.aliases.get(stored, ()) if not _in(split, n)]:
                ties.setdefault(stored, []).extend(rest)
        super().__init__(
            contents=whole.contents,
            label=whole.label,
            container=whole.container,
            entries=entries,
            aliases={name: tuple(others) for name, others in ties.items()},
            remark=whole.remark,
        )


def _in(split: Split, name: str) -> bool:
    return any(name in kept for kept in split)
