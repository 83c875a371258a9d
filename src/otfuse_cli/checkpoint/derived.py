"""What every view of a checkpoint has in common: it reads, hashes and reports like the whole."""

from __future__ import annotations

from collections.abc import Mapping

from .contents import Entry
from .open import Checkpoint


class DerivedCheckpoint(Checkpoint):
    """The checkpoint `whole` seen otherwise; with its own `entries` and `aliases` where given.

    It shares the open file: closing one closes both.
    """

    def __init__(
        self,
        whole: Checkpoint,
        *,
        entries: Mapping[str, Entry] | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        super().__init__(
            contents=whole.contents,
            label=whole.label,
            container=whole.container,
            entries=whole.entries if entries is None else entries,
            aliases=whole.aliases if aliases is None else aliases,
            remark=whole.remark,
        )
