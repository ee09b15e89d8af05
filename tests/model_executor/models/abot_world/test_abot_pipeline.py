# SPDX-License-Identifier: Apache-2.0
"""Tests of an ABot-World session driven as the runner drives it: chunks, references, re-bases,
snapshots, and isolation between sessions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from abot_driver import (
    DRIVER,
    HEIGHT,
    WIDTH,
    latents_of,
    load_world,
    make_request,
    open_session,
    references,
    run_chunk,
)
from helpers.chunks import run_request, run_staggered
from helpers.unreachable_weights import offloaded_out_of_reach
from helpers.unused_params import IMAGE_AND_VIDEO_PARAMS
from helpers.world_driver import BAD_REQUESTS, random_image

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.abot_world.pipeline import AbotWorld
from vllm_omni.model_executor.streaming import pinned
from vllm_omni.outputs import RequestFailed

HELD = [["w", "l"], ["w"], ["a", "i"]]


@pytest.fixture(scope="module")
def world(layouts: dict[str, Path]) -> AbotWorld:
    return load_world(layouts["original"], decoder="wan")


@pytest.fixture
def near_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the frame position limit for re-basing to 13 instead of 256."""
    monkeypatch.setattr(pinned.next_base, "__defaults__", (13,))


def run_chunks(world: AbotWorld, count: int, **params: Any) -> list[torch.Tensor]:
    session = open_session(world)
    return [run_chunk(world, session, **params) for _ in range(count)]


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["wan", "tiny"])
def test_a_session_streams_9_then_12_frames(layouts: dict[str, Path], decoder: str) -> None:
    world = load_world(layouts["original"], decoder=decoder)
    session = open_session(world)
    for index in range(5):
        request = make_request(session, actions=HELD)
        meta, result = run_request(world, request)
        assert (request.num_steps, request.clean_passes) == (5, 1)
        first = 0 if index == 0 else 12 * index - 3
        assert (meta["first_frame"], meta["num_frames"]) == (first, 12 if index else 9)
        assert result["frames"].shape == (meta["num_frames"], HEIGHT, WIDTH, 3)
        assert result["frames"].float().std() > 1


def test_both_layouts_are_one_model(layouts: dict[str, Path]) -> None:
    ours, theirs = (latents_of(load_world(path), [{}] * 2) for path in layouts.values())
    assert torch.equal(ours, theirs)


def test_no_layer_runs_before_its_weights_are_fetched(layouts: dict[str, Path]) -> None:
    offloaded = offloaded_out_of_reach(lambda: load_world(layouts["original"]))
    chunks = [{"actions": HELD}] * 2
    plain = latents_of(load_world(layouts["original"]), chunks)
    assert torch.equal(latents_of(offloaded, chunks), plain)


def test_the_start_image_is_the_first_latent_frame(world: AbotWorld) -> None:
    """A session's first frame is decoded from the latents of its start image, whatever keys are
    held.
    """
    ours, other = (latents_of(world, [{"actions": keys}]) for keys in (HELD, []))
    assert torch.equal(ours[:, :1], other[:, :1])
    assert not torch.equal(ours[:, 1:], other[:, 1:])


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 5},
        {"prompt": "a beach"},
        {"actions": [["s"]]},
        {"tensors": {"image": random_image(1)}},
        {"tensors": {"images.back": random_image(2)}},
        {"tensors": {"images.head": random_image(2)}},
    ],
    ids=lambda change: next(iter(change.get("tensors", change))),
)
def test_inputs_change_the_frames(world: AbotWorld, change: dict[str, Any]) -> None:
    base = run_chunk(world, open_session(world), actions=HELD)
    assert not torch.equal(
        run_chunk(world, open_session(world), **{"actions": HELD, **change}), base
    )


def test_references_change_later_chunks(world: AbotWorld) -> None:
    """Reference images affect later chunks, because their keys and values are stored outside the
    window and stay visible.
    """
    some, others = (
        latents_of(world, [{"tensors": references(name)}, *[{}] * 4]) for name in ("left", "right")
    )
    assert not torch.equal(some[:, -3:], others[:, -3:])


def test_missing_references_keep_their_tokens(layouts: dict[str, Path]) -> None:
    """With five empty reference slots, whose tokens are masked, the latents differ from those of a
    model without slots, as in the original implementation.
    """
    image = {"image": random_image()}
    results = []
    for slots in (5, 0):
        world = load_world(layouts["original"], reference_slots=slots)
        session = open_session(world, output="latents")
        request = make_request(session, output="latents")
        request.tensors = image
        results.append(run_request(world, request)[1]["latents"].clone())
    assert not torch.allclose(*results, atol=1e-3)


def test_a_new_prompt_keeps_references_and_image(world: AbotWorld) -> None:
    """A new prompt takes effect with the next chunk and does not change the latents of earlier
    frames.
    """
    plain = latents_of(world, [{}] * 4)
    switched = latents_of(world, [{}, {}, {"prompt": "night"}, {}])
    assert torch.equal(plain[:, :6], switched[:, :6])
    assert not torch.equal(plain[:, 6:9], switched[:, 6:9])


def test_keys_may_change_inside_a_chunk(world: AbotWorld) -> None:
    """The held keys can change between a chunk's latent frames, because actions have one entry per
    latent frame.
    """
    held, idle = (latents_of(world, [{"actions": keys}]) for keys in ([[], ["w"]], [[], []]))
    assert not torch.equal(held, idle)


# -- positions -------------------------------------------------------------------------------------


def test_positions_relative_to_the_window_change_the_result(layouts: dict[str, Path]) -> None:
    """Positions relative to the window produce different latents as soon as the window has moved.
    The difference is due only to the changed distance to the reference images.
    """
    carried, moved = (
        latents_of(load_world(layouts["original"], positions=kind), [{}] * 5)
        for kind in ("carried", "window")
    )
    assert torch.equal(carried[:, :9], moved[:, :9])
    assert not torch.equal(carried[:, 9:12], moved[:, 9:12])


@pytest.mark.usefixtures("near_limit")
def test_positions_restart_at_the_oldest_visible_frame(world: AbotWorld) -> None:
    session, bases = open_session(world, output="latents"), []
    for _ in range(8):
        run_chunk(world, session, output="latents")
        bases.append(session.base)
    assert bases == [0, 0, 0, 0, 6, 6, 12, 12]


def test_a_session_has_no_last_chunk(world: AbotWorld) -> None:
    """A session can run far beyond the length of every position table in the original
    implementation, and its memory size stays constant.
    """
    session = open_session(world, output="latents")
    run_chunk(world, session, output="latents")
    nbytes = session.nbytes
    session.chunk_index = 4_000_000
    session.window.commit(12_000_000)
    far = run_chunk(world, session, output="latents")
    assert torch.isfinite(far).all() and 0.1 < far.std() < 10
    assert session.nbytes == nbytes
    assert session.base == 12_000_003 - world.plan.window_frames


# -- sessions --------------------------------------------------------------------------------------


def test_sessions_at_different_steps_in_one_batch_equal_solo_runs(world: AbotWorld) -> None:
    """Batched sessions generate the same latents, bit for bit, as when each session runs alone. The
    sessions start at different times, so first chunks with reference images are batched with later
    chunks.
    """
    pairs, mixed = run_staggered(
        world,
        lambda name: open_session(world, name, output="latents"),
        lambda session, seed: make_request(session, seed=seed, actions=HELD, output="latents"),
    )
    assert mixed > 3
    assert all(torch.equal(ours, alone) for ours, alone in pairs)


@pytest.mark.usefixtures("near_limit")
@pytest.mark.parametrize("chunks", [0, 3, 4], ids=["first", "later", "re-base"])
def test_an_aborted_chunk_leaves_no_trace(world: AbotWorld, chunks: int) -> None:
    """A chunk leaves no trace if it is aborted before, between or after its denoise steps, or after
    decoding.
    """
    DRIVER.assert_aborts_leave_no_trace(world, chunks, range(0, 6, 2 if chunks != 4 else 1))


@pytest.mark.usefixtures("near_limit")
@pytest.mark.parametrize("chunks", [1, 4, 5], ids=["first", "before re-base", "after re-base"])
def test_a_fork_is_independent(world: AbotWorld, chunks: int) -> None:
    DRIVER.assert_forks_are_independent(world, chunks, HELD)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["plain K/V", "FP8 K/V"])
def test_a_session_holds_the_bytes_that_admission_counted(
    layouts: dict[str, Path], kv_dtype: torch.dtype | None
) -> None:
    world = load_world(layouts["original"], kv_dtype=kv_dtype, decoder="wan")
    session = open_session(world)
    counted = world.session_nbytes(DiffusionParams(session_id="a"))
    run_chunk(world, session)
    cross, decoder = session.cross_kv, session.decoder_cache
    assert cross is not None
    held = session.window.nbytes + cross.nbytes + decoder.nbytes
    assert session.nbytes == counted == held


def test_a_session_moves_to_the_host_and_back(world: AbotWorld) -> None:
    DRIVER.assert_moves_to_the_host_and_back(world)


def test_a_session_may_choose_a_shorter_window(world: AbotWorld) -> None:
    session = open_session(world, window_frames=6)
    frames = [run_chunk(world, session) for _ in range(4)]
    whole = run_chunks(world, 4)
    assert torch.equal(frames[1], whole[1])
    assert not torch.equal(frames[3], whole[3])


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["plain K/V", "FP8 K/V"])
def test_a_growing_window_gives_the_same_results(
    layouts: dict[str, Path], kv_dtype: torch.dtype | None
) -> None:
    """A growing window produces the same results as a fixed window, bit for bit. Memory for
    reference images is allocated at the start, and memory for frames as the frames are generated.
    """
    full, growing = (
        load_world(layouts["original"], kv_dtype=kv_dtype, omni={"kv_growth": grows})
        for grows in (False, True)
    )
    session, twin = open_session(full), open_session(growing)
    assert twin.window.held_frames == 6
    for _ in range(5):
        twin.grow()
        assert torch.equal(run_chunk(growing, twin), run_chunk(full, session))
    assert twin.window.held_frames == 9


def test_a_chunk_may_have_fewer_steps_and_the_tiny_decoder(layouts: dict[str, Path]) -> None:
    """In a session that uses Wan's decoder, a single chunk can use both fewer steps and the tiny
    decoder.
    """
    omni = {"scheduling": "deadline", "degradations": ["fewer_steps", "tiny_vae"]}
    world = load_world(layouts["original"], omni=omni, decoder="wan")
    session = open_session(world)
    run_chunk(world, session)
    request = make_request(session)
    request.degradations = ("fewer_steps", "tiny_vae")
    _, result = run_request(world, request)
    assert request.num_steps == 3
    assert request.degradations == ("fewer_steps", "tiny_vae")
    assert result["frames"].shape == (12, HEIGHT, WIDTH, 3)
    assert run_chunk(world, session).shape == (12, HEIGHT, WIDTH, 3)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "tensors", "params", "code", "reason"),
    [
        *BAD_REQUESTS,
        (
            True,
            {"images.side": random_image()},
            {},
            "invalid_image",
            "unknown images side; this model takes head, left, right, front, back",
        ),
        (
            True,
            {"images.head": torch.zeros(8, 8, 4, dtype=torch.uint8)},
            {},
            "invalid_image",
            r"images.head: image must be uint8 of shape \[H, W, 3\]",
        ),
        (
            False,
            {"images.head": random_image()},
            {},
            "invalid_image",
            "named images come with its first chunk",
        ),
        (True, {"poses": torch.eye(4)}, {}, "invalid_request", "takes image, images.head"),
        (True, {}, {"options": {"camera_scale": 1.0}}, "invalid_request", "takes no options"),
        (True, {}, {"height": 64}, "invalid_request", "height is fixed at 32"),
        (
            False,
            {},
            {"actions": [["jump"]]},
            "invalid_action",
            "this model takes buttons w, a, s, d, i, j, k, l",
        ),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(
    world: AbotWorld,
    first: bool,
    tensors: dict[str, Any],
    params: dict[str, Any],
    code: str,
    reason: str,
) -> None:
    DRIVER.assert_refused(world, first, tensors, params, code, reason)


def test_a_first_chunk_needs_an_image(world: AbotWorld) -> None:
    DRIVER.assert_needs_an_image(world)


@pytest.mark.parametrize("size", [(48, 64), (32, 40), (16, 64)])
def test_a_size_that_is_no_multiple_of_32_is_refused(
    world: AbotWorld, size: tuple[int, int]
) -> None:
    with pytest.raises(RequestFailed, match="multiples of 32") as refused:
        open_session(world, height=size[0], width=size[1])
    assert refused.value.code == "unsupported_size"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sink_frames": 3}, "has no sink frames"),
        ({"reference_slots": 6}, "reference_slots"),
        ({"positions": "absolute"}, "positions"),
    ],
)
def test_unsupported_options_are_refused(
    layouts: dict[str, Path], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        load_world(layouts["original"], **options)


@pytest.mark.parametrize("field", IMAGE_AND_VIDEO_PARAMS)
def test_a_parameter_without_effect_is_refused(world: AbotWorld, field: str) -> None:
    """A request parameter that the model does not use is refused with an error that names the
    parameter.
    """
    params = {field: IMAGE_AND_VIDEO_PARAMS[field]}
    reason = f"does not use {field}"
    DRIVER.assert_refused(world, True, {}, params, "invalid_request", reason)
