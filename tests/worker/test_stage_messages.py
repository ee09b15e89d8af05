# SPDX-License-Identifier: Apache-2.0
"""What stages hand to each other arrives whole, whatever divides over the ranks."""

import pytest
import torch

from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.stage_messages import ChunkNote, StageNote, together, unpack


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shapes", [[(2, 3, 4)], [(1, 5, 7), (6,), (2, 2, 3, 2)], [(3, 4)] * 12])
def test_nothing_divides_over_the_ranks(ranks: int, shapes: list[tuple[int, ...]]) -> None:
    """What divides, vLLM's worker would send in shards of different ranks; of more than eight, a CPU rank none."""
    tensors = [torch.randn(shape).transpose(0, -1) for shape in shapes]
    message = together("hidden", tensors, ranks)
    assert len(message) == 2 and all(part.is_contiguous() and part.dim() == 1 for part in message.values())
    assert ranks == 1 or all(part.numel() % ranks for part in message.values())
    assert all(torch.equal(a, b) for a, b in zip(unpack("hidden", message), tensors, strict=True))


def test_nothing_is_nothing() -> None:
    assert together("hidden", [], 2) == {} and unpack("hidden", {}) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_note_arrives_with_its_latents(ranks: int) -> None:
    chunks = [
        ChunkNote("a", 3, 2, 5, clean=False, done=False),
        ChunkNote("b", 0, 4, 5, clean=True, done=False, facts={"noise_scale": 0.5}),
        ChunkNote("c", 7, 5, 5, clean=False, done=True, timings_ms={"steps": [1.5, 2.5]}),
    ]
    latents = torch.randn(4, 2, 3, 5)
    message = StageNote(chunks, {"d": ("non_finite", "NaN")}).message([latents], ranks)
    assert ranks == 1 or all(part.numel() % ranks for part in message.values())
    note = StageNote.read(message)
    [(request_id, arrived)] = note.latents(message).items()
    assert note.chunks == chunks and request_id == "b" and torch.equal(arrived, latents)
    failure = note.failure("d")
    assert isinstance(failure, RequestFailed) and (failure.code, failure.message) == ("non_finite", "NaN")
    assert note.failure("a") is None
