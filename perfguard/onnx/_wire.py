"""An ONNX file without the values of its weights, read from a map of the file: shapes are all that costs depend on.

A file of two gigabytes is two gigabytes of numbers and some kilobytes of graph. Walking the protocol buffer's wire format
(protobuf.dev/programming-guides/encoding) skips the numbers unread, so that time and memory follow the graph alone, whatever a
file claims. The field numbers are those of onnx/onnx.proto.
"""

from __future__ import annotations

from typing import Any

_LARGE_BYTES = 32 * 2**10
"""Values up to this size stay: shapes and axes are read from them. Messages up to this size are copied as they are."""
_MOST_FIELDS = 1_000_000
_MOST_BYTES_LEFT = 64 * 2**20
_DEEPEST = 60

_VARINT, _EIGHT_BYTES, _DELIMITED, _FOUR_BYTES = 0, 1, 2, 5
_VALUES = "values"
# Which fields hold messages to look into, and which the values of a tensor.
_TENSOR: dict[int, Any] = dict.fromkeys((4, 5, 6, 7, 9, 10, 11), _VALUES)
_SPARSE: dict[int, Any] = {1: _TENSOR, 2: _TENSOR}
_NODE: dict[int, Any] = {}
_GRAPH: dict[int, Any] = {1: _NODE, 5: _TENSOR, 15: _SPARSE}
_ATTRIBUTE: dict[int, Any] = {5: _TENSOR, 10: _TENSOR, 6: _GRAPH, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE}
_NODE[5] = _ATTRIBUTE
_MODEL: dict[int, Any] = {7: _GRAPH, 25: {7: _NODE}}


class WireError(ValueError):
    """The bytes are no protocol buffer, or one that is too large; the message says where."""


def without_values(data: memoryview) -> bytes:
    """The ModelProto in ``data`` with the values of all large tensors left out; their shapes and names stay.

    Raises:
        WireError: if the bytes end early, are no protocol buffer, or hold more than a million fields.
    """
    slimmer = _Slimmer(data)
    return bytes(slimmer.message(0, len(data), _MODEL, 0))


class _Slimmer:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._fields_left = _MOST_FIELDS
        self._bytes_left = _MOST_BYTES_LEFT

    def message(self, start: int, end: int, fields: dict[int, Any], depth: int) -> bytearray:
        """The message between two bytes, slimmed."""
        if depth > _DEEPEST:
            raise WireError(f"messages are nested more than {_DEEPEST} deep at byte {start}")
        out = bytearray()
        position = start
        while position < end:
            begin = position
            key, position = self._varint(position, end)
            wire_type, inside = key & 7, fields.get(key >> 3)
            if wire_type == _VARINT:
                _, position = self._varint(position, end)
            elif wire_type == _DELIMITED:
                length, position = self._varint(position, end)
                position += length
            elif wire_type in (_EIGHT_BYTES, _FOUR_BYTES):
                position += 8 if wire_type == _EIGHT_BYTES else 4
            else:
                raise WireError(f"there is no protocol buffer at byte {begin}")
            if position > end:
                raise WireError(f"the field at byte {begin} ends at byte {position}, but the data ends at byte {end}")
            if wire_type != _DELIMITED or inside is None or length <= _LARGE_BYTES:
                self._keep(out, self._data[begin:position], begin)
            elif inside is not _VALUES:
                inner = self.message(position - length, position, inside, depth + 1)
                out += _as_varint(key) + _as_varint(len(inner)) + inner
            self._fields_left -= 1
            if self._fields_left < 0:
                raise WireError(f"there are more than {_MOST_FIELDS:,} fields before byte {position}")
        return out

    def _keep(self, out: bytearray, part: memoryview, at: int) -> None:
        self._bytes_left -= len(part)
        if self._bytes_left < 0:
            raise WireError(f"the graph without its weights takes more than {_MOST_BYTES_LEFT // 2**20} MiB at byte {at}")
        out += part

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        """The number at ``position``, and where it ends."""
        value = shift = 0
        while position < end and shift < 64:
            byte = self._data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
            shift += 7
        raise WireError(f"a number at byte {position} does not end")


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
