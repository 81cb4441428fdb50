"""An ONNX file without the values of its weights, read from a map of the file: shapes are all that costs depend on.

A file of two gigabytes is two gigabytes of numbers and some kilobytes of graph. Walking the protocol buffer's wire format
(protobuf.dev/programming-guides/encoding) skips the numbers unread, so that time and memory follow the graph alone, whatever a
file claims. The walk also counts what the parser would have to make: two bytes of a file can be an object of two hundred bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx

_LARGE_BYTES = 32 * 2**10
"""Values up to this size stay: shapes and axes are read from them. Messages up to this size are copied as they are."""
_MOST_FIELDS = 1_000_000
"""Fields of messages, and numbers in lists, that a graph without its weights may have."""
_MOST_BYTES_LEFT = 64 * 2**20
_DEEPEST = 90

_VARINT, _EIGHT_BYTES, _DELIMITED, _FOUR_BYTES = 0, 1, 2, 5
_VALUES, _VARINTS, _NUMBERS = "values", "values as varints", "numbers"
_VALUE_FIELDS = {
    **dict.fromkeys(("float_data", "string_data", "raw_data", "double_data"), _VALUES),
    **dict.fromkeys(("int32_data", "int64_data", "uint64_data"), _VARINTS),
}
_MOST_OF_A_VARINT = 8
"""Bytes in memory of what may be one byte in the file."""


class WireError(ValueError):
    """The bytes are no protocol buffer, or one that is too large; the message says where."""


def without_values(data: memoryview) -> bytes:
    """The ModelProto in ``data`` with the values of all large tensors left out; their shapes and names stay.

    Raises:
        WireError: if the bytes end early, are no protocol buffer, or hold more than a million fields or 64 MiB of graph.
    """
    out = bytearray()
    _Slimmer(data).message(0, len(data), _fields_of(onnx.ModelProto.DESCRIPTOR), 0, out)
    return bytes(out)


@cache
def _fields_of(message: Any) -> dict[int, Any]:
    """Fields by number: messages with their own fields, lists of numbers, and the values of a tensor."""
    fields = _FIELDS.setdefault(message.full_name, {})
    for field in message.fields:
        if message.name == "TensorProto" and field.name in _VALUE_FIELDS:
            fields[field.number] = _VALUE_FIELDS[field.name]
        elif field.message_type is not None:
            known = _FIELDS.get(field.message_type.full_name)
            fields[field.number] = _fields_of(field.message_type) if known is None else known
        elif field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
            fields[field.number] = _NUMBERS
    return fields


_FIELDS: dict[str, dict[int, Any]] = {}
"""Messages hold each other (a graph has operators, which have graphs), so that each table must be there before it is full."""


class _Slimmer:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._fields_left = _MOST_FIELDS
        self._bytes_left = _MOST_BYTES_LEFT

    def message(self, start: int, end: int, fields: dict[int, Any], depth: int, out: bytearray | None) -> None:
        """Add the message between two bytes to ``out``, slimmed. None: only count what it holds."""
        if depth > _DEEPEST:
            raise WireError(f"messages are nested more than {_DEEPEST} deep at byte {start}")
        position = start
        while position < end:
            begin = position
            key, position = self._varint(position, end)
            wire_type, inside, length = key & 7, fields.get(key >> 3), 0
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
            is_large = wire_type == _DELIMITED and length > _LARGE_BYTES
            self._count(1 + (length if inside is _NUMBERS else 0), position)  # a packed number takes at least one byte
            if is_large and (inside is _VALUES or inside is _VARINTS):
                continue
            if inside is _VARINTS:
                self._bytes_left -= _MOST_OF_A_VARINT * length
            whole = not (is_large and isinstance(inside, dict))
            if whole and out is not None:
                self._keep(out, begin, position)
            if wire_type == _DELIMITED and isinstance(inside, dict):
                inner = bytearray() if out is not None and not whole else None
                self.message(position - length, position, inside, depth + 1, inner)
                if inner is not None and out is not None:
                    out += _as_varint(key) + _as_varint(len(inner)) + inner

    def _count(self, number: int, position: int) -> None:
        self._fields_left -= number
        if self._fields_left < 0:
            raise WireError(f"there are more than {_MOST_FIELDS:,} fields before byte {position}")

    def _keep(self, out: bytearray, start: int, end: int) -> None:
        self._bytes_left -= end - start
        if self._bytes_left < 0:
            raise WireError(f"the graph without its weights takes more than {_MOST_BYTES_LEFT // 2**20} MiB at byte {start}")
        out += self._data[start:end]

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
