# SPDX-License-Identifier: Apache-2.0
"""What stages hand to each other arrives whole, whatever divides over the ranks."""

import pytest
import torch

from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.link import ChunkNote, StageNote, padding, together, unpack


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shapes", [[(2, 3, 4)], [(1, 5, 7), (6,), (2, 2, 3, 2)], [(3, 4)] * 12])
def test_nothing_divides_over_the_ranks(ranks: int, shapes: list[tuple[int, ...]]) -> None:
    """What divides, vLLM's worker would send in shards of different ranks; of more than eight, a
    CPU rank none.
    """
    tensors = [torch.randn(shape).transpose(0, -1) for shape in shapes]
    message = together("hidden", tensors, ranks)
    assert len(message) == 2 and all(
        part.is_contiguous() and part.dim() == 1 for part in message.values()
    )
    assert ranks == 1 or all(part.numel() % ranks for part in message.values())
    assert all(torch.equal(a, b) for a, b in zip(unpack("hidden", message), tensors, strict=True))


def test_nothing_is_nothing() -> None:
    assert together("hidden", [], 2) == {} and unpack("hidden", {}) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_note_arrives_with_its_latents(ranks: int) -> None:
    chunks = [
        ChunkNote("a", 3, 2, 5, clean=False, done=False),
        ChunkNote("b", 0, 4, 5, clean=True, done=False, info={"noise_scale": 0.5}),
        ChunkNote("c", 7, 5, 5, clean=False, done=True, timings_ms={"steps": [1.5, 2.5]}),
    ]
    latents = torch.randn(4, 2, 3, 5)
    message = StageNote(chunks, {"d": ("non_finite", "NaN")}).message([latents], ranks)
    assert ranks == 1 or all(part.numel() % ranks for part in message.values())
    note = StageNote.read_tensors(message)
    [(request_id, arrived)] = note.latents(message).items()
    assert note.chunks == chunks and request_id == "b" and torch.equal(arrived, latents)
    failure = note.failure("d")
    assert isinstance(failure, RequestFailed) and (failure.code, failure.message) == (
        "non_finite",
        "NaN",
    )
    assert note.failure("a") is None


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shapes", [[(2, 3), (4,)], [(), (5,)], [(0, 3), (2, 1)], [(), ()]])
def test_two_tensors_of_any_shape_arrive(ranks: int, shapes: list[tuple[int, ...]]) -> None:
    """Also one without dimensions or without elements."""
    tensors = [torch.randn(shape) for shape in shapes]
    arrived = unpack("hidden", together("hidden", tensors, ranks))
    assert [tensor.shape for tensor in arrived] == [tensor.shape for tensor in tensors]
    assert all(torch.equal(a, b) for a, b in zip(arrived, tensors, strict=True))


@pytest.mark.parametrize(
    ("ranks", "length", "sent"), [(1, 8, 8), (2, 7, 7), (2, 8, 9), (3, 8, 8), (3, 9, 10)]
)
def test_nothing_is_added_or_copied_without_need(ranks: int, length: int, sent: int) -> None:
    """A single tensor goes as it lies in memory, unless its length would be cut into shards."""
    tensor = torch.randn(length)
    message = together("hidden", [tensor], ranks)
    assert message["hidden"].numel() == sent
    assert (message["hidden"].data_ptr() == tensor.data_ptr()) == (sent == length)
    assert padding(length, 1) == 0 and (
        ranks > 1 or message["hidden.shapes"].tolist() == [1, length]
    )
