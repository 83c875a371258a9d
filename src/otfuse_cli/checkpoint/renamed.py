"""A checkpoint seen under other names: those of the model that it is fused with."""

from __future__ import annotations

from collections.abc import Callable

from .open import Checkpoint


class Renamed(Checkpoint):
    """The checkpoint `whole`, every name of which `rename` changes.

    Reads, hashes and reports like it.
    """

    def __init__(self, whole: Checkpoint, rename: Callable[[str], str]) -> None:
        super().__init__(
            contents=whole.contents,
            label=whole.label,
            container=whole.container,
            entries={rename(name): entry for name, entry in whole.entries.items()},
            aliases={
                rename(name): tuple(map(rename, others)) for name, others in whole.aliases.items()
            },
            remark=whole.remark,
        )
