"""A checkpoint whose tied output layer is seen as a tensor of its own: a copy of the embedding."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from .derived import DerivedCheckpoint
from .open import Checkpoint

# Names of one tensor, by who keeps it: names in one inner tuple stay tied.
Split = tuple[tuple[str, ...], ...]


class Untied(DerivedCheckpoint):
    """The checkpoint `whole`, with one tensor for each class of names that its ties are split into.

    What the file stores under two names, or under one that stands for another, is there under each;
    what it stores twice already is left alone.
    """

    def __init__(self, whole: Checkpoint, splits: Iterable[Split]) -> None:
        entries = dict(whole.entries)
        ties = {name: list(others) for name, others in whole.aliases.items()}
        for split in splits:
            stored = next((name for name in chain(*split) if name in whole.infos), None)
            if stored is None:
                continue
            others = ties.pop(stored, [])
            for kept in split:
                present = [name for name in kept if name in whole.infos]
                named = [name for name in kept if name in others]
                if not present:
                    present, named = [(named or kept)[0]], named[1:]
                    entries[present[0]] = whole.entries[stored]
                if named:
                    ties.setdefault(present[0], []).extend(named)
            if rest := [name for name in others if name not in chain(*split)]:
                ties.setdefault(stored, []).extend(rest)
        aliases = {name: tuple(others) for name, others in ties.items()}
        super().__init__(whole, entries=entries, aliases=aliases)
