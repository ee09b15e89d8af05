# SPDX-License-Identifier: Apache-2.0
"""Chunks that the scheduler degrades to the tiny decoder: warm-up, results, snapshots, aborts and
failures in the runner.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, run_to_end, step
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
    """Return the frames of a chunk and check that its metadata reports the degradation."""
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
    """All decodes from now on: the decoder, the number of latent frames, and whether it has no
    cache.
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
    """The warm-up runs every decode, so that no stream waits for a compilation, and its memory is
    measured.
    """
    wan, tiny = "StreamingWanVAE", "TinyVAEDecoder"
    make_worker()
    as_it_is = [(wan, 3, True), (wan, 3, False)]
    assert decodes == [*as_it_is, (tiny, 3, True), (wan, 2, True), (wan, 3, False)]


def test_a_degraded_chunk_is_decoded_by_the_tiny_decoder_only(
    make_worker: Callable[[], Worker], decodes: list[tuple[str, int, bool]]
) -> None:
    """The tiny decoder first processes the previous latents, at most one chunk at a time."""
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
    """The next chunk may be degraded or not."""
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


def test_an_abort_and_a_failure_of_a_degraded_chunk_leave_the_session_unchanged(
    make_worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither changes the decoder of the next chunk or its cache. Another session is unaffected."""
    worker = make_worker()
    expected = chunks(worker, "undisturbed", [False, True, False])
    chunks(worker, "a", [False])
    chunk(worker, "other", 0, False)
    before = worker.bits("a")

    execute(worker.runner, step(new=[request("a", 1, True)]))
    execute(worker.runner, step(running=["r"]))
    execute(worker.runner, step(finished=["r"]))
    assert worker.bits("a")[0] == before[0] and decoder_bits(worker, "a") == decoder_bits(before)

    model = worker.runner.model
    original = model.step_scheduler

    def spoiled(batch: Any, prediction: torch.Tensor) -> None:
        original(batch, prediction)
        for each in batch:
            if each.request_id == "bad":
                each.state.latents = each.state.latents * float("nan")

    monkeypatch.setattr(model, "step_scheduler", spoiled)
    results = run_to_end(
        worker.runner, request("a", 1, True, "bad"), request("other", 1, False, "fine")
    )
    assert isinstance(results["bad"], RequestFailed) and results["bad"].code == "non_finite"
    assert decoder_bits(worker, "a") == decoder_bits(before)
    monkeypatch.setattr(model, "step_scheduler", original)

    again = chunks_from(worker, "a", 1, [True, False])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, expected[1:], strict=True))
    plain = chunks(worker, "plain", [False, False])
    assert torch.equal(results["fine"][1]["frames"], plain[1])
    worker.runner.sessions.close_all()
    assert worker.runner.sessions.nbytes == 0


def chunks_from(
    worker: Worker, session_id: str, start: int, tiny: list[bool]
) -> list[torch.Tensor]:
    return [
        chunk(worker, session_id, start + offset, degraded) for offset, degraded in enumerate(tiny)
    ]


def decoder_bits(
    source: Worker | tuple[Any, dict[str, bytes]], session_id: str = ""
) -> dict[str, bytes]:
    """Return the decoder's cached tensors. An aborted chunk may have overwritten unused K/V."""
    tensors = (source if isinstance(source, tuple) else source.bits(session_id))[1]
    return {name: data for name, data in tensors.items() if name.startswith("decoder.")}
