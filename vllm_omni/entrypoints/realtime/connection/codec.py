# SPDX-License-Identifier: Apache-2.0
"""Decode and encode msgpack messages that contain NumPy arrays. Clients are not trusted.

This module supports two array encodings. Map keys in received messages may be bytes or str.

    openpi   {b"__ndarray__": true, b"data": bin, b"dtype": str, b"shape": [...]}
             a scalar has b"__npgeneric__" instead, and no shape
    classic  {b"nd": true, b"type": str, b"kind": b"", b"shape": [...], b"data": bin}
             a scalar has b"nd": false, and no shape

Before memory is allocated for a message, its structure is checked. The nesting depth, the number of
entries and the string sizes are limited. Extension types are not allowed, and map keys must be str
or bytes. Arrays may contain only numbers or booleans, and an array's data size must match its shape
exactly. No data is unpickled. `decode` raises only `CodecError`;
tests/entrypoints/realtime/test_codec.py fuzzes it.

msgpack_numpy and openpi's copy of it are not used because msgpack_numpy unpickles object arrays. In
addition, each library reads only one encoding and has no limits.
"""

import math
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

MAX_DEPTH: Final = 32
MAX_ENTRIES: Final = 8_192
"""Maximum number of entries in a list or map."""
MAX_NODES: Final = 32_768
"""Maximum number of values in a message. A decoded value takes up about 60 bytes of memory. For
example, a message that contains 1,200 camera poses as nested lists reaches the limit.
"""
MAX_STR_BYTES: Final = 1 << 20
MAX_NDIM: Final = 8


class CodecError(Exception):
    """Raised when bytes are not a valid message. The error message states the fault and the
    limit.
    """


class TooManyValues(CodecError):
    """Raised when a message has more than `MAX_NODES` values. Rejecting such a message takes as
    long as checking the largest valid message.
    """


class MessageDialect(Enum):
    OPENPI = "openpi"
    CLASSIC = "classic"


class DecodedMessage(NamedTuple):
    value: Any
    """The decoded message."""
    dialect: MessageDialect | None
    """The message's array dialect. None: the message contains no marked array."""
    num_values: int
    """Number of values in the received message. The decoding cost depends on this number."""


# -- reading ---------------------------------------------------------------------------------------


def decode(data: bytes) -> DecodedMessage:
    """Decode one message. Arrays in the message become NumPy arrays that either own their data or
    are read-only views.

    Raises:
        CodecError: The message is malformed or exceeds a limit.
    """
    num_values, has_byte_keys = _check_structure(data)
    try:
        value = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CodecError("not valid msgpack") from None
    # Every marked array or scalar contains one of these keys: `__ndarray__`, `__npgeneric__` or
    # `nd`. The key `nd` is preceded by its length, in the shortest encoding or a longer one. Nearly
    # all control messages contain none of the keys.
    is_marked = b"__n" in data or b"\xa2nd" in data or b"\x02nd" in data
    if not is_marked and not has_byte_keys:
        return DecodedMessage(value, None, num_values)
    reviver = _Reviver()
    return DecodedMessage(reviver.revive(value), reviver.dialect, num_values)


_DECODER: Final = msgspec.msgpack.Decoder()


def _lead_bytes() -> list[tuple[str, int, int]]:
    """Return `(kind, bytes of the length field, payload length or number of entries)` for each lead
    byte.
    """
    table = [("bad", 0, 0)] * 256
    for byte in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):  # small ints, nil, booleans
        table[byte] = ("scalar", 0, 0)
    for count in range(16):
        table[0x80 + count] = ("map", 0, count)
        table[0x90 + count] = ("array", 0, count)
    for size in range(32):
        table[0xA0 + size] = ("str", 0, size)
    for byte, size in {
        0xCA: 4,
        0xCB: 8,
        0xCC: 1,
        0xCD: 2,
        0xCE: 4,
        0xCF: 8,
        0xD0: 1,
        0xD1: 2,
        0xD2: 4,
        0xD3: 8,
    }.items():
        table[byte] = ("scalar", 0, size)
    for byte, kind, width in (
        *((0xC4 + i, "bin", 1 << i) for i in range(3)),
        *((0xD9 + i, "str", 1 << i) for i in range(3)),
        *((0xDC + i, "array", 2 << i) for i in range(2)),
        *((0xDE + i, "map", 2 << i) for i in range(2)),
    ):
        table[byte] = (kind, width, 0)
    return table


_LEADS: Final = _lead_bytes()
_KEY_SIZES: Final = tuple(
    1 + length if kind == "str" and not width else 0 for kind, width, length in _LEADS
)
"""Size in bytes of a map key, indexed by lead byte. The size is 0 if the lead byte does not
determine it.
"""
_VALUE_SIZES: Final = tuple(
    1 + length if kind == "scalar" else key_size
    for (kind, _, length), key_size in zip(_LEADS, _KEY_SIZES, strict=True)
)
"""Size in bytes of a list entry or map value, indexed by lead byte. The size is 0 if the lead byte
does not determine it.
"""


def _check_structure(data: bytes) -> tuple[int, bool]:
    """Check a message's structure without decoding the message into objects.

    The check takes time linear in the number of values (at most `MAX_NODES`) and constant memory.

    Returns:
        `(num_values, has_bin_key)`: the number of values, and whether any map key has type bin.
    """
    size, position, nodes, has_byte_keys = len(data), 0, 0, False
    left = 1  # remaining values in the innermost open container
    is_map = False  # whether that container is a map, in which keys and values alternate
    outer: list[tuple[int, bool]] = []  # `(left, is_map)` of the enclosing containers
    while left or outer:
        if not left:
            left, is_map = outer.pop()
            continue
        is_key = is_map and not left & 1
        left -= 1
        nodes += 1
        if nodes > MAX_NODES:
            raise TooManyValues(
                f"more than {MAX_NODES} values in one message; send numbers as arrays"
            )
        if position >= size:
            raise CodecError("message is truncated")
        lead = data[position]
        if whole := _KEY_SIZES[lead] if is_key else _VALUE_SIZES[lead]:
            position += whole  # short strings, numbers, booleans: nearly all values
            continue
        kind, width, length = _LEADS[lead]
        position += 1
        if width:
            length = int.from_bytes(data[position : position + width])
            position += width
            if position > size:
                raise CodecError("message is truncated")
        if is_key and kind != "str":
            if kind != "bin":
                raise CodecError("map keys must be strings")
            has_byte_keys = True
        if kind in ("array", "map"):
            if length > MAX_ENTRIES:
                raise CodecError(
                    f"a list or map of {length} entries; at most {MAX_ENTRIES} are allowed"
                )
            if len(outer) >= MAX_DEPTH:
                raise CodecError(f"nested deeper than {MAX_DEPTH} levels")
            outer.append((left, is_map))
            is_map = kind == "map"
            left = 2 * length if is_map else length
            continue
        if kind == "bad":
            raise CodecError("extension types are not allowed")
        if kind == "str" and length > MAX_STR_BYTES:
            raise CodecError(f"a string of {length} bytes; at most {MAX_STR_BYTES} are allowed")
        position += length
        if position > size:
            raise CodecError("message is truncated")
    if position > size:
        raise CodecError("message is truncated")
    if position < size:
        raise CodecError(f"{size - position} bytes follow the message")
    return nodes, has_byte_keys


class _Reviver:
    """Converts marked maps to arrays and byte keys to str, and records the dialect."""

    def __init__(self) -> None:
        self.dialect: MessageDialect | None = None

    def revive(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.revive(item) if isinstance(item, list | dict) else item for item in value]
        if not isinstance(value, dict):
            return value
        fields = {key if isinstance(key, str) else _text(key): item for key, item in value.items()}
        if "__ndarray__" in fields:
            self.dialect = MessageDialect.OPENPI
            return _array(fields.get("dtype"), fields.get("shape"), fields.get("data"))
        if "__npgeneric__" in fields:
            self.dialect = MessageDialect.OPENPI
            return _array(fields.get("dtype"), [], fields.get("data")).item()
        if "nd" in fields and "data" in fields:
            self.dialect = MessageDialect.CLASSIC
            if fields.get("kind") not in (None, b"", ""):
                raise CodecError(
                    "structured and object arrays are not allowed; send numbers or booleans"
                )
            if fields["nd"] is True:
                return _array(fields.get("type"), fields.get("shape"), fields.get("data"))
            return _array(fields.get("type"), [], fields.get("data")).item()
        return {
            key: self.revive(item) if isinstance(item, list | dict) else item
            for key, item in fields.items()
        }


def _text(key: bytes) -> str:  # `_check_structure` allows only str and bytes
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise CodecError("a map key is not UTF-8") from None


def _dtypes() -> dict[str, np.dtype[Any]]:
    """Return the accepted dtypes by name, for example "<f4", ">f4", "=f4", "f4" and "float32"."""
    spellings = {}
    for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"):
        plain = np.dtype(code)
        spellings.update({plain.name: plain, plain.str: plain})
        spellings.update(
            {order + code: np.dtype(order + code) for order in ("", "|", "<", ">", "=")}
        )
    return spellings


_DTYPES: Final = _dtypes()


def _array(dtype_name: Any, shape: Any, data: Any) -> np.ndarray:
    """Build an array from its parts, in native byte order.

    Raises:
        CodecError: The dtype or shape is invalid, or the data is not a byte string of exactly the
            size that they require.
    """
    if isinstance(dtype_name, bytes):
        dtype_name = dtype_name.decode(errors="replace")
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CodecError(
            "array dtype must be one of |b1 |u1 |i1 <u2 <i2 <u4 <i4 <u8 <i8 <f2 <f4 <f8"
        )
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_NDIM
        or any(type(n) is not int or n < 0 for n in shape)
    ):
        raise CodecError(f"array shape must be a list of at most {MAX_NDIM} whole numbers >= 0")
    if not isinstance(data, bytes):
        raise CodecError("array data must be binary")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != len(data):
        raise CodecError(f"array data has {len(data)} bytes; its shape and dtype need {nbytes}")
    if nbytes == 0:
        try:
            return np.zeros(shape, dtype.newbyteorder("="))
        # One dimension is 0, so the other dimensions may be arbitrarily large.
        except (ValueError, OverflowError):
            raise CodecError("array shape has an absurd dimension") from None
    if dtype.kind == "b":
        # A message may contain any byte value, so convert the data: a boolean array must contain
        # only 0 and 1.
        return np.frombuffer(data, np.uint8).reshape(shape).astype(np.bool_)
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


# -- writing ---------------------------------------------------------------------------------------


def encode(message: Mapping[str, Any], dialect: MessageDialect | None = None) -> bytes:
    """Encode a message as msgpack.

    Args:
        message: Map whose values have JSON types or are bytes, memoryviews, C-contiguous NumPy
            arrays, or maps and lists of these.
        dialect: Array dialect. Default: openpi.
    """
    return _ENCODERS[dialect or MessageDialect.OPENPI].encode(message)


def _marked(array: Any, dialect: MessageDialect) -> dict[bytes, Any]:
    """Return an array as a marked map without copying its data."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"a message cannot contain a {type(array).__name__}")
    if array.dtype.kind not in "biuf" or not array.flags.c_contiguous:
        raise TypeError(f"only C-contiguous numbers and booleans are sent, got {array.dtype}")
    data: bytes | memoryview = array.data.cast("B") if array.size else b""
    shape, dtype = list(array.shape), array.dtype.str
    if dialect is MessageDialect.CLASSIC:
        return {b"nd": True, b"type": dtype, b"kind": b"", b"shape": shape, b"data": data}
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}


_ENCODERS: Final = {
    dialect: msgspec.msgpack.Encoder(enc_hook=partial(_marked, dialect=dialect))
    for dialect in MessageDialect
}
