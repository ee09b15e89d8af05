# SPDX-License-Identifier: Apache-2.0
"""The codec: every dialect in, both out, nothing but `CodecError` for bytes nobody should have
sent.
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
    MAX_NODES,
    MAX_STR_BYTES,
    CodecError,
    Dialect,
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
# "nd" and the like are the dialects' own keys
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


@given(MESSAGES, st.sampled_from(Dialect))
@settings(max_examples=300, deadline=None)
def test_what_is_encoded_comes_back(message: dict[str, Any], dialect: Dialect) -> None:
    """Values and arrays of every accepted dtype survive in both dialects, bit by bit."""
    assert same(decode(encode(message, dialect)).value, message)


@given(MESSAGES)
@settings(max_examples=100, deadline=None)
def test_messages_without_arrays_are_plain_msgpack(message: dict[str, Any]) -> None:
    """Another msgpack library reads what this one writes."""
    plain = {key: value for key, value in message.items() if not _holds_array(value)}
    assert same(msgspec.msgpack.decode(encode(plain)), plain)


def _holds_array(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_array, value.values()))
    return (
        any(map(_holds_array, value)) if isinstance(value, list) else isinstance(value, np.ndarray)
    )


def openpi(**changes: Any) -> dict[Any, Any]:
    fields = {
        "__ndarray__": True,
        "data": struct.pack("<4f", 1, 2, 3, 4),
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
        "data": struct.pack("<4f", 1, 2, 3, 4),
        **changes,
    }
    return {key.encode(): value for key, value in fields.items()}


@pytest.mark.parametrize(
    ("marked", "dialect"),
    [
        (openpi(), Dialect.OPENPI),
        ({key.decode(): value for key, value in openpi().items()}, Dialect.OPENPI),
        (openpi(dtype=">f4", data=struct.pack(">4f", 1, 2, 3, 4)), Dialect.OPENPI),
        (openpi(dtype="float32"), Dialect.OPENPI),
        (openpi(dtype=b"<f4"), Dialect.OPENPI),
        (classic(), Dialect.CLASSIC),
        ({key.decode(): value for key, value in classic().items()}, Dialect.CLASSIC),
        (classic(kind=None), Dialect.CLASSIC),
    ],
)
def test_every_spelling_of_an_array_is_read(marked: dict[Any, Any], dialect: Dialect) -> None:
    """Keys as bytes or text, either byte order; the dialect is reported.

    The result is in native order.
    """
    decoded = decode(pack({"a": [marked]}))
    array = decoded.value["a"][0]
    assert decoded.dialect is dialect
    assert (array.dtype, array.tolist()) == (np.dtype("f4"), [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    "scalar",
    [
        {b"__npgeneric__": True, b"data": struct.pack("<d", 2.5), b"dtype": "<f8"},
        {b"nd": False, b"type": "<f8", b"data": struct.pack("<d", 2.5)},
    ],
)
def test_numpy_scalars_become_numbers(scalar: dict[Any, Any]) -> None:
    """`np.float64(2.5)` arrives as 2.5."""
    assert decode(pack({"x": scalar})).value == {"x": 2.5}


@pytest.mark.parametrize(
    "marked",
    [
        openpi(dtype="O"),
        openpi(dtype="|O8"),
        openpi(dtype="<c8"),
        openpi(dtype="|V16"),
        openpi(dtype="<U4"),
        openpi(dtype="<M8[s]"),
        openpi(dtype="[('a', '<f4')]"),
        openpi(dtype=None),
        openpi(dtype=["<f4"]),
        openpi(shape=[2, 3]),
        openpi(shape=[4, -1]),
        openpi(shape=[-2, -2]),
        openpi(shape=[2.0, 2]),
        openpi(shape=[True, 4]),
        openpi(shape=4),
        openpi(shape=[1] * 9),
        openpi(shape=[2**40, 2**40]),
        openpi(shape=[0, 2**62, 2**62], data=b""),
        openpi(shape=[0, 2**64 - 1], data=b""),
        openpi(data=b"123"),
        openpi(data="1234567890123456"),
        openpi(data=[1, 2, 3, 4]),
        classic(kind=b"V"),
        classic(kind=b"O"),
        classic(type=[["a", "<f4"]]),
        {b"nd": True, b"complex": True, b"data": "1+1j"},
        {b"__npgeneric__": True, b"data": b"12", b"dtype": "<f8"},
    ],
)
def test_hostile_arrays_are_refused(marked: dict[Any, Any]) -> None:
    """Objects, text, structures, lies about sizes: an error before anything is allocated."""
    with pytest.raises(CodecError):
        decode(pack({"a": marked}))


def test_booleans_are_safe_whatever_their_bytes() -> None:
    """A byte that is neither 0 nor 1 is true, and nothing else."""
    array = decode(pack({"a": openpi(dtype="|b1", data=b"\x00\x01\x02\xff")})).value["a"]
    assert array.tolist() == [[False, True], [True, True]]


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xc0\xc0",
        b"\x81\x01\x02",
        b"\x81\x90\x01",
        b"\x81\xa1a",
        b"\xa5abc",
        b"\xa2\xff\xfe",
        b"\x81\xc4\x01\xff\x01",
        b"\xd4\x01\x00",
        b"\xc7\x01\x05\x00",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xdc\xff",
        nested(MAX_DEPTH + 1),
        nested(200_000),
        b"\xdd" + struct.pack(">I", MAX_ENTRIES + 1) + b"\xc0" * (MAX_ENTRIES + 1),
        b"\x9f" + (b"\xdc\xff\xff" + b"\xc0" * 65_535) * 15,
        pack("x" * (MAX_STR_BYTES + 1)),
    ],
)
def test_malformed_and_oversized_messages_are_refused(data: bytes) -> None:
    """Truncated, trailing bytes, odd keys, extension types, bad UTF-8, too deep, too many, too
    long.
    """
    started_s = time.perf_counter()
    with pytest.raises(CodecError):
        decode(data)
    assert time.perf_counter() - started_s < seconds(0.5)


def test_the_limits_themselves_are_allowed() -> None:
    """One below each limit is fine."""
    decode(nested(MAX_DEPTH))
    decode(b"\xdd" + struct.pack(">I", MAX_ENTRIES) + b"\xc0" * MAX_ENTRIES)
    decode(pack("x" * MAX_STR_BYTES))
    assert MAX_NODES > MAX_ENTRIES


def test_the_last_of_duplicate_keys_counts() -> None:
    """As in every map of every library."""
    assert decode(b"\x82\xa1a\x01\xa1a\x02").value == {"a": 2}


def test_large_arrays_are_copied_once() -> None:
    """A raw chunk takes milliseconds, not tens of them: 14.4 MB in well under 50 ms here."""
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
    for dialect in Dialect
]


def mutated(data: bytes, random_: random.Random) -> bytes:
    """Bit flips, splices, cuts, repeated parts, and lying lengths."""
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


@pytest.mark.parametrize("num_cases", [20_000, pytest.param(10_000_000, marks=pytest.mark.nightly)])
def test_mutated_messages_raise_nothing_but_codec_errors(num_cases: int) -> None:
    """Whatever arrives is a message or a `CodecError`, within 50 ms of this thread's own time."""
    random_ = random.Random(num_cases)
    refused = 0
    for _ in range(num_cases):
        data = mutated(random_.choice(SEEDS), random_)
        started_s = time.thread_time()
        try:
            decode(data)
        except CodecError:
            refused += 1
        assert time.thread_time() - started_s < 0.05, data
    assert 0.2 < refused / num_cases < 0.99  # both ways are exercised


@given(st.binary(max_size=200))
@settings(max_examples=1000, deadline=None)
def test_any_bytes_raise_nothing_but_codec_errors(data: bytes) -> None:
    """No structure assumed at all. What is a message comes back the same when it is sent again."""
    with contextlib.suppress(CodecError):
        message = decode(data)
        again = encode(message.value, message.dialect)
        assert encode(decode(again).value, message.dialect) == again


@pytest.mark.parametrize(
    ("dialect", "mark"), [(Dialect.CLASSIC, b"nd"), (Dialect.OPENPI, b"__ndarray__")]
)
def test_arrays_are_written_in_the_dialect_requested_for(dialect: Dialect, mark: bytes) -> None:
    """A client that knows one dialect must not be answered in the other."""
    data = encode({"x": np.zeros(3, np.float32)}, dialect)
    assert msgspec.msgpack.decode(data)["x"][mark] is True
    assert decode(data).dialect is dialect


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
