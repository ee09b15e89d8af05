# SPDX-License-Identifier: Apache-2.0
"""Messages between pipeline stages arrive complete, whatever the number of ranks."""

import pytest
import torch

from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.link import ChunkNote, StageNote, padding, together, unpack


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "shapes",
    [[(2, 3, 4)], [(1, 5, 7), (6,), (2, 2, 3, 2)], [(3, 4)] * 12, [(), (5,)], [(0, 3), (2, 1)]],
)
def test_tensors_are_sent_unsplit(ranks: int, shapes: list[tuple[int, ...]]) -> None:
    """Tensors are sent whole, including 0-d and empty tensors.

    vLLM's worker would split a tensor into shards from different ranks if the tensor's length were
    divisible by the number of ranks.
    """
    tensors = [torch.randn(shape).transpose(0, -1) for shape in shapes]
    message = together("hidden", tensors, ranks)
    assert len(message) == 2 and all(
        part.is_contiguous() and part.dim() == 1 for part in message.values()
    )
    assert ranks == 1 or all(part.numel() % ranks for part in message.values())
    assert all(torch.equal(a, b) for a, b in zip(unpack("hidden", message), tensors, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_stage_note_arrives_with_its_latents(ranks: int) -> None:
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


@pytest.mark.parametrize(
    ("ranks", "length", "sent"), [(1, 8, 8), (2, 7, 7), (2, 8, 9), (3, 8, 8), (3, 9, 10)]
)
def test_a_single_tensor_is_sent_without_a_copy(ranks: int, length: int, sent: int) -> None:
    """A single tensor is sent without a copy unless vLLM would split a tensor of its length."""
    tensor = torch.randn(length)
    message = together("hidden", [tensor], ranks)
    assert message["hidden"].numel() == sent
    assert (message["hidden"].data_ptr() == tensor.data_ptr()) == (sent == length)
    assert padding(length, 1) == 0 and (
        ranks > 1 or message["hidden.shapes"].tolist() == [1, length]
    )
