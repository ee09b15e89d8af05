# SPDX-License-Identifier: Apache-2.0
"""The result envelope: what is packed comes back, what is malformed is refused with the documented exceptions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.outputs import _DTYPES, RequestFailed, empty_result, pack, pack_error, unpack

shapes = st.lists(st.integers(0, 5), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(sorted(_DTYPES)), shapes), max_size=5), st.text(max_size=300))
@settings(max_examples=60, deadline=None)
def test_everything_packed_comes_back(specs: list[tuple[str, list[int]]], text: str) -> None:
    """Every dtype, empty and scalar shapes, any text in the metadata; payloads are aligned to 64 bytes."""
    tensors = {
        f"t{i}": torch.arange(torch.Size(shape).numel()).reshape(shape).to(_DTYPES[dtype])
        for i, (dtype, shape) in enumerate(specs)
    }
    envelope = pack({"text": text}, tensors)
    meta, back = unpack(envelope)
    assert meta == {"text": text} and set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)
        assert tensor.numel() == 0 or (back[name].data_ptr() - envelope.data_ptr()) % 64 == 0


def test_unpacking_copies_nothing() -> None:
    """The tensors are views: writing to the envelope shows in them."""
    envelope = pack({}, {"x": torch.zeros(4, dtype=torch.uint8)})
    view = unpack(envelope)[1]["x"]
    envelope.fill_(7)
    assert view.tolist() == [7] * 4


@pytest.mark.parametrize("long_meta", [False, True])
def test_a_result_tensor_is_packed_without_a_copy(long_meta: bool) -> None:
    """`empty_result` leaves room for the header; if the header does not fit there, a copy is made instead."""
    frames = empty_result((2, 3, 4, 3), torch.uint8)
    frames.copy_(torch.arange(72, dtype=torch.uint8).view(2, 3, 4, 3))
    meta = {"text": "x" * (5000 if long_meta else 10)}
    envelope = pack(meta, {"frames": frames})
    assert (envelope.data_ptr() == frames.untyped_storage().data_ptr()) is not long_meta
    back, tensors = unpack(envelope)
    assert back == meta
    assert torch.equal(tensors["frames"], torch.arange(72, dtype=torch.uint8).view(2, 3, 4, 3))


def test_strided_tensors_are_packed_in_logical_order() -> None:
    """A transposed view arrives as what it shows, not as how it lies in memory."""
    x = torch.arange(6).reshape(2, 3).T
    assert torch.equal(unpack(pack({}, {"x": x}))[1]["x"], x)


def test_an_error_envelope_raises_what_was_packed() -> None:
    """Code and message survive."""
    with pytest.raises(RequestFailed) as failure:
        unpack(pack_error("capacity", "full"))
    assert (failure.value.code, failure.value.message) == ("capacity", "full")


def test_dtypes_without_a_name_are_refused_when_packing() -> None:
    """Complex numbers have no place on the wire."""
    with pytest.raises(TypeError, match="complex64"):
        pack({}, {"x": torch.zeros(2, dtype=torch.complex64)})


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_envelopes_raise_only_documented_errors(data: st.DataObject) -> None:
    """Flip, cut or splice bytes: unpack returns, or raises ValueError or RequestFailed, nothing else."""
    original = bytes(pack({"k": [1, "é"]}, {"a": torch.arange(5.0), "b": torch.ones(2, 2, dtype=torch.int8)}).tolist())
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
    """Unknown dtype, absurd shape, payload outside the buffer."""
    import json
    import struct

    header = json.dumps({"meta": {}, "tensors": [entry]}).encode()
    raw = struct.pack("<4sIQ", b"VOMN", 1, len(header)) + header
    raw = raw.ljust(256, b"\0")
    with pytest.raises(ValueError, match="envelope"):
        unpack(torch.tensor(list(raw), dtype=torch.uint8))
