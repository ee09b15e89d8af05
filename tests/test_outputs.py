# SPDX-License-Identifier: Apache-2.0
"""Tests of the result envelope: packing, unpacking, and errors for malformed envelopes."""

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.outputs import (
    _DTYPES,
    RequestFailed,
    empty_result,
    opaque,
    pack,
    pack_bytes,
    pack_error,
    unpack,
    unpack_arrays,
)

shapes = st.lists(st.integers(0, 5), max_size=4)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(_DTYPES)), shapes), max_size=5), st.text(max_size=300)
)
@settings(max_examples=60, deadline=None)
def test_everything_packed_comes_back(specs: list[tuple[str, list[int]]], text: str) -> None:
    """Unpacking an envelope returns what was packed. The test includes every dtype, empty and
    scalar shapes, and any text in the metadata.

    Payloads are aligned to 64 bytes.
    """
    tensors = {
        f"t{i}": torch.arange(torch.Size(shape).numel()).reshape(shape).to(_DTYPES[dtype])
        for i, (dtype, shape) in enumerate(specs)
    }
    as_bytes = bytearray(pack_bytes({"text": text}, tensors))
    for envelope in (pack({"text": text}, tensors), torch.frombuffer(as_bytes, dtype=torch.uint8)):
        meta, back = unpack(envelope)
        assert meta == {"text": text} and set(back) == set(tensors)
        assert len(envelope) == len(as_bytes)
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
            assert torch.equal(back[name], tensor)
            distance = back[name].data_ptr() - envelope.data_ptr()
            assert tensor.numel() == 0 or distance % 64 == 0


def test_unpacking_copies_nothing() -> None:
    """Unpacked tensors are views of the envelope, so changing the envelope changes them."""
    envelope = pack({}, {"x": torch.zeros(4, dtype=torch.uint8)})
    view = unpack(envelope)[1]["x"]
    envelope.fill_(7)
    assert view.tolist() == [7] * 4


@pytest.mark.parametrize("long_meta", [False, True])
def test_a_result_tensor_is_packed_without_a_copy(long_meta: bool) -> None:
    """A tensor from `empty_result` is packed without being copied, because `empty_result` reserves
    space for the header.

    If the header does not fit, the tensor is copied.
    """
    frames = empty_result((2, 3, 4, 3), torch.uint8)
    frames.copy_(torch.arange(72, dtype=torch.uint8).view(2, 3, 4, 3))
    meta = {"text": "x" * (5000 if long_meta else 10)}
    envelope = pack(meta, {"frames": frames})
    assert (envelope.data_ptr() == frames.untyped_storage().data_ptr()) is not long_meta
    back, tensors = unpack(envelope)
    assert back == meta
    assert torch.equal(tensors["frames"], torch.arange(72, dtype=torch.uint8).view(2, 3, 4, 3))


def test_strided_tensors_are_packed_in_logical_order() -> None:
    """A transposed view is packed in logical order, not in memory order."""
    x = torch.arange(6).reshape(2, 3).T
    assert torch.equal(unpack(pack({}, {"x": x}))[1]["x"], x)


def test_an_error_envelope_raises_what_was_packed() -> None:
    """Unpacking an error envelope raises an error with the packed code and message."""
    with pytest.raises(RequestFailed) as failure:
        unpack(pack_error("capacity", "full"))
    assert (failure.value.code, failure.value.message) == ("capacity", "full")
    assert str(failure.value) == "capacity: full"
    with pytest.raises(RequestFailed, match=r"^capacity: full$"):
        unpack(opaque(pack_error("capacity", "full")))


@pytest.mark.parametrize("write", [pack, pack_bytes])
def test_dtypes_without_a_name_are_refused_when_packing(write: Callable[..., object]) -> None:
    """A tensor cannot be packed if its dtype, for example a complex dtype, has no name in the
    format.
    """
    with pytest.raises(
        TypeError, match=r"tensor 'x' has dtype torch.complex64; allowed: uint8, int8, .*, float64$"
    ):
        write({}, {"x": torch.zeros(2, dtype=torch.complex64)})


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_envelopes_raise_only_documented_errors(data: st.DataObject) -> None:
    """For an envelope with changed or missing bytes, `unpack` either returns a result or raises
    ValueError or RequestFailed.

    `unpack` never raises any other exception.
    """
    original = bytes(
        pack(
            {"k": [1, "é"]}, {"a": torch.arange(5.0), "b": torch.ones(2, 2, dtype=torch.int8)}
        ).tolist()
    )
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(mutated) - 1))
        mutated[position] = data.draw(st.integers(0, 255))
    mutated = mutated[: data.draw(st.integers(1, len(mutated)))]
    try:
        _, tensors = unpack(torch.tensor(list(mutated), dtype=torch.uint8))
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    except (ValueError, RequestFailed):
        pass


@pytest.mark.parametrize(
    "entry",
    [
        ["x", "object", [1], 64],
        ["x", "uint8", [2**40], 128],
        ["x", "uint8", [-1], 128],
        ["x", "uint8", [1], -64],
        ["x", "uint8", [1], 65],
        ["x", "float32", [1] * 9, 128],
    ],
)
def test_lying_headers_are_refused_before_anything_is_read(entry: list[object]) -> None:
    """A header with an unknown dtype, an impossible shape or a payload outside the buffer is
    rejected before data is read.
    """
    with pytest.raises(ValueError, match="envelope"):
        unpack(envelope_of({"meta": {}, "tensors": [entry]}))


def envelope_of(
    header: Any, magic: bytes = b"VOMN", version: int = 1, header_bytes: int | None = None
) -> torch.Tensor:
    """Return an envelope of at least 256 bytes, as another program could have written it."""
    text = json.dumps(header).encode()
    raw = (
        struct.pack("<4sIQ", magic, version, len(text) if header_bytes is None else header_bytes)
        + text
    )
    return torch.tensor(list(raw.ljust(256, b"\0")), dtype=torch.uint8)


EMPTY: dict[str, Any] = {"meta": {}, "tensors": []}


def test_an_envelope_of_another_writer_is_read() -> None:
    """An envelope from another program can be read if it follows the layout described at the top of
    outputs.py.

    This envelope contains two entries that share a payload, an entry without bytes, and an entry
    with eight dimensions.
    """
    entries = [
        ["x", "int16", [2], 192],
        ["none", "uint8", [0, 3], 0],
        ["deep", "uint8", [1] * 8, 192],
    ]
    envelope = envelope_of({"meta": {"n": 1}, "tensors": entries})
    envelope[192:196] = torch.tensor([1, 0, 2, 1], dtype=torch.uint8)
    meta, tensors = unpack(envelope)
    assert meta == {"n": 1}
    assert tensors["x"].tolist() == [1, 258]
    assert (tensors["none"].shape, tensors["none"].dtype) == ((0, 3), torch.uint8)
    assert (tensors["deep"].shape, tensors["deep"].item()) == ((1,) * 8, 1)


@pytest.mark.parametrize(
    ("envelope", "says"),
    [
        (torch.zeros(64, dtype=torch.int8), "1-D uint8 tensor, got torch.int8"),
        (torch.zeros(8, 8, dtype=torch.uint8), r"1-D uint8 tensor, got torch.uint8 \(8, 8\)"),
        (torch.zeros(15, dtype=torch.uint8), "15 bytes is shorter than its 16-byte prefix"),
        (envelope_of(EMPTY, magic=b"VOMM"), "not a version 1 envelope"),
        (envelope_of(EMPTY, version=2), "not a version 1 envelope"),
        (
            envelope_of(EMPTY, header_bytes=241),
            "header length 241 exceeds the envelope of 256 bytes",
        ),
        (envelope_of({"meta": {"text": "x" * (1 << 20)}, "tensors": []}), "header length"),
        (envelope_of(EMPTY, header_bytes=3), "malformed envelope header: DecodeError"),
        (envelope_of({"tensors": []}), "header: Object missing required field `meta`"),
        (
            envelope_of({"meta": [], "tensors": []}),
            r"header: Expected `object`, got `array` - at `\$.meta`",
        ),
        (
            envelope_of({"meta": {}, "tensors": {}}),
            r"header: Expected `array`, got `object` - at `\$.tensors`",
        ),
        (
            envelope_of({"meta": {}, "tensors": [[]]}),
            r"of at least length 4, got 0 - at `\$.tensors\[0\]`",
        ),
        (
            envelope_of({"meta": {"error": "full"}, "tensors": []}),
            "^malformed envelope header: error is not a map$",
        ),
        (
            envelope_of({"meta": {}, "tensors": [["x", "uint8", [True], 128]]}),
            "Expected `int`, got `bool`",
        ),
        (envelope_of({"meta": {}, "tensors": [["x", "uint8", [-1], 128]]}), r"bad shape \[-1\]"),
        (
            envelope_of({"meta": {}, "tensors": [["x", "uint8", [1], 128.0]]}),
            "Expected `int`, got `float`",
        ),
        (
            envelope_of({"meta": {}, "tensors": [["x", "uint8", [129], 128]]}),
            r"payload \[128, 257\) is outside",
        ),
    ],
)
def test_a_malformed_envelope_is_refused_with_its_reason(envelope: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        unpack(envelope)


def test_a_header_or_payload_may_fill_the_envelope_to_its_end() -> None:
    """A header or payload can extend to the end of the envelope. In this test, the header is 240
    bytes long, not counting the prefix.
    """
    padding = 240 - len(json.dumps({"meta": {"t": ""}, "tensors": []}))
    full = envelope_of({"meta": {"t": "x" * padding}, "tensors": []})
    assert full.numel() == 256 and len(unpack(full)[0]["t"]) == padding
    assert (
        unpack(envelope_of({"meta": {}, "tensors": [["x", "uint8", [128], 128]]}))[1]["x"].numel()
        == 128
    )


def test_a_missing_code_or_message_of_an_error_is_reported_as_none() -> None:
    with pytest.raises(RequestFailed) as failure:
        unpack(envelope_of({"meta": {"error": {}}, "tensors": []}))
    assert (failure.value.code, failure.value.message) == ("None", "None")


def test_a_part_of_a_result_tensor_is_copied() -> None:
    """A slice of a tensor from `empty_result` is copied. Only the whole tensor is packed without
    being copied.
    """
    whole = empty_result((4, 6), torch.int16)
    whole.copy_(torch.arange(24).view(4, 6))
    for part in (whole[:2], whole[2:], whole.T, whole[:, :3]):
        envelope = pack({}, {"x": part})
        assert envelope.data_ptr() != whole.untyped_storage().data_ptr()
        assert torch.equal(unpack(envelope)[1]["x"], part)
    envelope = pack({"k": 1}, {"x": whole})
    assert envelope.data_ptr() == whole.untyped_storage().data_ptr()
    assert torch.equal(unpack(envelope)[1]["x"], torch.arange(24, dtype=torch.int16).view(4, 6))


@pytest.mark.parametrize(("spare", "in_place"), [(1, True), (0, True), (-1, False)])
def test_a_header_may_fill_the_room_before_a_result_tensor(spare: int, in_place: bool) -> None:
    """Together with the prefix, the header can fill the 4096 bytes reserved in front of a result
    tensor.
    """
    result = empty_result((3,), torch.float32)
    entries = [["x", "float32", [3], 4096]]
    used = 16 + len(json.dumps({"meta": {"t": ""}, "tensors": entries}))
    envelope = pack({"t": "x" * (4096 - used - spare)}, {"x": result.fill_(2.0)})
    assert (envelope.data_ptr() == result.untyped_storage().data_ptr()) is in_place
    assert unpack(envelope)[1]["x"].tolist() == [2.0] * 3


def test_what_is_between_header_and_payloads_is_zero() -> None:
    """Padding bytes are zero, so an envelope leaks no process memory, and equal results produce
    equal envelopes.
    """
    for make in (
        lambda: pack({"k": 1}, {"x": torch.ones(3), "y": torch.ones(2)}),
        lambda: in_place(),
    ):
        first, second = make(), make()
        header_bytes = int.from_bytes(bytes(first[8:16].tolist()), "little")
        assert not first[16 + header_bytes : 128].any()
        assert torch.equal(first[:128], second[:128])


def in_place() -> torch.Tensor:
    result = empty_result((3,), torch.float32)
    result.untyped_storage().fill_(255)
    return pack({"k": 1}, {"x": result.fill_(1.0)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused_when_packing(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        pack({"loss": value})


def test_arrays_are_views_too() -> None:
    """`unpack_arrays` returns NumPy views of the envelope. It rejects bfloat16 with an error that
    names the dtype.
    """
    frames = torch.arange(72, dtype=torch.uint8).view(2, 3, 4, 3)
    envelope = pack({"n": 1}, {"frames": frames, "pose": torch.eye(4), "none": torch.zeros(0, 3)})
    meta, arrays = unpack_arrays(envelope)
    assert meta == {"n": 1}
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "frames": ("uint8", (2, 3, 4, 3)),
        "pose": ("float32", (4, 4)),
        "none": ("float32", (0, 3)),
    }
    assert (arrays["frames"] == frames.numpy()).all()
    envelope.fill_(7)
    assert (arrays["frames"] == 7).all()
    with pytest.raises(
        ValueError, match="'x' is bfloat16, which NumPy does not have; use `unpack`"
    ):
        unpack_arrays(pack({}, {"x": torch.zeros(2, dtype=torch.bfloat16)}))
    with pytest.raises(RequestFailed, match="capacity: full"):
        unpack_arrays(pack_error("capacity", "full"))
