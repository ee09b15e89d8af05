# SPDX-License-Identifier: Apache-2.0
"""Chunks that the scheduler degrades to the tiny decoder: warm-up, results and snapshots in the
runner.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import new_request, run_to_end
from helpers.snapshot_steps import Worker

from vllm_omni.core.step_protocol import SchedulerNote
from vllm_omni.model_executor.models.wan.vae.tiny_vae import TinyVAEDecoder
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE
from vllm_omni.outputs import RequestFailed

OMNI: dict[str, Any] = {
    "scheduling": "deadline",
    "degradations": ["tiny_vae"],
    "model": {"window_frames": 7, "sink_frames": 2},
}
FRAMES = [9, 12, 12, 12, 12]


@pytest.fixture
def make_worker(make_runner: Any, causal_wan: Path) -> Callable[[], Worker]:
    return lambda: Worker(make_runner(causal_wan, OMNI))


def request(session_id: str, index: int, tiny: bool, name: str = "r") -> Any:
    first = {"prompt": "a beach", "seed": 4} if index == 0 else {}
    data = new_request(name, session_id=session_id, chunk_index=index, **first)
    assert data.pooling_params is not None
    data.pooling_params = SchedulerNote(degradations=["tiny_vae"] * tiny).attach_to_params(
        data.pooling_params
    )
    return data


def chunk(worker: Worker, session_id: str, index: int, tiny: bool) -> torch.Tensor:
    """Return a chunk's frames and check that the chunk's metadata reports the degradation."""
    result = run_to_end(worker.runner, request(session_id, index, tiny))["r"]
    assert not isinstance(result, RequestFailed), result
    meta, tensors = result
    assert meta.get("degradations", []) == ["tiny_vae"] * tiny
    assert tensors["frames"].shape[0] == meta["num_frames"] == FRAMES[index]
    return tensors["frames"].clone()


def chunks(worker: Worker, session_id: str, tiny: list[bool]) -> list[torch.Tensor]:
    return [chunk(worker, session_id, index, degraded) for index, degraded in enumerate(tiny)]


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """A list that records every later decode as (decoder, number of latent frames, whether the
    decode starts without a cache).
    """
    calls: list[tuple[str, int, bool]] = []
    for kind in (StreamingWanVAE, TinyVAEDecoder):

        def noted(self: Any, latents: torch.Tensor, cache: Any, original: Any = kind.decode) -> Any:
            calls.append((type(self).__name__, latents.shape[2], cache is None))
            return original(self, latents, cache)

        monkeypatch.setattr(kind, "decode", noted)
    return calls


def test_the_warm_up_runs_both_decoders(
    make_worker: Callable[[], Worker], decodes: list[tuple[str, int, bool]]
) -> None:
    """The warm-up runs both decoders, so no stream has to wait for a compilation and the memory use
    of both is measured.
    """
    wan, tiny = "StreamingWanVAE", "TinyVAEDecoder"
    make_worker()
    as_it_is = [(wan, 3, True), (wan, 3, False)]
    assert decodes == [*as_it_is, (tiny, 3, True), (wan, 2, True), (wan, 3, False)]


def test_a_degraded_chunk_is_decoded_by_the_tiny_decoder_only(
    make_worker: Callable[[], Worker], decodes: list[tuple[str, int, bool]]
) -> None:
    """A degraded chunk is decoded only by the tiny decoder.

    The tiny decoder first processes the preceding latents, at most one chunk at a time.
    """
    worker = make_worker()
    decodes.clear()
    chunks(worker, "a", [False, False, True, True, False])
    wan, tiny = "StreamingWanVAE", "TinyVAEDecoder"
    assert decodes == [
        (wan, 3, True),
        (wan, 3, False),
        (tiny, 3, True),
        (tiny, 3, False),
        (tiny, 3, False),
        (tiny, 3, False),
        (wan, 2, True),
        (wan, 3, False),
    ]


def test_a_snapshot_of_a_degraded_session_continues_bit_for_bit(
    make_worker: Callable[[], Worker], tmp_path: Path
) -> None:
    """A degraded session continues from its snapshot bit for bit, whether or not its next chunk is
    degraded.
    """
    here, there = make_worker(), make_worker()
    chunks(here, "a", [False, False, True])
    here.save("a", tmp_path / "a")
    here.restore("a2", tmp_path / "a")
    for ours, theirs, then in (("a", "b", True), ("a2", "b2", False)):
        there.restore(theirs, tmp_path / "a")
        assert (
            there.bits(theirs) == here.bits(ours) and "decoder.tiny.conv00" in there.bits(theirs)[1]
        )
        for index, tiny in ((3, then), (4, not then)):
            assert torch.equal(chunk(here, ours, index, tiny), chunk(there, theirs, index, tiny))
    assert there.runner.sessions.nbytes == here.runner.sessions.nbytes
