"""Safetensors files: the header, read and written strictly.

Layout: header length (8 bytes, little endian), header (JSON, padded with spaces), tensor bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...errors import UnreadableInput
from ..contents import Contents
from ..disk import Disk, Extent, contiguous_stride, element_count, plausible
from ..names import TensorInfo, shown
from .format import FileFormat
from .safe_pickle import is_pickle

HEADER_LIMIT = 100_000_000  # the limit of the safetensors library
_ALIGNMENT = 8  # bytes: the widest items of what torch computes with
_METADATA = "__metadata__"

_DTYPE_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _DTYPE_NAMES.items() if hasattr(torch, name)
}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}


def looks_like_safetensors(head: bytes, size: int) -> bool:
    """Whether the first bytes of a file of `size` bytes can be those of a safetensors header.

    A pickle may have a brace at that place, and begins with what would be a vast length.
    """
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and (length <= size or not is_pickle(head))


def read_header(disk: Disk) -> dict[str, Extent]:
    """Where each tensor of the file lies, in the order of the header.

    Names that the metadata tie to a tensor (as `safetensors.torch.save_model` does) come last.

    Raises:
        UnreadableInput: Header too large, no valid JSON, tensors that overlap, leave gaps or
            reach beyond the end, unknown dtypes, a name given twice.
    """
    length = int.from_bytes(disk.read_bytes(0, 8), "little")
    if length > HEADER_LIMIT:
        raise _broken(disk, f"its header claims {length} bytes; {HEADER_LIMIT} is the limit")
    data_start = 8 + length
    if data_start > disk.size:
        raise _short(disk, data_start)
    try:
        header = json.loads(disk.read_bytes(8, length).decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise _broken(disk, f"its header is no valid JSON ({shown(str(error))})") from error
    if not isinstance(header, dict):
        raise _broken(disk, "its header is no JSON object")
    metadata = header.pop(_METADATA, None)
    blocks, ranges = {}, []
    for name, entry in header.items():
        _require_text(disk, name)
        dtype, shape, begin, end = _entry(disk, name, entry)
        blocks[name] = Extent(data_start + begin, dtype, shape, contiguous_stride(shape))
        ranges.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            raise _broken(disk, f"tensor {name} starts at byte {begin}, not at {position}")
        position = end
    if data_start + position > disk.size:
        raise _short(disk, data_start + position)
    if data_start + position < disk.size:
        extra = disk.size - data_start - position
        raise _broken(disk, f"{extra} bytes behind its last tensor belong to none")
    return blocks | _tied(metadata, blocks)


def make_header(
    infos: Iterable[TensorInfo], ties: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The header for these tensors, and the position in the file of each.

    Entries keep the given order. Data are laid out by falling item size, so that every tensor is
    aligned to its own. `ties` (other name -> stored name) go into the metadata, where
    `safetensors.torch.save_model` puts them.
    """
    infos = tuple(infos)
    begins, position = {}, 0
    for info in sorted(infos, key=lambda info: -info.dtype.itemsize):
        begins[info.name] = position
        position += info.nbytes
    header: dict[str, Any] = {_METADATA: {"format": "pt", **dict(sorted((ties or {}).items()))}}
    for info in infos:
        begin = begins[info.name]
        header[info.name] = {
            "dtype": CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [begin, begin + info.nbytes],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    data_start = 8 + len(text)
    return (
        len(text).to_bytes(8, "little") + text,
        {name: data_start + begin for name, begin in begins.items()},
    )


def _tied(metadata: Any, blocks: Mapping[str, Extent]) -> dict[str, Extent]:
    if not isinstance(metadata, dict):
        return {}
    return {
        name: blocks[owner]
        for name, owner in metadata.items()
        if name not in blocks and name != "format" and name.isprintable()
        if isinstance(owner, str) and owner in blocks
    }


def _entry(disk: Disk, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(disk, f"the header entry of tensor {name} is malformed")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or not isinstance(code, str):
        raise _broken(disk, f"the header entry of tensor {name} is malformed")
    if not plausible(tuple(shape)):
        raise _broken(disk, f"tensor {name} has an impossible shape")
    dtype = DTYPES.get(code)
    if dtype is None:
        raise UnreadableInput(
            "a dtype that can't be averaged",
            where=f"{disk.label}, tensor {name}",
            why=f"it is stored as {shown(code, 40)}",
            fix="use a checkpoint in a floating dtype",
        )
    begin, end = offsets
    if end - begin != element_count(tuple(shape)) * dtype.itemsize:
        raise _broken(disk, f"tensor {name}: {end - begin} bytes for {code} {shown(str(shape))}")
    return dtype, tuple(shape), begin, end


def _sizes(value: Any) -> bool:
    # A bool is an int to isinstance, but no size.
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _require_text(disk: Disk, name: str) -> None:
    if not name.isprintable():
        raise _broken(disk, f"the tensor name {shown(name)} is no printable text")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name is given twice")
    return table


def _short(disk: Disk, wanted: int) -> UnreadableInput:
    return UnreadableInput(
        "a safetensors file that is cut short",
        where=disk.label,
        why=f"its header describes {wanted} bytes, the file has {disk.size}",
        fix="copy or download the file again",
    )


def _broken(disk: Disk, why: str) -> UnreadableInput:
    return UnreadableInput(
        "a broken safetensors file",
        where=disk.label,
        why=why,
        fix="copy or download the file again, or save it again",
    )


SAFETENSORS = FileFormat(
    claims=looks_like_safetensors,
    read=lambda disk: Contents(read_header(disk), "safetensors", disk),
)
