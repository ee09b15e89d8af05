# SPDX-License-Identifier: Apache-2.0
"""Tests of video-to-video streams: input frames per chunk, and the noise scale of each chunk."""

import math
from pathlib import Path

import pytest
import torch
from causal_wan_driver import (
    HEIGHT,
    WIDTH,
    input_video,
    load_model,
    make_request,
    open_session,
    run_chunk,
)

from vllm_omni.model_executor.models.causal_wan.motion import (
    first_timestep,
    motion,
    next_noise_scale,
)
from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE
from vllm_omni.outputs import RequestFailed

SOURCE = {"options": {"source": "video"}}


@pytest.fixture(scope="module")
def model(causal_wan: Path) -> CausalWan:
    return load_model(
        causal_wan,
        window_frames=6,
        sink_frames=3,
        latent_frames_per_chunk=1,
        first_chunk_latent_frames=2,
    )


def repaint(
    model: CausalWan, speeds: list[float], seed: int = 0
) -> tuple[list[float], torch.Tensor]:
    """Return the noise scales and frames of a stream.

    Args:
        speeds: Speed of the input pattern in each chunk, in pixels per frame.
    """
    session = open_session(model, **SOURCE)
    scales, frames = [], []
    for chunk, speed in enumerate(speeds):
        video = input_video(model.plan.pixel_frames(chunk), speed)
        meta, tensors = run_chunk(model, session, {"video": video}, prompt="a beach", seed=seed)
        scales.append(meta["noise_scale"])
        frames.append(tensors["frames"])
    return scales, torch.cat(frames)


def test_a_stream_takes_5_then_4_frames_and_returns_as_many(model: CausalWan) -> None:
    scales, frames = repaint(model, [0.5] * 6)
    assert len(frames) == 5 + 5 * 4 and len(scales) == 6
    again_scales, again = repaint(model, [0.5] * 6)
    assert torch.equal(frames, again) and scales == again_scales


def test_faster_motion_gets_less_noise(model: CausalWan) -> None:
    """The noise scale is 0.8 for static input and approaches 0.7 for fast input."""
    still, _ = repaint(model, [0.0] * 4)
    fast, _ = repaint(model, [8.0] * 4)
    assert still == pytest.approx([0.8] * 4)
    assert fast == pytest.approx([0.8, 0.71, 0.701, 0.7001])


def test_motion_is_the_largest_difference_of_successive_frames() -> None:
    """A clip's motion equals the value of the formula, evaluated frame by frame on pixels in [-1,
    1].
    """
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(100, 120, (5, 8, 6, 3), dtype=torch.uint8, generator=generator)
    clip = frames.double() / 127.5 - 1
    steps = [float((clip[i] - clip[i - 1]).square().mean().sqrt()) for i in range(1, 5)]
    assert motion(frames[1:], frames[0]) == pytest.approx(max(steps) / 0.2, abs=1e-6)
    assert motion(frames[:1], frames[0]) == 0.0
    assert motion(255 * (frames > 110), frames[0] * 0) == 1.0


@pytest.mark.parametrize(
    ("scale", "timestep"), [(0.8, 700), (0.79, 690), (0.7001, 600), (0.7599, 659)]
)
def test_timesteps_are_integers(scale: float, timestep: int) -> None:
    assert first_timestep(scale) == timestep == math.floor(1000 * scale) - 100


def test_noise_follows_motion_slowly() -> None:
    assert next_noise_scale(0.8, 0.8, 0.0) == pytest.approx(0.8)
    assert next_noise_scale(0.8, 0.8, 1.0) == pytest.approx(0.71)
    assert next_noise_scale(0.8, 0.7, 0.5) == pytest.approx(0.9 * 0.75 + 0.07)


def test_a_stream_split_anywhere_is_encoded_as_one_clip(causal_wan: Path) -> None:
    """With zero noise, encoding the input in chunks produces the same latents as encoding it as one
    clip with the VAE.
    """
    model = load_model(causal_wan, latent_frames_per_chunk=1)
    vae = model.vae
    assert isinstance(vae, StreamingWanVAE) and model.video is not None
    clip = input_video(range(13), 1.0)
    whole, _ = vae.encode(clip.permute(3, 0, 1, 2)[None].float() / 127.5 - 1, None)
    state, parts = None, []
    for frames in (range(1), range(1, 5), range(5, 13)):
        noise = torch.zeros(16, max(1, len(frames) // 4), HEIGHT // 8, WIDTH // 8)
        latents, _, state = model.video.noisy_latents(
            clip[frames.start : frames.stop], state, noise
        )
        parts.append(latents / (1 - state.noise_scale))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[0], atol=1e-5, rtol=0)


def test_raw_latents_are_unnormalised_as_in_stream_diffusion_v2(causal_wan: Path) -> None:
    raw = load_model(causal_wan, normalize_video_latent=False)
    normal = load_model(causal_wan)
    assert raw.video is not None and normal.video is not None
    clip, noise = input_video(range(9)), torch.zeros(16, 3, HEIGHT // 8, WIDTH // 8)
    a, _, _ = raw.video.noisy_latents(clip, None, noise)
    b, _, _ = normal.video.noisy_latents(clip, None, noise)
    torch.testing.assert_close(
        a, 0.2 * (b / 0.2 * raw.vae.latents_std[0] + raw.vae.latents_mean[0])
    )


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({}, "missing_video"),
        ({"video": torch.zeros(5, HEIGHT, WIDTH, 3)}, "invalid_video"),
        ({"video": torch.zeros(4, HEIGHT, WIDTH, 3, dtype=torch.uint8)}, "invalid_video"),
        ({"video": torch.zeros(5, WIDTH, HEIGHT, 3, dtype=torch.uint8)}, "invalid_video"),
    ],
)
def test_input_frames_of_another_shape_are_refused(
    model: CausalWan, tensors: dict[str, torch.Tensor], code: str
) -> None:
    with pytest.raises(RequestFailed) as failure:
        model.prepare_encode(make_request(open_session(model, **SOURCE), tensors, prompt="a beach"))
    assert failure.value.code == code


def test_a_server_without_an_encoder_refuses_video(causal_wan: Path) -> None:
    model = load_model(causal_wan, video_input=False)
    assert not model.vae.has_encoder
    with pytest.raises(RequestFailed, match="text only"):
        open_session(model, **SOURCE)
