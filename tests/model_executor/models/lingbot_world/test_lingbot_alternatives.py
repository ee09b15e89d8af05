# SPDX-License-Identifier: Apache-2.0
"""Tests of alternatives taken from other implementations and selected by name: formulas, memory
sizes, sessions and ranks.

The tests check each formula against recorded tensors, or against an independent computation over
whole clips that uses only the VAE. test_lingbot_camera_choices.py tests the camera.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import assert_same, run_steps, session_bits
from helpers.golden import golden_folder
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from lingbot_world_driver import (
    HEIGHT,
    WIDTH,
    load_world,
    make_request,
    open_session,
    run_chunk,
    start_image,
)
from safetensors.torch import load_file

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.model_executor.models.lingbot_world.state import LingBotSession
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.images.image_condition import ConditionState, GreyCondition
from vllm_omni.model_executor.models.wan.vae.chunk_decoder import ChunkDecoder
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAEConfig

GOLDEN = golden_folder("lingbot")
SMALL: dict[str, Any] = {"window_frames": 7, "sink_frames": 2}
EVERY = pytest.mark.parametrize("convention", ["sglang", "pr3701"])


@pytest.fixture(scope="module")
def vae() -> StreamingWanVAE:
    vae = StreamingWanVAE(VAEConfig(base_dim=4))
    load_vae(vae, GOLDEN / "vae_tiny_weights_orig_names.safetensors")
    return vae


@pytest.fixture(scope="module")
def recorded() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "vae.safetensors")


@pytest.fixture(scope="module")
def pr3701(lingbot_world: Path) -> LingBotWorld:
    return load_world(lingbot_world, **SMALL, convention="pr3701")


def grey_clip(image_1CTHW: torch.Tensor, num_frames: int) -> torch.Tensor:
    clip = torch.zeros(1, 3, num_frames, *image_1CTHW.shape[3:])
    clip[:, :, :1] = image_1CTHW
    return clip


def conditions(
    condition: GreyCondition, image: torch.Tensor, chunks: list[int]
) -> tuple[torch.Tensor, ConditionState]:
    y, state = condition.next(image, chunks[0], None)
    parts = [y]
    for num_latents in chunks[1:]:
        y, state = condition.next(None, num_latents, state)
        parts.append(y)
    return torch.cat(parts, dim=1), state


def session_after(world: LingBotWorld, chunks: int, **params: Any) -> LingBotSession:
    session = open_session(world)
    for _ in range(chunks):
        run_chunk(world, session, prompt="a beach", **params)
    assert isinstance(session, LingBotSession)
    return session


# -- the condition of later chunks -----------------------------------------------------------------


@pytest.mark.parametrize("first", [3, 1])
def test_second_chunk_repeats_the_second_chunk_of_the_whole_clip(
    vae: StreamingWanVAE, recorded: dict[str, torch.Tensor], first: int
) -> None:
    """SGLang encodes two chunks as one clip and repeats the second chunk's latents for later
    chunks. The mask is 1 only for the image.
    """
    image = recorded["image"][None, :, None]
    y, state = conditions(GreyCondition(vae, "second_chunk"), image, [first, 3, 3, 3])
    whole, _ = vae.encode(grey_clip(image, 4 * (first + 2) + 1), None)
    second = whole[0, :, first : first + 3]
    assert torch.equal(y[4:], torch.cat((whole[0, :, :first], second, second, second), dim=1))
    assert y[:4, 0].min() == 1 and y[:4, 1:].abs().max() == 0
    assert state.cache is None


def test_fresh_grey_is_a_grey_clip_without_its_first_latent(
    vae: StreamingWanVAE, recorded: dict[str, torch.Tensor]
) -> None:
    """The condition of later chunks equals the condition recorded from PR 3701's extension. The
    condition of the first chunk, which contains the image, equals the condition of a clip encoded
    as a whole.
    """
    image = recorded["image"][None, :, None]
    y, _ = conditions(GreyCondition(vae, "fresh_grey"), image, [3, 3, 3])
    whole, _ = vae.encode(grey_clip(image, 9), None)
    grey, _ = vae.encode(torch.zeros(1, 3, 13, 16, 24), None)
    assert torch.equal(y[4:, :3], whole[0])
    assert torch.equal(y[4:, 3:], torch.cat((grey[0, :, 1:], grey[0, :, 1:]), dim=1))
    torch.testing.assert_close(y[4:, 3:6], recorded["pr3701_ext_cond_latent"][0], atol=1e-5, rtol=0)
    assert y[:4, 1:].abs().max() == 0


@pytest.mark.parametrize("later", ["second_chunk", "fresh_grey"])
def test_the_state_of_a_condition_is_immutable_and_within_its_estimate(
    vae: StreamingWanVAE, recorded: dict[str, torch.Tensor], later: Any
) -> None:
    """An aborted chunk does not change the condition's state, a new image resets it, and no state
    exceeds `state_nbytes`.
    """
    image = recorded["image"][None, :, None]
    condition = GreyCondition(vae, later)
    _, state = condition.next(image, 3, None)
    for _ in range(4):
        assert state.nbytes <= condition.state_nbytes(16, 24)
        first, after = condition.next(None, 3, state)
        second, again = condition.next(None, 3, state)
        assert torch.equal(first, second) and again.resolved().settled == after.resolved().settled
        state = after
    switched, _ = condition.next(-image, 3, state)
    fresh, _ = condition.next(-image, 3, None)
    assert torch.equal(switched, fresh)


# -- the decoder -----------------------------------------------------------------------------------


def test_a_restarted_decode_equals_pr_3701(
    vae: StreamingWanVAE, recorded: dict[str, torch.Tensor]
) -> None:
    """Each later chunk is decoded from an empty cache, together with the two preceding latent
    frames, and the first 5 video frames are dropped.
    """
    latents = recorded["latents"]
    decoder, state, pixels = ChunkDecoder(vae, continuation="restart"), None, []
    for item in latents.split(3, dim=2):
        frames, state = decoder.decode(item, state)
        pixels.append(frames)
    whole, _ = vae.decode(latents, None)
    expected = [
        vae.decode(latents[:, :, start - 2 : start + 3], None)[0][:, :, 5:] for start in (3, 6)
    ]
    assert [part.shape[2] for part in pixels] == [9, 12, 12]
    assert torch.equal(pixels[0], whole[:, :, :9])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(pixels[1:], expected, strict=True))
    torch.testing.assert_close(pixels[1], recorded["pr3701_warm_decode_chunk1"], atol=5e-5, rtol=0)
    assert not torch.equal(pixels[1], whole[:, :, 9:21])


@pytest.mark.parametrize("chunks", [[1, 3, 3], [1, 1, 1, 1]])
def test_short_chunks_restart_with_the_available_latents(
    vae: StreamingWanVAE, chunks: list[int]
) -> None:
    """If only one latent frame precedes a chunk, only that frame is decoded again. For later
    chunks, the two preceding latent frames are decoded again.
    """
    latents = torch.randn(1, 16, sum(chunks), 2, 3, generator=torch.Generator().manual_seed(0))
    decoder, state, start = ChunkDecoder(vae, continuation="restart"), None, 0
    for count in chunks:
        frames, state = decoder.decode(latents[:, :, start : start + count], state)
        again = min(start, 2)
        whole, _ = vae.decode(latents[:, :, start - again : start + count], None)
        assert frames.shape[2] == (4 * count if start else 4 * count - 3)
        assert torch.equal(frames, whole[:, :, -frames.shape[2] :])
        start += count


def restart_in_bands(rank: int, rendezvous: str) -> None:
    """Compare this rank, one of two that each decode a band of rows, with a decoder that runs on a
    single rank.
    """
    with process_group(rank, 2, rendezvous) as group:
        compare_bands(RowBands(rank, 2, group))


def compare_bands(bands: RowBands) -> None:
    whole, mine = (
        ChunkDecoder(
            StreamingWanVAE(VAEConfig(base_dim=4), encoder=False, bands=each),
            continuation="restart",
        )
        for each in (None, bands)
    )
    for decoder in (whole, mine):
        assert isinstance(decoder.main, StreamingWanVAE)
        load_vae(decoder.main, GOLDEN / "vae_tiny_weights_orig_names.safetensors")
    latents = torch.randn(1, 16, 9, 5, 6, generator=torch.Generator().manual_seed(1))
    states: list[Any] = [None, None]
    rows = bands.rows(5)
    for item in latents.split(3, dim=2):
        expected, states[0] = whole.decode(item, states[0])
        pixels, states[1] = mine.decode(item, states[1])
        part = expected[:, :, :, 8 * rows.start : 8 * rows.stop]
        torch.testing.assert_close(pixels, part, atol=1e-5, rtol=0)
        assert torch.equal(states[1].newest, states[0].newest) and states[
            1
        ].nbytes == mine.state_nbytes(40, 48)


@pytest.mark.nightly
def test_ranks_that_share_the_decode_restart_together(tmp_path: Path) -> None:
    """With `omni.vae_parallel`, each rank retains all rows of the two preceding latent frames but
    decodes only its own (fp32, 1e-5).
    """
    run_ranks(restart_in_bands, (str(tmp_path / "rendezvous"),), 2)


# -- prompts ---------------------------------------------------------------------------------------


def test_a_prompt_switch_can_be_ignored(pr3701: LingBotWorld) -> None:
    """Under PR 3701's convention, a session uses its first prompt and ignores later prompts."""
    session = session_after(pr3701, 1)
    plain, switched = session.fork("plain"), session.fork("switched")
    ours = run_chunk(pr3701, switched, prompt="a snow storm")[1]["frames"]
    assert torch.equal(ours, run_chunk(pr3701, plain)[1]["frames"])
    assert switched.scalars()["prompt"] == "a beach"
    other = open_session(pr3701, prompt="a snow storm")
    run_chunk(pr3701, other, prompt="a snow storm")
    assert other.scalars()["prompt"] == "a snow storm"


# -- sessions --------------------------------------------------------------------------------------


@EVERY
def test_bytes_are_constant_and_a_fork_and_an_abandoned_chunk_leave_no_trace(
    lingbot_world: Path, convention: str
) -> None:
    """Over eight chunks with an image switch, a session never holds more bytes than were admitted
    for it. Forks and abandoned chunks leave no trace.
    """
    world = load_world(lingbot_world, **SMALL, convention=convention)
    session = session_after(world, 0)
    params = DiffusionParams(session_id="a", prompt="a beach")
    assert world.condition is not None and world.decoder is not None
    for index in range(8):
        image = {"image": start_image(index)} if index in (0, 4) else None
        fork = session.fork("b")
        before = session_bits(session)
        abandoned = make_request(world, session, image, prompt="a volcano", actions=[["k"]])
        run_steps(world, abandoned)
        world.post_decode(abandoned)
        assert_same(session, before)
        ours, theirs = (
            run_chunk(world, each, image, prompt="a beach")[1]["frames"] for each in (session, fork)
        )
        assert torch.equal(ours, theirs)
        assert session.nbytes == world.session_nbytes(params)
        assert session.decoder_cache is not None and session.condition is not None
        assert session.decoder_cache.nbytes == world.decoder.state_nbytes(HEIGHT, WIDTH)
        assert session.condition.nbytes <= world.condition.state_nbytes(HEIGHT, WIDTH)
        assert (
            session.condition.last_1CFhw.untyped_storage().nbytes()
            == session.condition.last_1CFhw.nbytes
        )
    copy = session.fork("c")
    copy.to("cpu")
    assert copy.scalars() == session.scalars()


def test_a_restarting_session_reserves_two_latent_frames_instead_of_the_decoders_cache(
    lingbot_world: Path, pr3701: LingBotWorld
) -> None:
    """If a session's condition and decoder restart at each chunk, the session reserves memory for
    two latent frames instead of the decoder's cache. It reserves no encoder cache either, because
    its condition starts from an empty state.
    """
    params = DiffusionParams(session_id="a", prompt="a beach")
    plain = load_world(lingbot_world, **SMALL)
    frame = 16 * (HEIGHT // 8) * (WIDTH // 8) * 4
    encoder = plain.vae.encoder_cache_nbytes(HEIGHT, WIDTH) + frame
    decoder = plain.vae.decoder_cache_nbytes(HEIGHT, WIDTH)
    saved = plain.session_nbytes(params) - pr3701.session_nbytes(params)
    assert saved == decoder - 2 * frame + encoder - 3 * frame
