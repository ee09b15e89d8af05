# SPDX-License-Identifier: Apache-2.0
"""Tests of a LingBot World model driven as the runner drives it: sessions, chunks, and isolation
between sessions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import (
    assert_same,
    run_request,
    run_stages,
    run_staggered,
    session_bits,
    step,
)
from helpers.unreachable_weights import offloaded_out_of_reach
from helpers.unused_params import IMAGE_AND_VIDEO_PARAMS
from lingbot_world_driver import (
    HEIGHT,
    WIDTH,
    load_world,
    make_request,
    open_session,
    run_chunk,
    start_image,
)

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import (
    DiffusionRequest,
)
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.lingbot_world.camera import CameraTail, integrate_actions
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.model_executor.models.lingbot_world.state import LingBotSession, WorldCoordinates
from vllm_omni.outputs import RequestFailed

PIXELS_TOLERANCE = 1
"""Tolerance in uint8 levels. A different order of summation moves a value across at most one
rounding boundary.
"""


@pytest.fixture(scope="module", params=[None, torch.float8_e4m3fn], ids=["plain K/V", "FP8 K/V"])
def any_world(request: pytest.FixtureRequest, lingbot_world: Path) -> LingBotWorld:
    """Return a model with a window of 7 frames and 2 sinks. The window is full after three
    chunks.
    """
    return load_world(lingbot_world, window_frames=7, sink_frames=2, kv_dtype=request.param)


@pytest.fixture(scope="module")
def world(lingbot_world: Path) -> LingBotWorld:
    """Return a model with unquantized keys and values."""
    return load_world(lingbot_world, window_frames=7, sink_frames=2)


def frames_of(result: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> torch.Tensor:
    return result[1]["frames"]


def run_chunks(world: LingBotWorld, count: int, **params: Any) -> list[torch.Tensor]:
    session = open_session(world)
    return [frames_of(run_chunk(world, session, prompt="a beach", **params)) for _ in range(count)]


# -- results ---------------------------------------------------------------------------------------


def test_no_layer_runs_before_its_weights_are_fetched(lingbot_world: Path) -> None:
    offloaded = offloaded_out_of_reach(lambda: load_world(lingbot_world))
    pairs = zip(run_chunks(offloaded, 2), run_chunks(load_world(lingbot_world), 2), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_a_session_streams_9_then_12_frames(world: LingBotWorld) -> None:
    session = open_session(world)
    metas = []
    for _ in range(5):
        meta, tensors = run_chunk(world, session, prompt="a beach")
        metas.append((meta["first_frame"], meta["num_frames"]))
        assert tensors["frames"].shape == (meta["num_frames"], HEIGHT, WIDTH, 3)
        assert tensors["frames"].dtype == torch.uint8
    assert metas == [(0, 9), (9, 12), (21, 12), (33, 12), (45, 12)]
    assert session.chunk_index == 5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_a_chunk_starts_without_waiting_for_the_gpu(lingbot_world: Path) -> None:
    """A chunk, even one with a new prompt or a new image, starts without waiting for the GPU.
    Otherwise, the GPU would be idle while the host launches the first step.
    """
    with torch.device("cuda"):
        world = load_world(lingbot_world, window_frames=7, sink_frames=2)
    session = open_session(world)
    run_chunk(world, session, prompt="a beach")
    for prompt, tensors in (
        ("a forest", {"image": start_image(1)}),
        ("a village", {"image": start_image(2)}),
    ):
        request = make_request(world, session, tensors, prompt=prompt)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if prompt == "a village" else "default")
        try:
            world.prepare_encode(request)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert request.num_steps > 0


def test_a_replayed_session_is_bit_identical(any_world: LingBotWorld) -> None:
    for first, again in zip(run_chunks(any_world, 4), run_chunks(any_world, 4), strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 5},
        {"actions": [["s"]] * 3},
        {"actions": [["w"]] * 3, "options": {"camera_scale": 0.02}},
    ],
    ids=["seed", "actions", "camera_scale"],
)
def test_request_fields_change_the_frames(world: LingBotWorld, change: dict[str, Any]) -> None:
    base = run_chunks(world, 1, actions=[["w"]] * 3)[0]
    assert not torch.equal(run_chunks(world, 1, **{"actions": [["w"]] * 3, **change})[0], base)


def test_poses_equal_the_actions_that_produce_them(world: LingBotWorld) -> None:
    """Poses produce the same frames as the equivalent actions. A client sends one pose per
    pixel frame, and the model uses every fourth pose. Intrinsics refer to an image of 480 x 832
    pixels.
    """
    held = ["w", "wj", "i", "w", "d", "d"]
    path, _ = integrate_actions(held, CameraTail.origin())
    scale = torch.tensor([832 / WIDTH, 480 / HEIGHT, 832 / WIDTH, 480 / HEIGHT])
    intrinsics = torch.tensor([500.0, 500.0, WIDTH / 2, HEIGHT / 2]) * scale
    by_keys, by_poses = open_session(world), open_session(world)
    by_poses.own = WorldCoordinates(
        condition=None, tail=CameraTail.origin()
    )  # with keys, the camera starts at the origin
    for chunk, pixel_frames in ((0, 9), (1, 12)):
        rows = torch.eye(4).repeat(pixel_frames, 1, 1)
        rows[[0, 4, 8] if chunk == 0 else [3, 7, 11]] = path[3 * chunk : 3 * chunk + 3].float()
        actions = [list(keys) for keys in held[3 * chunk : 3 * chunk + 3]]
        expected = frames_of(run_chunk(world, by_keys, prompt="a beach", actions=actions))
        given = {"poses": rows, "intrinsics": intrinsics}
        ours = frames_of(run_chunk(world, by_poses, given, prompt="a beach"))
        assert (ours.int() - expected.int()).abs().max() <= PIXELS_TOLERANCE


def test_a_session_may_return_latents(
    world: LingBotWorld,
) -> None:
    """A session's first chunk determines whether the session returns latents."""
    session = open_session(world, output="latents")
    meta, tensors = run_chunk(world, session, prompt="a beach", output="latents")
    assert meta["num_frames"] == 9
    assert tensors["latents"].shape == (16, 3, HEIGHT // 8, WIDTH // 8)
    with pytest.raises(RequestFailed, match="output is fixed at latents"):
        world.prepare_encode(make_request(world, session))


def test_decoding_the_latents_of_a_session_gives_its_frames(world: LingBotWorld) -> None:
    from vllm_omni.model_executor.models.wan.vae.vae import to_uint8

    frames = run_chunks(world, 3)
    session = open_session(world, output="latents")
    latents = [
        run_chunk(world, session, prompt="a beach", output="latents")[1]["latents"]
        for _ in range(3)
    ]
    pixels, _ = world.vae.decode(torch.cat(latents, dim=1).unsqueeze(0), None)
    assert torch.equal(to_uint8(pixels), torch.cat(frames))


# -- sessions --------------------------------------------------------------------------------------


def test_sessions_at_different_steps_and_chunks_in_one_batch_equal_solo_runs(
    world: LingBotWorld,
) -> None:
    """The latents of batched sessions are within 1e-4 of the latents of the same sessions run
    alone. Three sessions start at different times, so every batch mixes denoise steps.
    """
    pairs, mixed = run_staggered(
        world,
        lambda name: open_session(world, name, output="latents"),
        lambda session, seed: make_request(
            world, session, prompt="a beach", seed=seed, output="latents"
        ),
    )
    assert mixed > 5
    for ours, alone in pairs:
        torch.testing.assert_close(ours, alone, atol=1e-4, rtol=0)


def test_an_aborted_chunk_leaves_the_session_byte_identical(any_world: LingBotWorld) -> None:
    """Aborting a chunk before, between or after its denoise steps, or after decoding, does not
    change any byte of the session, even once the window is full. The retried chunk produces the
    same result as a chunk that was never aborted.
    """
    session = open_session(any_world)
    run_chunk(any_world, session, prompt="a beach")
    twin = session.fork("twin")
    for steps in range(6):
        before = session_bits(session)
        abandoned = make_request(
            any_world,
            session,
            {"image": start_image(3)},
            prompt="a volcano",
            seed=9,
            actions=[["k"]],
        )
        any_world.prepare_encode(abandoned)
        for _ in range(steps):
            step(any_world, [abandoned])
        if steps == abandoned.num_steps:
            any_world.post_decode(abandoned)
        assert_same(session, before)
        assert torch.equal(
            frames_of(run_chunk(any_world, session)), frames_of(run_chunk(any_world, twin))
        )


def test_a_fork_is_independent(any_world: LingBotWorld) -> None:
    session = open_session(any_world)
    for _ in range(4):
        run_chunk(any_world, session, prompt="a beach")
    fork = session.fork("b")
    assert fork.nbytes == session.nbytes
    assert_same(fork, session_bits(session))
    before = session_bits(session)
    other = frames_of(run_chunk(any_world, fork, actions=[["s"]] * 3))
    assert_same(session, before)
    assert not torch.equal(frames_of(run_chunk(any_world, session)), other)


def test_a_prompt_switch_takes_effect_at_its_chunk(world: LingBotWorld) -> None:
    session = open_session(world)
    run_chunk(world, session, prompt="a beach")
    plain, switched = session.fork("plain"), session.fork("switched")
    same = frames_of(run_chunk(world, plain, prompt="a beach"))
    changed = frames_of(run_chunk(world, switched, prompt="a snow storm"))
    assert torch.equal(same, frames_of(run_chunk(world, session)))
    assert not torch.equal(changed, same)
    assert switched.scalars()["prompt"] == "a snow storm"
    again = switched.fork("again")
    assert torch.equal(
        frames_of(run_chunk(world, switched)),
        frames_of(run_chunk(world, again, prompt="a snow storm")),
    )


def test_an_image_switch_restarts_the_condition(world: LingBotWorld) -> None:
    session = open_session(world)
    run_chunk(world, session, prompt="a beach")
    fork = session.fork("b")
    retained = frames_of(run_chunk(world, session))
    assert not torch.equal(frames_of(run_chunk(world, fork, {"image": start_image(5)})), retained)


def test_bytes_are_known_in_advance_and_constant(any_world: LingBotWorld) -> None:
    params = DiffusionParams(session_id="a", prompt="a beach")
    session = open_session(any_world)
    assert session.nbytes == any_world.session_nbytes(params)
    for _ in range(6):
        run_chunk(any_world, session, prompt="a beach")
        assert session.nbytes == any_world.session_nbytes(params)
        assert isinstance(session, LingBotSession)
        assert session.decoder_cache is not None
        held = session.window.nbytes + session.decoder_cache.nbytes
        assert session.condition is not None
        assert session.cross_kv is not None
        assert held + session.condition.nbytes + session.cross_kv.nbytes <= session.nbytes
    session.close()
    session.close()


def test_moving_a_session_to_the_host_changes_nothing(any_world: LingBotWorld) -> None:
    session = open_session(any_world)
    run_chunk(any_world, session, prompt="a beach")
    before = session_bits(session)
    session.to("cpu")
    assert_same(session, before)


def test_a_first_chunk_of_one_latent_frame(lingbot_world: Path) -> None:
    world = load_world(lingbot_world, first_chunk_latent_frames=1)
    session = open_session(world)
    counts = [
        run_chunk(world, session, prompt="a beach", actions=[["w"]])[0]["num_frames"]
        for _ in range(3)
    ]
    assert counts == [1, 12, 12]


# -- parallel --------------------------------------------------------------------------------------


def test_pipeline_stages_equal_one_rank_bit_for_bit(
    lingbot_world: Path, any_world: LingBotWorld
) -> None:
    """Two pipeline stages produce the same results as one rank, bit for bit. As in the runner,
    hidden states are sent to the next stage, and latents are sent back to the first.
    """
    options = {"window_frames": 7, "sink_frames": 2, "kv_dtype": any_world.kv_dtype}
    stages = [
        load_world(lingbot_world, ParallelContext(stage=stage, num_stages=2), **options)
        for stage in range(2)
    ]
    assert not stages[0].vae.has_decoder
    assert not stages[1].vae.has_encoder
    sessions = [open_session(stage) for stage in stages]
    for expected in run_chunks(any_world, 4):
        requests = [
            make_request(stage, session, prompt="a beach")
            for stage, session in zip(stages, sessions, strict=True)
        ]
        _, result = run_stages(stages, requests)
        assert torch.equal(result["frames"], expected)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"height": 40}, "unsupported_size"),
        ({"height": 480, "width": 832}, "unsupported_size"),
        ({"prompt": ""}, "invalid_request"),
        ({"prompt": None}, "invalid_request"),
    ],
)
def test_an_invalid_session_is_refused(
    world: LingBotWorld, params: dict[str, Any], code: str
) -> None:
    with pytest.raises(RequestFailed) as failure:
        open_session(world, **params)
    assert failure.value.code == code


POSES = {
    "poses": torch.eye(4).repeat(9, 1, 1),
    "intrinsics": torch.tensor([416.0, 416.0, 416.0, 240.0]),
}


@pytest.mark.parametrize(
    ("tensors", "params", "code", "message"),
    [
        ({}, {"height": 48}, "invalid_request", "height is fixed at 32"),
        ({"pose": torch.eye(4)}, {}, "invalid_request", r"unknown tensors \['pose'\]"),
        ({}, {"options": {"scale": 1}}, "invalid_request", "allowed keys: camera_scale"),
        ({}, {"options": {"camera_scale": 0}}, "invalid_camera", "must be finite and > 0, got 0"),
        ({}, {"options": {"camera_scale": float("nan")}}, "invalid_camera", "finite"),
        ({}, {"actions": None}, "missing_camera", "either the tensors"),
        (POSES, {"actions": [["w"]]}, "invalid_camera", "one of the two"),
        ({"poses": POSES["poses"]}, {}, "missing_camera", "poses need intrinsics"),
        ({**POSES, "poses": POSES["poses"][:8]}, {}, "invalid_camera", r"\[9, 4, 4\]"),
        (
            {"image": torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)},
            {},
            "invalid_image",
            r"uint8 of shape \[H, W, 3\]",
        ),
        ({"image": torch.zeros(HEIGHT, WIDTH, 3)}, {}, "invalid_image", "torch.float32"),
        ({"image": torch.zeros(1, 9000, 3, dtype=torch.uint8)}, {}, "image_too_large", "9000x1"),
    ],
)
def test_a_bad_first_request_is_named_and_changes_nothing(
    world: LingBotWorld,
    tensors: dict[str, torch.Tensor],
    params: dict[str, Any],
    code: str,
    message: str,
) -> None:
    session = open_session(world)
    before = session_bits(session)
    with pytest.raises(RequestFailed, match=message) as failure:
        world.prepare_encode(make_request(world, session, tensors, prompt="a beach", **params))
    assert failure.value.code == code
    assert_same(session, before)


def test_a_first_chunk_needs_an_image(world: LingBotWorld) -> None:
    session = open_session(world)
    params = DiffusionParams(session_id="a", prompt="a beach", actions=[])
    with pytest.raises(RequestFailed, match="missing_image"):
        world.prepare_encode(DiffusionRequest("request", params, {}, session))


def test_warm_up_runs_the_largest_shape(world: LingBotWorld) -> None:
    inputs = world.warmup_inputs()
    session = world.new_session(inputs[0][0])
    counts = []
    for params, tensors in inputs:
        request = DiffusionRequest("warm-up", params, tensors, session)
        counts.append(len(run_request(world, request)[1]["frames"]))
    assert counts == [9, 12]


@pytest.mark.parametrize("field", IMAGE_AND_VIDEO_PARAMS)
def test_a_parameter_without_effect_is_refused(world: LingBotWorld, field: str) -> None:
    """A request parameter that the model does not use is refused with an error that names the
    parameter.
    """
    session = open_session(world)
    with pytest.raises(RequestFailed, match=f"does not use {field}") as refused:
        world.prepare_encode(make_request(world, session, **{field: IMAGE_AND_VIDEO_PARAMS[field]}))
    assert refused.value.code == "invalid_request"
