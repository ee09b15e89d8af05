# SPDX-License-Identifier: Apache-2.0
"""What other implementations do instead of our defaults, each selected by name: formula, bytes,
sessions, ranks.

The formulas are computed here again, over whole clips, from the VAE alone or from recorded tensors.
The camera's are in test_lingbot_camera_choices.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.golden import golden_folder
from lingbot_world_driver import (
    HEIGHT,
    WIDTH,
    load_world,
    make_request,
    open_session,
    run_chunk,
    start_image,
    step,
)
from safetensors.torch import load_file

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.lingbot_world.config import CONVENTIONS, Convention
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.model_executor.models.lingbot_world.state import LingBotSession
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.images.files import prepare_image
from vllm_omni.model_executor.models.wan.images.image_condition import ConditionState, GreyCondition
from vllm_omni.model_executor.models.wan.vae.chunk_decoder import ChunkDecoder
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAEConfig, to_uint8

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
def test_second_chunk_repeats_what_the_whole_clip_has_there(
    vae: StreamingWanVAE, recorded: dict[str, torch.Tensor], first: int
) -> None:
    """SGLang: two chunks are encoded as one clip; the second serves all later ones.

    Mask 1 on the image only.
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
    """PR 3701's extension, as recorded from it; the image's own chunk is the whole clip's."""
    image = recorded["image"][None, :, None]
    y, _ = conditions(GreyCondition(vae, "fresh_grey"), image, [3, 3, 3])
    whole, _ = vae.encode(grey_clip(image, 9), None)
    grey, _ = vae.encode(torch.zeros(1, 3, 13, 16, 24), None)
    assert torch.equal(y[4:, :3], whole[0])
    assert torch.equal(y[4:, 3:], torch.cat((grey[0, :, 1:], grey[0, :, 1:]), dim=1))
    torch.testing.assert_close(y[4:, 3:6], recorded["pr3701_ext_cond_latent"][0], atol=1e-5, rtol=0)
    assert y[:4, 1:].abs().max() == 0


@pytest.mark.parametrize("later", ["second_chunk", "fresh_grey"])
def test_a_state_of_another_condition_is_a_value_and_holds_what_was_counted(
    vae: StreamingWanVAE, recorded: dict[str, torch.Tensor], later: Any
) -> None:
    """A dropped chunk leaves no trace, a new image starts over, and no state holds more than
    `state_nbytes`.
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


def test_a_stream_that_settles_in_the_images_chunk_is_repeated_frame_by_frame(
    vae: StreamingWanVAE,
) -> None:
    """A very long first chunk: what the second one would be is known, one latent frame over and
    over.
    """
    image = torch.zeros(1, 3, 1, 16, 24)
    condition = GreyCondition(vae, "second_chunk")
    y, state = condition.next(image, 60, None)
    assert state.resolved().settled
    later, _ = condition.next(None, 3, state)
    assert torch.equal(later[4:], y[4:, -1:].expand(-1, 3, -1, -1))


# -- the decoder -----------------------------------------------------------------------------------


def test_a_restarted_decode_is_that_of_pr_3701(
    vae: StreamingWanVAE, recorded: dict[str, torch.Tensor]
) -> None:
    """Each later chunk behind the two latents before it, from an empty cache, its first 5 frames
    dropped.
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
def test_chunks_of_one_latent_frame_restart_with_what_there_is(
    vae: StreamingWanVAE, chunks: list[int]
) -> None:
    """One latent frame before the chunk: it alone is decoded again. Later ones have two."""
    latents = torch.randn(1, 16, sum(chunks), 2, 3, generator=torch.Generator().manual_seed(0))
    decoder, state, start = ChunkDecoder(vae, continuation="restart"), None, 0
    for count in chunks:
        frames, state = decoder.decode(latents[:, :, start : start + count], state)
        again = min(start, 2)
        whole, _ = vae.decode(latents[:, :, start - again : start + count], None)
        assert frames.shape[2] == (4 * count if start else 4 * count - 3)
        assert torch.equal(frames, whole[:, :, -frames.shape[2] :])
        start += count


def test_frames_of_a_restarting_world_are_its_latents_decoded_so(pr3701: LingBotWorld) -> None:
    session = open_session(pr3701, output="latents")
    latents = [
        run_chunk(pr3701, session, prompt="a beach", output="latents")[1]["latents"]
        for _ in range(4)
    ]
    assert isinstance(session, LingBotSession) and session.decoder_cache is None
    clip = torch.cat(latents, dim=1)[None]
    session = open_session(pr3701)
    for index in range(4):
        _, result = run_chunk(pr3701, session, prompt="a beach")
        again = 2 if index else 0
        pixels, _ = pr3701.vae.decode(clip[:, :, 3 * index - again : 3 * index + 3], None)
        assert torch.equal(result["frames"], to_uint8(pixels)[5 if index else 0 :])


def restart_in_bands(rank: int, meeting: str) -> None:
    """One of two ranks that decode a band of rows each, compared with the whole decoder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    bands = RowBands(rank, 2, dist.group.WORLD)
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
    """`omni.vae_parallel`: each keeps the two latents whole and decodes its rows of them (fp32,
    1e-5).
    """
    mp.spawn(restart_in_bands, (str(tmp_path / "meeting"),), nprocs=2)


# -- prompts ---------------------------------------------------------------------------------------


def test_a_prompt_switch_can_be_ignored(pr3701: LingBotWorld) -> None:
    """PR 3701: a later prompt changes nothing; a session's first still counts."""
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
    """Over eight chunks with an image switch; what is held is never more than what was counted."""
    world = load_world(lingbot_world, **SMALL, convention=convention)
    session = session_after(world, 0)
    params = DiffusionParams(session_id="a", prompt="a beach")
    assert world.condition is not None and world.decoder is not None
    for index in range(8):
        image = {"image": start_image(index)} if index in (0, 4) else None
        fork = session.fork("b")
        before = {name: tensor.clone() for name, tensor in session.tensors().items()}
        abandoned = make_request(world, session, image, prompt="a volcano", actions=[["k"]])
        world.prepare_encode(abandoned)
        while abandoned.step < abandoned.num_steps:
            step(world, [abandoned])
        world.post_decode(abandoned)
        after = session.tensors()
        assert after.keys() == before.keys() and all(
            torch.equal(after[name], before[name]) for name in before
        )
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
    """And none of the encoder's cache, with a condition that goes on from nothing."""
    params = DiffusionParams(session_id="a", prompt="a beach")
    plain = load_world(lingbot_world, **SMALL)
    frame = 16 * (HEIGHT // 8) * (WIDTH // 8) * 4
    encoder = plain.vae.encoder_cache_nbytes(HEIGHT, WIDTH) + frame
    decoder = plain.vae.decoder_cache_nbytes(HEIGHT, WIDTH)
    saved = plain.session_nbytes(params) - pr3701.session_nbytes(params)
    assert saved == decoder - 2 * frame + encoder - 3 * frame


@EVERY
def test_the_first_chunk_from_an_image_is_the_defaults_under_every_choice(
    lingbot_world: Path, convention: Convention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule and camera aside, they are about what comes later; so chunk 0 of a still camera
    is the same.
    """
    plain = load_world(lingbot_world, **SMALL)
    theirs = replace(CONVENTIONS[convention], camera_dtype="fp32", schedule="exact")
    monkeypatch.setitem(CONVENTIONS, convention, theirs)
    other = load_world(lingbot_world, **SMALL, convention=convention)
    results = [
        [
            run_chunk(world, session, prompt="a beach", actions=[[]] * 3)[1]["frames"]
            for _ in range(3)
        ]
        for world, session in ((plain, open_session(plain)), (other, open_session(other)))
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][2], results[1][2])


def test_the_image_of_a_later_chunk_is_prepared_as_the_first(pr3701: LingBotWorld) -> None:
    """An image switch restarts the condition as a session's first chunk does, also where nothing
    else is streamed.
    """
    session = session_after(pr3701, 2)
    request = make_request(pr3701, session, {"image": start_image(5)}, prompt="a beach")
    pr3701.prepare_encode(request)
    pixels = prepare_image(start_image(5), HEIGHT, WIDTH)
    whole, _ = pr3701.vae.encode(grey_clip(pixels, 9), None)
    assert torch.equal(request.state.y[4:], whole[0])
