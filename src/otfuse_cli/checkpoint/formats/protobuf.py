"""The outermost fields of a protobuf message: what tells graph formats without magic bytes.

A field is a key (its number times 8, and a wire type) and a value; numbers are written in groups of
seven bits, the lowest first (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from ..disk import Disk

_MOST_FIELDS = 64  # read of a file: a graph may have thousands, and the first ones tell it
_LONGEST = 20  # bytes of a key and the number behind it
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types

# Numbers of the fields, from onnx.proto (ModelProto), saved_model.proto, graph.proto (GraphDef) and
# Model.proto of Core ML, where those from 200 on are kinds of models.
_ONNX = {1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26}
_ONNX_GRAPH, _ONNX_OPERATORS = 7, 8
_COREML_KINDS = range(200, 3001)


def is_onnx(disk: Disk) -> bool:
    """Whether a file is a ModelProto of ONNX: its version, a graph and the operators' versions."""
    fields = _fields(disk)
    numbers = {number for number, _ in fields}
    needed = {(1, _VARINT), (_ONNX_GRAPH, _BYTES), (_ONNX_OPERATORS, _BYTES)}
    return needed <= set(fields) and numbers <= _ONNX


def is_tensorflow_graph(disk: Disk) -> bool:
    """Whether a file is a SavedModel (version, graphs) or a GraphDef (nodes, versions)."""
    fields = set(_fields(disk))
    return fields == {(1, _VARINT), (2, _BYTES)} or (
        {(1, _BYTES), (4, _BYTES)}
        <= fields
        <= {(1, _BYTES), (2, _BYTES), (3, _VARINT), (4, _BYTES)}
    )


def is_coreml(disk: Disk) -> bool:
    """Whether a file is a Model of Core ML: its version, a description and a kind."""
    fields = _fields(disk)
    has_kind = any(number in _COREML_KINDS for number, wire in fields if wire == _BYTES)
    return has_kind and fields[:2] == [(1, _VARINT), (2, _BYTES)]


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
