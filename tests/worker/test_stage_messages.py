# SPDX-License-Identifier: Apache-2.0
"""What stages hand to each other arrives whole, whatever divides over the ranks."""

import pytest
import torch

from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.stage_messages import ChunkNote, StageNote, unpack_whole, whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5, 7), (6,), (2, 2, 3, 2)])
def test_no_tensor_divides_over_the_ranks(ranks: int, shape: tuple[int, ...]) -> None:
    """What divides, vLLM's worker would send in shards of different ranks."""
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).float().transpose(0, -1)
    message = whole("hidden", tensor, ranks)
    assert all(part.is_contiguous() and (ranks == 1 or part.numel() % ranks) for part in message.values())
    assert torch.equal(unpack_whole("hidden", message), tensor)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_note_arrives_with_its_latents(ranks: int) -> None:
    chunks = [
        ChunkNote("a", 3, 2, 5, clean=False, done=False),
        ChunkNote("b", 0, 4, 5, clean=True, done=False, facts={"noise_scale": 0.5}),
        ChunkNote("c", 7, 5, 5, clean=False, done=True, timings_ms={"steps": [1.5, 2.5]}),
    ]
    latents = torch.randn(4, 2, 3, 5)
    message = StageNote(chunks, {"d": ("non_finite", "NaN")}).message({1: latents}, ranks)
    assert ranks == 1 or all(part.numel() % ranks for part in message.values())
    note = StageNote.read(message)
    assert note.chunks == chunks and torch.equal(unpack_whole("latents.1", message), latents)
    failure = note.failure("d")
    assert isinstance(failure, RequestFailed) and (failure.code, failure.message) == ("non_finite", "NaN")
    assert note.failure("a") is None
