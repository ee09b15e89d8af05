# SPDX-License-Identifier: Apache-2.0
"""The msgpack codec: both array dialects, the limits, and the text of each error.

Bytes from untrusted clients may raise only `CodecError`.
"""

import contextlib
import random
import struct
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.waits import seconds
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm_omni.entrypoints.realtime.connection.codec import (
    MAX_DEPTH,
    MAX_ENTRIES,
    MAX_NDIM,
    MAX_NODES,
    MAX_STR_BYTES,
    CodecError,
    DecodedMessage,
    MessageDialect,
    decode,
    encode,
)

pack = msgspec.msgpack.encode

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
ARRAYS = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="="),
        hnp.unsigned_integer_dtypes(endianness="="),
        hnp.floating_dtypes(endianness="=", sizes=(16, 32, 64)),
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)
# Keys such as "nd", which mark arrays in a dialect, are excluded.
KEYS = st.text("abcxyz", max_size=8)
MESSAGES = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS | ARRAYS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=12,
    ),
    max_size=6,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@given(MESSAGES, st.sampled_from(MessageDialect))
@settings(max_examples=300, deadline=None)
def test_encoded_values_survive_a_round_trip(
    message: dict[str, Any], dialect: MessageDialect
) -> None:
    """Values and arrays of every accepted dtype are bit-identical after a round trip in both
    dialects.
    """
    assert same(decode(encode(message, dialect)).value, message)


DATA = struct.pack("<4f", 1, 2, 3, 4)


def openpi(**changes: Any) -> dict[Any, Any]:
    fields = {
        "__ndarray__": True,
        "data": DATA,
        "dtype": "<f4",
        "shape": [2, 2],
        **changes,
    }
    return {key.encode(): value for key, value in fields.items()}


def classic(**changes: Any) -> dict[Any, Any]:
    fields = {
        "nd": True,
        "type": "<f4",
        "kind": b"",
        "shape": [2, 2],
        "data": DATA,
        **changes,
    }
    return {key.encode(): value for key, value in fields.items()}


@pytest.mark.parametrize(
    ("marked", "dialect"),
    [
        (openpi(), MessageDialect.OPENPI),
        ({key.decode(): value for key, value in openpi().items()}, MessageDialect.OPENPI),
        (openpi(dtype=">f4", data=struct.pack(">4f", 1, 2, 3, 4)), MessageDialect.OPENPI),
        (openpi(dtype="float32"), MessageDialect.OPENPI),
        (openpi(dtype=b"<f4"), MessageDialect.OPENPI),
        (classic(), MessageDialect.CLASSIC),
        ({key.decode(): value for key, value in classic().items()}, MessageDialect.CLASSIC),
        (classic(kind=None), MessageDialect.CLASSIC),
    ],
)
def test_both_dialects_of_arrays_are_read(marked: dict[Any, Any], dialect: MessageDialect) -> None:
    """The keys of an array's map may be bytes or text, and the array may have either byte order.
    The decoder returns the array in native order and reports the dialect.
    """
    decoded = decode(pack({"a": [marked]}))
    array = decoded.value["a"][0]
    assert decoded.dialect is dialect
    assert (array.dtype, array.tolist()) == (np.dtype("f4"), [[1, 2], [3, 4]])


def test_the_last_of_duplicate_keys_counts() -> None:
    """If a key occurs several times, its last value is used, as in other msgpack libraries."""
    assert decode(b"\x82\xa1a\x01\xa1a\x02").value == {"a": 2}


def test_large_arrays_are_copied_once() -> None:
    """A raw 14.4 MB chunk is encoded in less than 50 ms, because its bytes are copied only once."""
    frames_THWC = np.zeros((12, 480, 832, 3), np.uint8)
    encode({"video": frames_THWC})
    started_s = time.perf_counter()
    data = encode({"video": frames_THWC})
    assert time.perf_counter() - started_s < seconds(0.05)
    assert len(data) - frames_THWC.nbytes < 100


SEEDS = [
    encode(
        {
            "endpoint": "infer",
            "prompt": "a path",
            "camera": {"poses": np.zeros((2, 4, 4), np.float32), "intrinsics": np.ones(4)},
            "extra_body": {
                "height": 480,
                "seed": 2**40,
                "options": {"list": [1, 2.5, None, True, "x"]},
            },
        },
        dialect,
    )
    for dialect in MessageDialect
]


def mutated(data: bytes, random_: random.Random) -> bytes:
    """Return the data with random bit flips, insertions, deletions, repeated parts and wrong
    lengths.
    """
    mutant = bytearray(data)
    for _ in range(random_.randint(1, 6)):
        at = random_.randrange(len(mutant)) if mutant else 0
        match random_.randrange(6):
            case 0 if mutant:
                mutant[at] ^= 1 << random_.randrange(8)
            case 1 if mutant:
                mutant[at] = random_.randrange(256)
            case 2:
                del mutant[at : at + random_.randint(1, 9)]
            case 3:
                mutant[at:at] = random_.randbytes(random_.randint(1, 9))
            case 4:
                mutant[at:at] = mutant[random_.randrange(len(mutant) + 1) :][:40]
            case 5:
                mutant[at:at] = (
                    random_.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\x92", b"\x82"])
                    + b"\x7f\xff\xff\xff"
                )
    return bytes(mutant)


@given(st.binary(max_size=200))
@settings(max_examples=1000, deadline=None)
def test_any_bytes_raise_nothing_but_codec_errors(data: bytes) -> None:
    """Random bytes either decode to a message or raise `CodecError`. Encoding a decoded message and
    decoding it again yields an equal message.
    """
    with contextlib.suppress(CodecError):
        message = decode(data)
        again = encode(message.value, message.dialect)
        assert encode(decode(again).value, message.dialect) == again


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.zeros(2, object),
        np.zeros(2, np.complex64),
        np.zeros(2, "U1"),
    ],
)
def test_arrays_that_cannot_be_sent_are_refused(array: np.ndarray) -> None:
    with pytest.raises(
        TypeError, match=f"only C-contiguous numbers and booleans are sent, got {array.dtype}"
    ):
        encode({"x": array})


NIL = b"\xc0"
TRUNCATED = "message is truncated"
DTYPES = "array dtype must be one of |b1 |u1 |i1 <u2 <i2 <u4 <i4 <u8 <i8 <f2 <f4 <f8"
SHAPES = "array shape must be a list of at most 8 whole numbers >= 0"
OBJECTS = "structured and object arrays are not allowed; send numbers or booleans"


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
        (b"\xa2\xff\xfe", "not valid msgpack"),
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
        (b"\x91" * 200_000 + NIL, "nested deeper than 32 levels"),
        (b"\xdb\xff\xff\xff\xff", "a string of 4294967295 bytes; at most 1048576 are allowed"),
    ],
)
def test_a_refused_message_has_a_reason(data: bytes, text: str) -> None:
    """A message that exceeds a limit is rejected with an error that names the limit."""
    assert refusal(data) == text


@pytest.mark.parametrize("code", [0xC1, 0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)])
def test_every_extension_type_is_refused(code: int) -> None:
    """Every extension type is rejected, whatever its declared length and received bytes."""
    assert (
        refusal(bytes([code]))
        == refusal(bytes([code]) + bytes(18))
        == "extension types are not allowed"
    )


ALL_FORMS = (
    # A list of 25 values: small and sized integers, floats, and every length encoding of text,
    # bytes, lists and maps.
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
    """Every encoding of every type of value is decoded as another msgpack library decodes it,
    except that map keys of type bytes become text.
    """
    *plain, last, empty = msgspec.msgpack.decode(ALL_FORMS)
    assert len(plain) == 23 and (last, empty) == ({b"i": [{"j": 1, "k": []}]}, {})
    assert decode(ALL_FORMS) == DecodedMessage([*plain, {"i": [{"j": 1, "k": []}]}, {}], None, 36)


def test_a_message_that_ends_early_or_late_is_refused() -> None:
    """A message truncated at any byte, or followed by extra bytes, is rejected. The tested message
    contains every encoding of every type of value.
    """
    for end in range(len(ALL_FORMS)):
        assert refusal(ALL_FORMS[:end]) == TRUNCATED
    assert refusal(ALL_FORMS + b"123") == "3 bytes follow the message"


def test_each_limit_is_inclusive() -> None:
    """Each limit is inclusive. The limits apply to the entries of a list and of a map, the nesting
    depth, the total number of values, and the length of text. The codec does not limit binary data.
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
        *((openpi(dtype=name), DTYPES) for name in ("O", "|O8", "<c8", "|V16", "<U4", "<M8[s]")),
        (openpi(dtype="[('a', '<f4')]"), DTYPES),
        (openpi(dtype=None), DTYPES),
        (openpi(dtype=b"\xff"), DTYPES),
        (openpi(dtype=["<f4"]), DTYPES),
        (openpi(shape=[1] * (MAX_NDIM + 1)), SHAPES),
        (openpi(shape=[4, -1]), SHAPES),
        (openpi(shape=[4.0]), SHAPES),
        (openpi(shape=[True, 4]), SHAPES),
        (openpi(shape=4), SHAPES),
        (openpi(shape=[-2, -2]), SHAPES),
        (openpi(data=[1, 2, 3, 4]), "array data must be binary"),
        (
            openpi(shape=[2**40, 2**40]),
            f"array data has 16 bytes; its shape and dtype need {2**82}",
        ),
        (openpi(data="1234567890123456"), "array data must be binary"),
        (openpi(shape=[2, 3]), "array data has 16 bytes; its shape and dtype need 24"),
        (openpi(data=DATA[:-1]), "array data has 15 bytes; its shape and dtype need 16"),
        (openpi(shape=[0]), "array data has 16 bytes; its shape and dtype need 0"),
        (openpi(shape=[0, 2**62, 2**62], data=b""), "array shape has an absurd dimension"),
        (openpi(shape=[0, 2**64 - 1], data=b""), "array shape has an absurd dimension"),
        (classic(kind=b"V"), OBJECTS),
        (classic(kind="O"), OBJECTS),
        (classic(type=[["a", "<f4"]]), DTYPES),
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
def test_a_refused_array_has_a_reason(marked: dict[Any, Any], text: str) -> None:
    """The error for a rejected array names the allowed values and is raised before memory is
    allocated for the array.
    """
    assert refusal(msgspec.msgpack.encode({"a": marked})) == text


@pytest.mark.parametrize(
    ("marked", "value", "dialect"),
    [
        ({"__npgeneric__": True, "dtype": "<i2", "data": b"\x05\x00"}, 5, MessageDialect.OPENPI),
        ({"nd": False, "type": "<f8", "data": struct.pack("<d", 2.5)}, 2.5, MessageDialect.CLASSIC),
        ({"nd": False, "type": ">i2", "data": b"\x00\x05"}, 5, MessageDialect.CLASSIC),
        ({"nd": 1, "type": ">i2", "data": b"\x00\x05"}, 5, MessageDialect.CLASSIC),
        ({"nd": False, "type": "|b1", "kind": "", "data": b"\x02"}, True, MessageDialect.CLASSIC),
        ({"nd": True}, {"nd": True}, None),
        ({"data": b"1", "kind": "x"}, {"data": b"1", "kind": "x"}, None),
    ],
)
def test_only_marked_maps_become_arrays_or_numbers(
    marked: dict[str, Any], value: Any, dialect: MessageDialect | None
) -> None:
    """A map with only some of a dialect's keys stays a map, and no dialect is reported for it."""
    decoded = decode(msgspec.msgpack.encode([marked]))
    assert decoded == DecodedMessage([value], dialect, 2 + 2 * len(marked))


@pytest.mark.parametrize("order", ["<", ">", "=", "", "|"])
@pytest.mark.parametrize("shape", [[], [0], [2], [2, 0, 3], [1] * MAX_NDIM])
def test_arrays_come_back_in_native_byte_order(order: str, shape: list[int]) -> None:
    """Arrays are decoded in native byte order, including empty arrays, zero-dimensional arrays, and
    arrays with the maximum number of dimensions.
    """
    sent = np.arange(np.prod(shape, dtype=int), dtype=f"{order}i4").reshape(shape)
    message = {"a": openpi(dtype=f"{order}i4", shape=shape, data=sent.tobytes())}
    found = decode(msgspec.msgpack.encode(message)).value["a"]
    assert found.dtype == np.dtype("i4") and found.dtype.isnative
    assert found.shape == tuple(shape) and (found == sent).all()


def test_a_large_array_in_native_order_is_not_copied() -> None:
    """A large array in native order is a read-only view of the message. Boolean arrays are copied,
    because each byte must become 0 or 1.
    """
    native = decode(msgspec.msgpack.encode(openpi())).value
    assert not native.flags.owndata and not native.flags.writeable
    booleans = decode(msgspec.msgpack.encode(openpi(dtype="|b1", shape=[16]))).value
    assert booleans.dtype == np.bool_ and booleans.view(np.uint8).max() == 1


@pytest.mark.parametrize(
    ("dialect", "keys"),
    [
        (
            MessageDialect.OPENPI,
            {b"__ndarray__": True, b"dtype": "<f4", b"shape": [2, 2], b"data": DATA},
        ),
        (
            MessageDialect.CLASSIC,
            {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2, 2], b"data": DATA},
        ),
    ],
)
def test_an_array_is_written_with_the_dialects_keys(
    dialect: MessageDialect, keys: dict[bytes, Any]
) -> None:
    """Arrays in lists, tuples and maps, and empty arrays, are encoded with only the keys of the
    dialect.
    """
    array = np.frombuffer(DATA, np.float32).reshape(2, 2)
    message = {"a": array, "b": [array], "c": ({"d": array},), "e": [[1, array]]}
    expected = {"a": keys, "b": [keys], "c": [{"d": keys}], "e": [[1, keys]]}
    assert msgspec.msgpack.decode(encode(message, dialect)) == expected
    empty = msgspec.msgpack.decode(encode({"a": array[:0]}, dialect))["a"]
    assert empty == {**keys, b"shape": [0, 2], b"data": b""}
