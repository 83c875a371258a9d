"""Files without magic bytes, told by their structure: protobuf, MessagePack, TensorFlow's tables.

A field of a protobuf message is a key (its number times 8, and a wire type) and a value; numbers
are written in groups of seven bits, the lowest first
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import re

from ..disk import Disk

_MOST_FIELDS = 64  # read of a file: a graph may have thousands, and the first ones tell it
_LONGEST = 20  # bytes of a key and the number behind it
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types

# Numbers of the fields, from onnx.proto (ModelProto), saved_model.proto, graph.proto (GraphDef) and
# Model.proto of Core ML, where those from 200 on are kinds of models.
_ONNX = {1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26}
_ONNX_GRAPH, _ONNX_OPERATORS = 7, 8
_COREML_KINDS = range(200, 3001)


def is_onnx(disk: Disk, head: bytes) -> bool:
    """Whether a file is a ModelProto of ONNX: its version, a graph and the operators' versions."""
    fields = _fields(disk)
    numbers = {number for number, _ in fields}
    needed = {(1, _VARINT), (_ONNX_GRAPH, _BYTES), (_ONNX_OPERATORS, _BYTES)}
    return needed <= set(fields) and numbers <= _ONNX


def is_tensorflow_graph(disk: Disk, head: bytes) -> bool:
    """Whether a file is a SavedModel (version, graphs) or a GraphDef (nodes, versions)."""
    fields = set(_fields(disk))
    return fields == {(1, _VARINT), (2, _BYTES)} or (
        {(1, _BYTES), (4, _BYTES)}
        <= fields
        <= {(1, _BYTES), (2, _BYTES), (3, _VARINT), (4, _BYTES)}
    )


def is_coreml(disk: Disk, head: bytes) -> bool:
    """Whether a file is a Model of Core ML: its version, a description and a kind."""
    fields = _fields(disk)
    has_kind = any(number in _COREML_KINDS for number, wire in fields if wire == _BYTES)
    return has_kind and fields[:2] == [(1, _VARINT), (2, _BYTES)]


def is_tensorflow_index(disk: Disk, head: bytes) -> bool:
    """The index of a TensorFlow checkpoint is a table that ends in eight bytes of its own."""
    return disk.read_bytes(max(0, disk.size - 8), 8) == b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"


def is_tensorflow_data(disk: Disk, head: bytes) -> bool:
    """Raw numbers: nothing but the name tells them."""
    return re.search(r"\.data-\d{5}-of-\d{5}$", disk.path.name) is not None


def is_msgpack(disk: Disk, head: bytes) -> bool:
    """A map of MessagePack whose first key is a name, and whose first value a map or an array.

    The first byte is 0x80 and the number of entries, or 0xde or 0xdf and that number; the key is
    0xa0 and its length, or 0xd9 and that length, and text; flax marks an array as an extension.
    """
    if len(head) < 4 or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        return False
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    kind = head[at : at + 1]
    if b"\xa1" <= kind <= b"\xbf":
        size = kind[0] - 0xA0
    elif kind == b"\xd9":
        at += 1
        size = int.from_bytes(head[at : at + 1], "little")
    else:
        return False
    key, value = head[at + 1 : at + 1 + size], head[at + 1 + size : at + 2 + size]
    is_map = b"\x80" <= value <= b"\x8f" or value in (b"\xde", b"\xdf")
    is_extension = value in (b"\xc7", b"\xc8", b"\xc9")
    return key.isascii() and key.decode("ascii").isprintable() and (is_map or is_extension)


def _fields(disk: Disk) -> list[tuple[int, int]]:
    """Number and wire type of the outermost fields; none where the bytes are no message."""
    fields: list[tuple[int, int]] = []
    position = 0
    while position < disk.size and len(fields) < _MOST_FIELDS:
        data = disk.read_bytes(position, _LONGEST)
        key, start = _number(data, 0)
        number, wire = key >> 3, key & 7
        if wire in (_VARINT, _BYTES):
            value, start = _number(data, start)
        else:
            value = 0
        length = {_VARINT: 0, _FIXED64: 8, _BYTES: value, _FIXED32: 4}.get(wire)
        position += start + (length or 0)
        if not start or not number or length is None or position > disk.size:
            return []
        fields.append((number, wire))
    return fields


def _number(data: bytes, start: int) -> tuple[int, int]:
    """The number at `start`, and where the next byte lies; 0 and 0 where there is none."""
    value = 0
    for count, byte in enumerate(data[start : start + 10]):  # ten groups hold 64 bits
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, start + count + 1
    return 0, 0
