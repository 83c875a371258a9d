"""A checkpoint seen under other names: those of the model that it is fused with."""

from __future__ import annotations

from collections.abc import Callable

from .derived import DerivedCheckpoint
from .open import Checkpoint


class Renamed(DerivedCheckpoint):
    """The checkpoint `whole`, every name of which `rename` changes."""

    def __init__(self, whole: Checkpoint, rename: Callable[[str], str]) -> None:
        aliases: dict[str, tuple[str, ...]] = {}
        for name, others in whole.aliases.items():
            aliases[rename(name)] = tuple(map(rename, others))
        entries = {rename(name): entry for name, entry in whole.entries.items()}
        super().__init__(whole, entries=entries, aliases=aliases)
