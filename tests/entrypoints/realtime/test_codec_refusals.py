# SPDX-License-Identifier: Apache-2.0
"""The codec byte by byte: what each refusal says, the limits themselves, and what is written for
each length.
"""

import struct
from typing import Any

import msgspec
import numpy as np
import pytest

from vllm_omni.entrypoints.realtime.connection.codec import (
    MAX_DEPTH,
    MAX_ENTRIES,
    MAX_NDIM,
    MAX_NODES,
    MAX_STR_BYTES,
    CodecError,
    Decoded,
    Dialect,
    _header,
    _parts,
    decode,
    encode,
)

NIL = b"\xc0"
TRUNCATED = "message is truncated"
DTYPES = "array dtype must be one of |b1 |u1 |i1 <u2 <i2 <u4 <i4 <u8 <i8 <f2 <f4 <f8"
SHAPES = "array shape must be a list of at most 8 whole numbers >= 0"
OBJECTS = "structured and object arrays are not allowed; send numbers or booleans"
DATA = struct.pack("<4f", 1, 2, 3, 4)


def refusal(data: bytes) -> str:
    with pytest.raises(CodecError) as refused:
        decode(data)
    return str(refused.value)


def list_of(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + NIL * count


def map_of(count: int) -> bytes:
    return (
        b"\xdf"
        + struct.pack(">I", count)
        + b"".join(b"\xa5%05d\xc0" % number for number in range(count))
    )


def openpi(**changes: Any) -> dict[str, Any]:
    return {"__ndarray__": True, "data": DATA, "dtype": "<f4", "shape": [2, 2], **changes}


def classic(**changes: Any) -> dict[str, Any]:
    return {"nd": True, "type": "<f4", "kind": b"", "shape": [2, 2], "data": DATA, **changes}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", TRUNCATED),
        (b"\xc0\xc0", "1 bytes follow the message"),
        (b"\x90\xc0\xc0", "2 bytes follow the message"),
        (b"\x81\x01\x02", "map keys must be strings"),
        (b"\x82\xa1a\x01\x02\x03", "map keys must be strings"),
        (b"\x82\xa1a\x81\xa1b\x01\xc0\xc0", "map keys must be strings"),
        (b"\x81\x90\x01", "map keys must be strings"),
        (b"\x81\xc4\x01\xff\x01", "a map key is not UTF-8"),
        (b"\xa2\xff\xfe", "not valid msgpack (UnicodeDecodeError)"),
        (b"\xdd\xff\xff\xff\xff", "a list or map of 4294967295 entries; at most 8192 are allowed"),
        (b"\xdf\x00\x01\x00\x01", "a list or map of 65537 entries; at most 8192 are allowed"),
        (list_of(MAX_ENTRIES + 1), "a list or map of 8193 entries; at most 8192 are allowed"),
        (b"\x91" * (MAX_DEPTH + 1) + NIL, "nested deeper than 32 levels"),
        (b"\x81\xa1a" * (MAX_DEPTH + 1) + NIL, "nested deeper than 32 levels"),
        (
            b"\xdb" + struct.pack(">I", MAX_STR_BYTES + 1),
            "a string of 1048577 bytes; at most 1048576 are allowed",
        ),
        (b"\xdb" + struct.pack(">I", MAX_STR_BYTES), TRUNCATED),
        (b"\xc6\xff\xff\xff\xff", TRUNCATED),
    ],
)
def test_a_refused_message_is_notified_why(data: bytes, text: str) -> None:
    """In words that name the limit, so that a client's author need not guess."""
    assert refusal(data) == text


@pytest.mark.parametrize("code", [0xC1, 0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)])
def test_every_extension_type_is_refused(code: int) -> None:
    """Whatever its length says, and however much of it has arrived."""
    assert (
        refusal(bytes([code]))
        == refusal(bytes([code]) + bytes(18))
        == "extension types are not allowed"
    )


ALL_FORMS = (
    # a list of 25: small and sized integers, floats, every length of text, bytes, list and map
    b"\xdc\x00\x19"
    b"\x7f\xff\xcc\xff\xcd\xff\xff\xce\xff\xff\xff\xff\xcf\xff\xff\xff\xff\xff\xff\xff\xff"
    b"\xd0\x80\xd1\x80\x00\xd2\x80\x00\x00\x00\xd3\x80\x00\x00\x00\x00\x00\x00\x00"
    b"\xca\x3f\xc0\x00\x00\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"
    b"\xc0\xc2\xc3"
    b"\xa1a\xd9\x01b\xda\x00\x01c\xdb\x00\x00\x00\x01d"
    b"\xc4\x01e\xc5\x00\x01f\xc6\x00\x00\x00\x01g"
    b"\xde\x00\x01\xa1h\x91\x01"
    b"\xdf\x00\x00\x00\x01\xc4\x01i\xdd\x00\x00\x00\x01\x82\xa1j\x01\xa1k\x90"
    b"\x80"
)


def test_every_form_of_every_value_is_read() -> None:
    """As another msgpack library reads it; only keys that are bytes become text."""
    *plain, last, empty = msgspec.msgpack.decode(ALL_FORMS)
    assert len(plain) == 23 and (last, empty) == ({b"i": [{"j": 1, "k": []}]}, {})
    assert decode(ALL_FORMS) == Decoded([*plain, {"i": [{"j": 1, "k": []}]}, {}], None, 36)


def test_a_message_that_ends_early_or_late_is_refused() -> None:
    """At every byte of every form."""
    for end in range(len(ALL_FORMS)):
        assert refusal(ALL_FORMS[:end]) == TRUNCATED
    assert refusal(ALL_FORMS + b"123") == "3 bytes follow the message"


def test_each_limit_is_the_last_that_is_allowed() -> None:
    """Entries of a list and of a map, depth of both, values in all; only text is bounded in
    bytes.
    """
    assert decode(list_of(MAX_ENTRIES)).value == [None] * MAX_ENTRIES
    assert len(decode(map_of(MAX_ENTRIES)).value) == MAX_ENTRIES
    decode(b"\x91" * MAX_DEPTH + NIL)
    decode(b"\x81\xa1a" * MAX_DEPTH + NIL)
    decode(b"\x92" + (b"\x91" * (MAX_DEPTH - 1) + NIL) * 2)
    assert len(decode(msgspec.msgpack.encode("x" * MAX_STR_BYTES)).value) == MAX_STR_BYTES
    assert len(decode(msgspec.msgpack.encode(bytes(MAX_STR_BYTES + 1))).value) == MAX_STR_BYTES + 1
    full = list_of(MAX_ENTRIES) * 3
    assert decode(b"\x94" + full + list_of(MAX_NODES - 5 - 3 * MAX_ENTRIES)).num_values == MAX_NODES
    over = b"\x94" + full + list_of(MAX_NODES - 4 - 3 * MAX_ENTRIES)
    assert refusal(over) == "more than 32768 values in one message; send numbers as arrays"


@pytest.mark.parametrize(
    ("marked", "text"),
    [
        (openpi(dtype="O"), DTYPES),
        (openpi(dtype=b"\xff"), DTYPES),
        (openpi(dtype=["<f4"]), DTYPES),
        (openpi(shape=[1] * (MAX_NDIM + 1)), SHAPES),
        (openpi(shape=[4, -1]), SHAPES),
        (openpi(shape=[4.0]), SHAPES),
        (openpi(shape=[True, 4]), SHAPES),
        (openpi(shape=4), SHAPES),
        (openpi(data="1234567890123456"), "array data must be binary"),
        (openpi(shape=[2, 3]), "array data has 16 bytes; its shape and dtype need 24"),
        (openpi(data=DATA[:-1]), "array data has 15 bytes; its shape and dtype need 16"),
        (openpi(shape=[0]), "array data has 16 bytes; its shape and dtype need 0"),
        (openpi(shape=[0, 2**62, 2**62], data=b""), "array shape has an absurd dimension"),
        (openpi(shape=[0, 2**64 - 1], data=b""), "array shape has an absurd dimension"),
        (classic(kind=b"V"), OBJECTS),
        (classic(kind="O"), OBJECTS),
        (classic(type="<c8"), DTYPES),
        (classic(shape=None), SHAPES),
        (
            {"nd": False, "type": "<f8", "data": b"12"},
            "array data has 2 bytes; its shape and dtype need 8",
        ),
        (
            {"__npgeneric__": True, "dtype": "<f8", "data": b"12"},
            "array data has 2 bytes; its shape and dtype need 8",
        ),
    ],
)
def test_a_refused_array_is_notified_why(marked: dict[str, Any], text: str) -> None:
    assert refusal(msgspec.msgpack.encode({"a": marked})) == text


@pytest.mark.parametrize(
    ("marked", "value", "dialect"),
    [
        ({"__npgeneric__": True, "dtype": "<i2", "data": b"\x05\x00"}, 5, Dialect.OPENPI),
        ({"nd": False, "type": ">i2", "data": b"\x00\x05"}, 5, Dialect.CLASSIC),
        ({"nd": 1, "type": ">i2", "data": b"\x00\x05"}, 5, Dialect.CLASSIC),
        ({"nd": False, "type": "|b1", "kind": "", "data": b"\x02"}, True, Dialect.CLASSIC),
        ({"nd": True}, {"nd": True}, None),
        ({"data": b"1", "kind": "x"}, {"data": b"1", "kind": "x"}, None),
    ],
)
def test_only_marked_maps_become_numbers(
    marked: dict[str, Any], value: Any, dialect: Dialect | None
) -> None:
    """A map that has only one of a dialect's keys is a map, and no dialect is reported for it."""
    decoded = decode(msgspec.msgpack.encode([marked]))
    assert decoded == Decoded([value], dialect, 2 + 2 * len(marked))


@pytest.mark.parametrize("order", ["<", ">", "=", "", "|"])
@pytest.mark.parametrize("shape", [[], [0], [2], [2, 0, 3], [1] * MAX_NDIM])
def test_arrays_come_back_in_native_byte_order(order: str, shape: list[int]) -> None:
    """Empty ones and scalars of no dimension, too; of as many dimensions as are allowed."""
    sent = np.arange(np.prod(shape, dtype=int), dtype=f"{order}i4").reshape(shape)
    message = {"a": openpi(dtype=f"{order}i4", shape=shape, data=sent.tobytes())}
    found = decode(msgspec.msgpack.encode(message)).value["a"]
    assert found.dtype == np.dtype("i4") and found.dtype.isnative
    assert found.shape == tuple(shape) and (found == sent).all()


def test_a_large_array_in_native_order_is_not_copied() -> None:
    """It shares the message's bytes, read-only; one of booleans is copied, byte by byte made 0
    or 1.
    """
    native = decode(msgspec.msgpack.encode(openpi())).value
    assert not native.flags.owndata and not native.flags.writeable
    booleans = decode(msgspec.msgpack.encode(openpi(dtype="|b1", shape=[16]))).value
    assert booleans.dtype == np.bool_ and booleans.view(np.uint8).max() == 1


@pytest.mark.parametrize(
    ("value", "head"),
    [
        ({}, b"\x80"),
        ({str(number): None for number in range(15)}, b"\x8f"),
        ({str(number): None for number in range(16)}, b"\xde\x00\x10"),
        ({str(number): None for number in range(65_535)}, b"\xde\xff\xff"),
        ({str(number): None for number in range(65_536)}, b"\xdf\x00\x01\x00\x00"),
        ([b""] * 15, b"\x9f"),
        ((b"",) * 16, b"\xdc\x00\x10"),
        ([b""] * 65_535, b"\xdc\xff\xff"),
        ([b""] * 65_536, b"\xdd\x00\x01\x00\x00"),
        (b"\0" * 255, b"\xc4\xff"),
        (b"\0" * 4095, b"\xc5\x0f\xff"),
        (b"\0" * 4096, b"\xc5\x10\x00"),
        (memoryview(b"\0" * 4096), b"\xc5\x10\x00"),
        (b"\0" * 65_535, b"\xc5\xff\xff"),
        (b"\0" * 65_536, b"\xc6\x00\x01\x00\x00"),
    ],
)
def test_lengths_are_written_in_the_shortest_form(value: Any, head: bytes) -> None:
    """The same bytes as another msgpack library writes."""
    written = b"".join(_parts(value, Dialect.OPENPI))
    assert written.startswith(head) and written == msgspec.msgpack.encode(value)


def test_what_does_not_fit_msgpack_is_refused() -> None:
    """Lengths have 32 bits; nobody makes such a message, and nobody is sent a wrong one."""
    codes = {2: 0xC5, 4: 0xC6}
    assert _header((1 << 32) - 1, 0, 0, codes) == b"\xc6\xff\xff\xff\xff"
    with pytest.raises(ValueError, match=r"^4294967296 bytes or entries do not fit msgpack$"):
        _header(1 << 32, 0, 0, codes)


@pytest.mark.parametrize(
    ("dialect", "keys"),
    [
        (Dialect.OPENPI, {b"__ndarray__": True, b"dtype": "<f4", b"shape": [2, 2], b"data": DATA}),
        (
            Dialect.CLASSIC,
            {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2, 2], b"data": DATA},
        ),
    ],
)
def test_an_array_is_written_with_the_dialects_keys(
    dialect: Dialect, keys: dict[bytes, Any]
) -> None:
    """And no others; inside lists, tuples and maps, and without elements."""
    array = np.frombuffer(DATA, np.float32).reshape(2, 2)
    message = {"a": array, "b": [array], "c": ({"d": array},), "e": [[1, array]]}
    expected = {"a": keys, "b": [keys], "c": [{"d": keys}], "e": [[1, keys]]}
    assert msgspec.msgpack.decode(encode(message, dialect)) == expected
    empty = msgspec.msgpack.decode(encode({"a": array[:0]}, dialect))["a"]
    assert empty == {**keys, b"shape": [0, 2], b"data": b""}


def test_the_default_dialect_is_openpi() -> None:
    assert b"__ndarray__" in encode({"a": np.zeros(1)})


def test_a_large_arrays_bytes_are_handed_on_as_they_are() -> None:
    """The message is joined from the array's own memory, without a copy in between."""
    array = np.zeros(4096, np.uint8)
    (view,) = [
        part for part in _parts({"a": array}, Dialect.OPENPI) if isinstance(part, memoryview)
    ]
    assert np.shares_memory(np.frombuffer(view, np.uint8), array)
