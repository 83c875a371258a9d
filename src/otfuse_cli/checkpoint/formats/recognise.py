"""Which format a file has, by its content; its suffix says nothing."""

from __future__ import annotations

from enum import Enum

from ...errors import UnreadableInput
from ..disk import Disk
from .safetensors_file import looks_like_safetensors
from .torch_file import names_unsafe_global

_HEAD = 512
_LFS = b"version https://git-lfs.github.com/spec"
_OTHERS = (
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"<", "a web page or XML text"),
    (b"{", "JSON text"),
)


class FileFormat(Enum):
    """The file formats that are read."""

    SAFETENSORS = "safetensors"
    ZIP = "zip"
    LEGACY = "legacy"


def recognise(disk: Disk) -> FileFormat:
    """The format of a file.

    Raises:
        UnreadableInput: It is empty, a Git LFS pointer, or none of them.
    """
    head = disk.read_bytes(0, _HEAD)
    if not head:
        raise UnreadableInput(
            "an empty file",
            where=disk.label,
            why="it has 0 bytes",
            fix="copy or download the file again",
        )
    if head.startswith(_LFS):
        raise UnreadableInput(
            "a Git LFS pointer, not the weights",
            where=disk.label,
            why="the repository was cloned without its large files",
            fix="run git lfs pull",
        )
    if head.startswith(b"PK\x03\x04"):
        return FileFormat.ZIP
    pickled = head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5
    if looks_like_safetensors(head):
        length = int.from_bytes(head[:8], "little")
        if length <= disk.size or not pickled:
            return FileFormat.SAFETENSORS
    if pickled:
        return FileFormat.LEGACY
    raise _unknown(disk, head)


def _unknown(disk: Disk, head: bytes) -> UnreadableInput:
    kind = next((text for magic, text in _OTHERS if head.startswith(magic)), None)
    if kind is None and head[257:262] == b"ustar":
        kind = "a tar archive"
    if kind is None:
        # Old protocols have no magic bytes, and an ordinary loader would run such a file.
        names_unsafe_global(disk)
        if disk.path.suffix == ".safetensors":
            kind = "no safetensors file, whatever its name says"
    return UnreadableInput(
        "not a checkpoint",
        where=disk.label,
        why=f"it is {kind}" if kind else "its bytes are in no known format",
        fix="give a .safetensors file or one written by torch.save",
    )
