# SPDX-License-Identifier: Apache-2.0
"""Tests of a DreamX-World session driven as the runner drives it: chunks, snapshots, and isolation
between sessions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from dreamx_driver import (
    DRIVER,
    HEIGHT,
    WIDTH,
    latents_of,
    load_world,
    make_request,
    open_session,
    run_chunk,
)
from helpers.chunks import (
    run_request,
    run_staggered,
    run_vae_stage,
)
from helpers.unreachable_weights import offloaded_out_of_reach
from helpers.unused_params import IMAGE_AND_VIDEO_PARAMS
from helpers.world_driver import BAD_REQUESTS, random_image

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.layers.attention.rope import apply_rope, rope_tables
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.dreamx_world.config import DreamXOptions
from vllm_omni.model_executor.models.dreamx_world.pipeline import DreamXSession, DreamXWorld
from vllm_omni.model_executor.models.wan.images.files import cut_image
from vllm_omni.outputs import RequestFailed

HELD = [["w", "l"], ["w"], ["a", "i"]]


@pytest.fixture(scope="module")
def world(layouts: dict[str, Path]) -> DreamXWorld:
    return load_world(layouts["original"])


@pytest.fixture(scope="module")
def short(layouts: dict[str, Path]) -> DreamXWorld:
    """Return a model with a short window, which frames start to leave at the third chunk."""
    return load_world(layouts["original"], window_frames=6, sink_frames=2)


# -- results ---------------------------------------------------------------------------------------


def test_both_layouts_hold_the_same_model(world: DreamXWorld, layouts: dict[str, Path]) -> None:
    chunks = [{"actions": HELD}, {}]
    other = load_world(layouts["diffusers"])
    assert torch.equal(latents_of(other, chunks), latents_of(world, chunks))


def test_no_layer_runs_before_its_weights_are_fetched(
    world: DreamXWorld, layouts: dict[str, Path]
) -> None:
    offloaded = offloaded_out_of_reach(lambda: load_world(layouts["original"]))
    chunks = [{"actions": HELD}] * 2
    assert torch.equal(latents_of(offloaded, chunks), latents_of(world, chunks))


def test_a_session_streams_9_then_12_frames(world: DreamXWorld) -> None:
    session = open_session(world)
    for index in range(2):
        request = make_request(session, actions=HELD)
        meta, result = run_request(world, request)
        assert (request.num_steps, request.clean_passes) == (5, 1)
        first, count = (0, 9) if index == 0 else (9, 12)
        assert (meta["first_frame"], meta["num_frames"]) == (first, count)
        assert result["frames"].shape == (count, HEIGHT, WIDTH, 3)


def test_the_first_latent_frame_is_the_images(world: DreamXWorld) -> None:
    image = random_image(3)
    session = open_session(world, output="latents")
    latents = run_chunk(world, session, {"image": image}, output="latents")
    encoded, _ = world.vae.encode(cut_image(image, HEIGHT, WIDTH), None)
    assert torch.equal(latents[:, :1], encoded[0])
    assert not torch.equal(latents[:, 1:2], encoded[0])


@pytest.mark.parametrize("change", ["seed", "actions", "image", "prompt"])
def test_inputs_change_the_latents(world: DreamXWorld, change: str) -> None:
    params: dict[str, Any] = {"seed": 5} if change == "seed" else {}
    params |= {"prompt": "a lake"} if change == "prompt" else {}
    held = [] if change == "actions" else HELD
    tensors = {"image": random_image(1)} if change == "image" else {}

    def last_frame(tensors: dict[str, torch.Tensor], **params: Any) -> torch.Tensor:
        session = open_session(world, output="latents")
        return run_chunk(world, session, tensors, output="latents", **params)[:, -1]

    base = last_frame({}, actions=HELD)
    assert not torch.equal(last_frame(tensors, actions=held, **params), base)


@pytest.mark.parametrize(
    ("dtype", "options", "rounded"),
    [
        (torch.float32, {}, False),
        (torch.bfloat16, {}, True),
        (torch.float32, {"round_timesteps": True}, True),
        (torch.bfloat16, {"round_timesteps": False}, False),
    ],
)
def test_timesteps_are_rounded_as_released_in_bf16(
    layouts: dict[str, Path], dtype: torch.dtype, options: dict[str, Any], rounded: bool
) -> None:
    served = load_world(layouts["original"], dtype=dtype, **options)
    steps = (1000.0, 936.0, 832.0, 624.0) if rounded else (1000.0, 937.5, 833.3333, 625.0)
    assert served.schedule.timesteps == pytest.approx(steps, abs=1e-3)
    assert served.context_timestep == (0.10009765625 if rounded else 0.1)
    assert served.schedule.sigmas_noise[1] == pytest.approx(0.9375)


def test_fewer_steps_keep_the_noisiest() -> None:
    assert DreamXOptions(max_steps=2).schedule(rounded=True).timesteps == (1000.0, 832.0)


def test_the_colour_correction_of_a_chunk_may_be_switched_off(world: DreamXWorld) -> None:
    plain, corrected = open_session(world, "a"), open_session(world, "b")
    off = {"color_correction": 0.0}
    first = run_chunk(world, plain, options=off)
    assert not torch.equal(run_chunk(world, corrected), first)
    assert "decoder.color_target" not in plain.tensors()
    target = corrected.tensors()["decoder.color_target"].clone()
    run_chunk(world, corrected, options=off)
    assert torch.equal(corrected.tensors()["decoder.color_target"], target)
    run_chunk(world, corrected)
    assert not torch.equal(corrected.tensors()["decoder.color_target"], target)


def test_a_vae_stage_decodes_and_corrects_as_one_rank(
    world: DreamXWorld, layouts: dict[str, Path]
) -> None:
    layers = load_world(layouts["original"], ParallelContext(num_stages=1, vae_stage=True))
    vae = load_world(layouts["original"], ParallelContext(stage=1, num_stages=1, vae_stage=True))
    ours, theirs, alone = (open_session(each) for each in (layers, vae, world))
    for held in (HELD, HELD[::-1], []):
        requests = (make_request(session, actions=held) for session in (ours, theirs))
        _, result = run_vae_stage(layers, vae, *requests)
        assert torch.equal(result["frames"], run_chunk(world, alone, actions=held))


# -- sessions --------------------------------------------------------------------------------------


def test_sessions_at_different_steps_in_one_batch_equal_solo_runs(short: DreamXWorld) -> None:
    """Batched sessions generate the same latents, bit for bit, as when each session runs alone.
    Three sessions start at different times, so every batch mixes denoise steps, and chunks with and
    without an image.
    """
    pairs, mixed = run_staggered(
        short,
        lambda name: open_session(short, name, output="latents"),
        lambda session, seed: make_request(session, seed=seed, actions=HELD, output="latents"),
        chunks=4,
    )
    assert mixed > 3
    assert all(torch.equal(ours, alone) for ours, alone in pairs)


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_aborted_chunk_leaves_no_trace(short: DreamXWorld, chunks: int) -> None:
    """A chunk leaves no trace if it is aborted before, between or after its denoise steps, or after
    decoding. Each case uses a separate session.
    """
    DRIVER.assert_aborts_leave_no_trace(short, chunks, (0, 2, 5))


def test_a_fork_is_independent(short: DreamXWorld) -> None:
    DRIVER.assert_forks_are_independent(short, 3, HELD)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["plain K/V", "FP8 K/V"])
def test_a_session_holds_the_bytes_that_admission_counted(
    layouts: dict[str, Path], kv_dtype: torch.dtype | None
) -> None:
    world = load_world(layouts["original"], kv_dtype=kv_dtype)
    session = open_session(world)
    counted = world.session_nbytes(DiffusionParams(session_id="a"))
    run_chunk(world, session)
    own, cross, decoder = session.own, session.cross_kv, session.decoder_cache
    assert own is not None and cross is not None
    held = session.window.nbytes + cross.nbytes + decoder.nbytes
    held += sum(tensor.nbytes for tensor in own.tensors().values())
    assert session.nbytes == counted == held


def test_a_session_moves_to_the_host_and_back(short: DreamXWorld) -> None:
    DRIVER.assert_moves_to_the_host_and_back(short, chunks=3)


def test_a_far_chunk_depends_only_on_the_frames_that_it_sees(short: DreamXWorld) -> None:
    """A chunk has the same flow if it is moved a million latent frames ahead. Positions beyond the
    end of every table are valid, because only the differences between positions matter.
    """
    near = open_session(short, output="latents")
    for _ in range(4):
        run_chunk(short, near, output="latents")
    far = near.fork("far")
    continue_later(short, far, 333_333)
    torch.testing.assert_close(flow_of(short, far), flow_of(short, near), atol=2e-5, rtol=0)


def flow_of(world: DreamXWorld, session: DreamXSession) -> torch.Tensor:
    """Return the flow at the first step of the session's next chunk, computed from fixed
    latents.
    """
    request = make_request(session, output="latents", actions=HELD)
    world.prepare_encode(request)
    request.work.latents = torch.linspace(-1, 1, request.work.latents.numel()).view_as(
        request.work.latents
    )
    return world.denoise_step([request])[0]


def continue_later(world: DreamXWorld, session: DreamXSession, chunks: int) -> None:
    """Move a session ahead by `chunks` chunks without changing the visible frames, and rotate these
    frames' keys to their new positions.
    """
    window, frames = session.window, 3 * chunks
    grid, size = (HEIGHT // 32, WIDTH // 32), window.tokens_per_frame
    now, later = (
        rope_tables(world.config.head_dim, range(start, start + 1), *grid) for start in (0, frames)
    )
    held = {
        frame: window.buffer[:, :, window.slot(frame) * size :][:, :, :size].clone()
        for frame in window.visible_frames(window.committed_frames)
        if frame >= window.sink_frames
    }
    window.committed_frames += frames
    session.chunk_index += chunks
    for frame, stored in held.items():
        moved = window.buffer[:, :, window.slot(frame + frames) * size :][:, :, :size]
        moved.copy_(stored)
        for layer in range(len(stored)):
            unturned = apply_rope(stored[layer, 0], now[0], -now[1])
            moved[layer, 0] = apply_rope(unturned, *later)


@pytest.mark.parametrize("chunks", [40, pytest.param(2000, marks=pytest.mark.nightly)])
def test_a_long_session_holds_constant_bytes(layouts: dict[str, Path], chunks: int) -> None:
    """A long session has finite latents and a constant memory size, and a snapshot taken halfway
    continues with bit-identical latents.
    """
    world = load_world(layouts["original"], window_frames=6, max_steps=1)
    session = open_session(world, output="latents")
    run_chunk(world, session, output="latents", actions=[["w"]] * 3)
    nbytes, saved = session.nbytes, None
    for index in range(1, chunks):
        latents = run_chunk(world, session, output="latents", actions=[["w", "l"]] * 3)
        if index == chunks // 2:
            saved = session.fork("saved")
        if index == chunks // 2 + 3:
            assert saved is not None
            for _ in range(3):
                again = run_chunk(world, saved, output="latents", actions=[["w", "l"]] * 3)
            assert torch.equal(again, latents)
    assert session.nbytes == nbytes
    assert sum(tensor.nbytes for tensor in session.tensors().values()) < nbytes
    assert torch.isfinite(latents).all() and 0.1 < latents.std() < 10


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "tensors", "params", "code", "reason"),
    [
        *BAD_REQUESTS,
        (True, {"video": torch.zeros(1)}, {}, "invalid_request", "takes image, poses, intrinsics"),
        (True, {}, {"options": {"camera_scale": 1.0}}, "invalid_request", "color_correction"),
        (True, {}, {"options": {"color_correction": 2.0}}, "invalid_request", "color_correction"),
        (True, {}, {"height": 96}, "invalid_request", "height is fixed at 64"),
        (False, {}, {"prompt": ""}, "invalid_request", "prompt must not be empty"),
        (False, {}, {"actions": [["jump"]]}, "invalid_action", "buttons w, a, s, d, i, j, k, l"),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(
    world: DreamXWorld,
    first: bool,
    tensors: dict[str, Any],
    params: dict[str, Any],
    code: str,
    reason: str,
) -> None:
    DRIVER.assert_refused(world, first, tensors, params, code, reason)


def test_a_first_chunk_needs_an_image(world: DreamXWorld) -> None:
    DRIVER.assert_needs_an_image(world)


def test_more_sinks_than_the_first_chunk_are_refused(
    world: DreamXWorld, layouts: dict[str, Path]
) -> None:
    """The number of sinks must not exceed the number of frames in the first chunk. Larger numbers
    are refused, both in the server's options and in a session's parameters.
    """
    with pytest.raises(ValueError, match="at most the length of the first chunk, 3"):
        load_world(layouts["original"], sink_frames=4)
    with pytest.raises(RequestFailed, match="at most the length of the first chunk, 3"):
        open_session(world, window_frames=9, sink_frames=4)


@pytest.mark.parametrize("field", IMAGE_AND_VIDEO_PARAMS)
def test_a_parameter_without_effect_is_refused(world: DreamXWorld, field: str) -> None:
    """A request parameter that the model does not use is refused with an error that names the
    parameter.
    """
    params = {field: IMAGE_AND_VIDEO_PARAMS[field]}
    reason = f"does not use {field}"
    DRIVER.assert_refused(world, True, {}, params, "invalid_request", reason)
