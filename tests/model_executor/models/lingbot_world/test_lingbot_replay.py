# SPDX-License-Identifier: Apache-2.0
"""Recomputing the K/V window under a new prompt."""

from pathlib import Path

import pytest
import torch
from lingbot_world_driver import finish, load_world, make_request, open_session, run_chunk, step

from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.model_executor.models.lingbot_world.state import LingBotSession
from vllm_omni.testing.tiny.lingbot_world import make_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lingbot")
    make_tiny(out, 0, "original")
    return out


@pytest.fixture(scope="module")
def world(checkpoint: Path) -> LingBotWorld:
    return load_world(checkpoint, window_frames=10, sink_frames=2, reprime_on_prompt_switch=True)


def session_after(world: LingBotWorld, chunks: int, name: str = "a") -> LingBotSession:
    session = open_session(world, name)
    for _ in range(chunks):
        run_chunk(world, session, prompt="a beach")
    assert isinstance(session, LingBotSession)
    return session


def replayed(world: LingBotWorld, session: LingBotSession, prompt: str) -> DiffusionRequest:
    """A request at its first denoise step, its window just rebuilt."""
    request = make_request(world, session, prompt=prompt)
    world.prepare_encode(request)
    while request.step < len(request.state.replay):
        step(world, [request])
    return request


def test_replaying_under_the_same_prompt_gives_the_same_window(world: LingBotWorld) -> None:
    """Nothing evicted yet: the passes are run again on the same inputs, so K/V come out the same (1e-5, fp32)."""
    session = session_after(world, 3)
    session.prompt = "something else"  # so that "a beach" counts as a switch
    request = replayed(world, session, "a beach")
    assert len(request.state.replay) == 3
    valid = session.window.tokens_per_frame * 9
    torch.testing.assert_close(
        request.state.window.buffer[:, :, :valid], session.window.buffer[:, :, :valid], atol=1e-5, rtol=0
    )


def test_a_new_prompt_changes_the_window(world: LingBotWorld) -> None:
    session = session_after(world, 3)
    request = replayed(world, session, "a snow storm")
    frame = session.window.tokens_per_frame
    first_layer, deeper = request.state.window.buffer[0], request.state.window.buffer[1:]
    assert torch.equal(first_layer[:, :frame], session.window.buffer[0][:, :frame])  # below any cross-attention
    assert not torch.allclose(deeper[:, :, :frame], session.window.buffer[1:, :, :frame], atol=1e-4)


def test_after_eviction_only_the_chunks_still_visible_are_run_again(world: LingBotWorld) -> None:
    """Frames 0-2 (sinks), then those of which the next chunk [15, 18) sees a frame: 10-14, so chunks from 9 on."""
    session = session_after(world, 5)
    assert [chunk.frames for chunk in session.past] == [range(3), range(9, 12), range(12, 15)]
    request = replayed(world, session, "a snow storm")
    window = request.state.window
    live = session.window.tensors(3)
    assert list(live) == [f"kv.frame{frame}" for frame in (0, 1, 10, 11, 12, 13, 14)]
    size = window.tokens_per_frame
    for frame in (0, 1, 10, 11, 12, 13, 14):
        slot = window.slot(frame)
        assert window.buffer[:, :, slot * size : (slot + 1) * size].any()
    k, _ = window.visible(0, range(15, 18))
    assert len(k) == 10 * size


def test_a_replayed_chunk_never_sees_frames_that_are_not_there_yet(world: LingBotWorld) -> None:
    """Garbage in the slots that are still to be written changes nothing."""
    session = session_after(world, 5)
    clean, dirty = (make_request(world, session, prompt="a snow storm") for _ in range(2))
    for request in (clean, dirty):
        world.prepare_encode(request)
    dirty.state.window.buffer.fill_(7.0)
    for request in (clean, dirty):
        for _ in request.state.replay:
            step(world, [request])
    window = clean.state.window
    size = window.tokens_per_frame
    for frame in (0, 1, 10, 11, 12, 13, 14):
        part = slice(window.slot(frame) * size, (window.slot(frame) + 1) * size)
        assert torch.equal(window.buffer[:, :, part], dirty.state.window.buffer[:, :, part])


def test_the_session_goes_on_with_the_new_window(world: LingBotWorld) -> None:
    session = session_after(world, 5)
    kept = session.fork("b")
    request = replayed(world, session, "a snow storm")
    assert request.num_steps == 3 + 4 + 1
    while request.step < request.num_steps:
        step(world, [request])
    old = session.window
    finish(world, request)
    assert session.window is request.state.window is not old
    assert session.window.committed_frames == 18
    assert session.nbytes == kept.nbytes
    for _ in range(3):
        assert run_chunk(world, session)[1]["frames"].any()


def test_an_abandoned_switch_leaves_the_old_window(world: LingBotWorld) -> None:
    session = session_after(world, 5)
    before = {name: tensor.clone() for name, tensor in session.tensors().items()}
    replayed(world, session, "a snow storm")
    after = session.tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_remembered_chunks_stay_within_what_was_announced(world: LingBotWorld) -> None:
    session = open_session(world)
    assert isinstance(session, LingBotSession)
    for _ in range(8):
        run_chunk(world, session, prompt="a beach")
        held = sum(tensor.nbytes for chunk in session.past for tensor in chunk.tensors().values())
        assert session.decoder_cache is not None
        assert session.condition is not None
        assert session.cross_kv is not None
        others = session.decoder_cache.nbytes + session.condition.nbytes + session.cross_kv.nbytes
        assert held + others <= session.reserved_bytes


def test_replaying_and_denoising_requests_share_batches_of_their_shape(world: LingBotWorld) -> None:
    """A session replaying its past beside one that denoises: latents within 1e-4 of solo runs."""
    fresh = session_after(world, 1, "fresh")
    switching = session_after(world, 3, "switching")
    alone = {session.session_id: session.fork(session.session_id) for session in (fresh, switching)}
    prompts = {"fresh": "a beach", "switching": "a snow storm"}
    expected = {}
    for name, session in alone.items():
        request = make_request(world, session, prompt=prompts[name])
        world.prepare_encode(request)
        while request.step < request.num_steps:
            step(world, [request])
        expected[name] = world.latents(request)
    requests = [make_request(world, session, prompt=prompts[session.session_id]) for session in (fresh, switching)]
    for request in requests:
        world.prepare_encode(request)
    while live := [request for request in requests if request.step < request.num_steps]:
        assert len({world.batch_key(request) for request in live}) == 1
        step(world, live)
    for request in requests:
        torch.testing.assert_close(world.latents(request), expected[request.session.session_id], atol=1e-4, rtol=0)


def test_without_the_option_nothing_is_remembered(checkpoint: Path) -> None:
    world = load_world(checkpoint, window_frames=10, sink_frames=2)
    session = session_after(world, 2)
    assert session.past == ()
    request = make_request(world, session, prompt="a snow storm")
    world.prepare_encode(request)
    assert request.num_steps == 5
