# SPDX-License-Identifier: Apache-2.0
"""Chunks that the scheduler sends to the tiny decoder, in the runner: warm-up, results,
snapshots, aborts, failures.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, run_to_end, step
from helpers.snapshot_steps import Worker, world_chunk

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
    """Frames of a chunk, of which the meta says whether it was degraded."""
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
    """Every decode from now on: whose, of how many latents, whether it began."""
    calls: list[tuple[str, int, bool]] = []
    for kind in (StreamingWanVAE, TinyVAEDecoder):

        def noted(self: Any, latents: torch.Tensor, cache: Any, original: Any = kind.decode) -> Any:
            calls.append((type(self).__name__, latents.shape[2], cache is None))
            return original(self, latents, cache)

        monkeypatch.setattr(kind, "decode", noted)
    return calls


def test_both_decoders_and_the_way_back_have_run_when_a_server_is_ready(
    make_worker: Callable[[], Worker], decodes: list[tuple[str, int, bool]]
) -> None:
    """So no stream pays for a first time (compilation, kernels), and memory for them is reckoned
    with.
    """
    wan, tiny = "StreamingWanVAE", "TinyVAEDecoder"
    make_worker()
    as_it_is = [(wan, 3, True), (wan, 3, False)]
    assert decodes == [*as_it_is, (tiny, 3, True), (wan, 2, True), (wan, 3, False)]


def test_a_degraded_chunk_is_not_decoded_by_wans_decoder(
    make_worker: Callable[[], Worker], decodes: list[tuple[str, int, bool]]
) -> None:
    """That is what it saves.

    The tiny one first takes in what was before, in pieces no larger than a chunk.
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


def test_a_snapshot_taken_while_degraded_continues_bit_for_bit(
    make_worker: Callable[[], Worker], tmp_path: Path
) -> None:
    """Still degraded, or on its way back."""
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


def test_a_world_with_the_tiny_decoder_continues_from_a_snapshot(
    make_runner: Any, lingbot_world: Path, tmp_path: Path
) -> None:
    """LingBot World with `omni.model.decoder` `tiny`: on another server, bit for bit."""
    omni = {"model": {"window_frames": 7, "sink_frames": 2, "decoder": "tiny"}}
    here, there = (Worker(make_runner(lingbot_world, omni)) for _ in range(2))
    for index in range(2):
        world_chunk(here, "a", index)
    here.save("a", tmp_path / "a")
    there.restore("b", tmp_path / "a")
    assert there.bits("b") == here.bits("a")
    for index in (2, 3):
        assert torch.equal(
            world_chunk(here, "a", index)["frames"], world_chunk(there, "b", index)["frames"]
        )


def test_a_snapshot_whose_latents_do_not_fit_is_refused(
    make_worker: Callable[[], Worker], tmp_path: Path
) -> None:
    """More than are ever kept, as no server writes them; nothing is left of the session."""
    here, there = make_worker(), make_worker()
    chunks(here, "a", [True])
    session = here.runner.sessions.get("a")
    object.__setattr__(session.decoder_cache, "newest", torch.zeros(1, 16, 9, 4, 6))
    here.save("a", tmp_path / "a")
    with pytest.raises(RequestFailed, match="newest") as failure:
        there.restore("b", tmp_path / "a")
    assert failure.value.code == "invalid_snapshot" and len(there.runner.sessions) == 0


def test_an_abort_and_a_failure_in_a_degraded_chunk_leave_the_stream_as_it_was(
    make_worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither changes which decoder comes next or what it begins with; another stream beside
    them notices nothing.
    """
    worker = make_worker()
    expected = chunks(worker, "undisturbed", [False, True, False])
    chunks(worker, "a", [False])
    chunk(worker, "beside", 0, False)
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
        worker.runner, request("a", 1, True, "bad"), request("beside", 1, False, "fine")
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
    """What is kept of the decode (an aborted chunk may have overwritten K/V that nobody has seen
    yet).
    """
    tensors = (source if isinstance(source, tuple) else source.bits(session_id))[1]
    return {name: data for name, data in tensors.items() if name.startswith("decoder.")}
