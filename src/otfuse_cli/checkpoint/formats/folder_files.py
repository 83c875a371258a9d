"""The files of a folder by their names, on the disk or open already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..disk import Disk
from ..remote_disk import open_disk


class FolderFiles:
    """The files of a folder by their names: those on the disk, or `disks`, which are open already.

    Attributes:
        folder: The folder.
        label: What messages call it.
        index: The file inside that the user named instead of the folder; None for the folder.
        names: Its files, sorted.
        folders: The folders inside, sorted.
        taken: Names of the files that were opened.

    Raises:
        OSError: The folder can't be listed.
    """

    def __init__(
        self,
        folder: Path,
        label: str,
        *,
        index: str | None = None,
        disks: Mapping[str, Disk] | None = None,
    ) -> None:
        self.folder = folder
        self.label = label
        self.index = index
        self._disks = disks
        entries = [] if disks is not None else sorted(folder.iterdir())
        self.folders = [entry.name for entry in entries if entry.is_dir()]
        self.names = [entry.name for entry in entries if not entry.is_dir()]
        if disks is not None:
            self.names = sorted(disks)
        self.taken: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether there is such a file; a link that leads nowhere is none."""
        return (self.folder / name).is_file() if self._disks is None else name in self._disks

    def open(self, name: str) -> Disk:
        """One of them, for the caller to close."""
        self.taken.add(name)
        if self._disks is not None:
            return self._disks[name]
        return open_disk(self.folder / name, f"{self.label}/{name}")
