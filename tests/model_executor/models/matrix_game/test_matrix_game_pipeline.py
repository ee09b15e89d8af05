# SPDX-License-Identifier: Apache-2.0
"""Tests of a Matrix-Game session driven as the runner drives it: chunks, snapshots, and isolation
between sessions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import run_request, run_staggered
from helpers.unreachable_weights import offloaded_out_of_reach
from helpers.unused_params import IMAGE_AND_VIDEO_PARAMS
from helpers.world_driver import BAD_REQUESTS, random_image
from matrix_game_driver import (
    DRIVER,
    HEIGHT,
    WIDTH,
    latents_of,
    load_game,
    make_request,
    open_session,
    run_chunk,
)

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.matrix_game.pipeline import MatrixGame
from vllm_omni.outputs import RequestFailed

HELD: dict[str, list[list[str]]] = {
    "original": [["w", "l"], ["w"], ["a", "i"]],
    "original_gta": [["w", "d"], ["w"], ["s", "a"]],
    "original_templerun": [["jump"], [], ["left"]],
}


GTA = pytest.param("original_gta", marks=pytest.mark.nightly)
"""Tested only nightly, because `original_gta` has the same modules as `original` but fewer keys,
and runs no additional code.
"""


@pytest.fixture(scope="module", params=["original", GTA, "original_templerun"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def game(variant: str, layouts: dict[str, Path]) -> MatrixGame:
    return load_game(layouts[variant])


@pytest.fixture(scope="module")
def universal(layouts: dict[str, Path]) -> MatrixGame:
    return load_game(layouts["original"])


def test_no_layer_runs_before_its_weights_are_fetched(
    game: MatrixGame, variant: str, layouts: dict[str, Path]
) -> None:
    offloaded = offloaded_out_of_reach(lambda: load_game(layouts[variant]))
    chunks = [{"actions": HELD[variant]}] * 2
    assert torch.equal(latents_of(offloaded, chunks), latents_of(game, chunks))


def run_chunks(game: MatrixGame, count: int, **params: Any) -> list[torch.Tensor]:
    session = open_session(game)
    return [run_chunk(game, session, **params) for _ in range(count)]


# -- results ---------------------------------------------------------------------------------------


def test_a_session_streams_9_then_12_frames(game: MatrixGame, variant: str) -> None:
    session = open_session(game)
    for index in range(4):
        request = make_request(session, actions=HELD[variant])
        meta, result = run_request(game, request)
        assert (request.num_steps, request.clean_passes) == (game.schedule.num_steps + 1, 1)
        assert (meta["first_frame"], meta["num_frames"]) == (
            (0, 9) if index == 0 else (12 * index - 3, 12)
        )
        assert result["frames"].shape == (meta["num_frames"], HEIGHT, WIDTH, 3)


def test_a_second_session_equals_the_first(game: MatrixGame, variant: str) -> None:
    first, again = (run_chunks(game, 4, actions=HELD[variant]) for _ in range(2))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))
    assert first[3].float().std() > 1


@pytest.mark.parametrize("change", ["seed", "actions", "image"])
def test_inputs_change_the_frames(game: MatrixGame, variant: str, change: str) -> None:
    params: dict[str, Any] = {"seed": 5} if change == "seed" else {}
    held = None if change == "actions" else HELD[variant]
    tensors = {"image": random_image(1)} if change == "image" else {}
    base = run_chunk(game, open_session(game), actions=HELD[variant])
    assert not torch.equal(
        run_chunk(game, open_session(game), tensors, actions=held, **params), base
    )


def test_decoding_the_latents_of_a_session_gives_its_frames(universal: MatrixGame) -> None:
    from vllm_omni.model_executor.models.wan.vae.vae import to_uint8

    frames = run_chunks(universal, 3)
    session = open_session(universal, output="latents")
    latents = [run_chunk(universal, session, output="latents") for _ in range(3)]
    pixels, _ = universal.vae.decode(torch.cat(latents, dim=1).unsqueeze(0), None)
    # The original implementation truncates pixels.
    assert torch.equal(to_uint8(pixels, "truncate"), torch.cat(frames))
    both = make_request(open_session(universal, output="both"), output="both")
    _, result = run_request(universal, both)
    assert torch.equal(result["frames"], frames[0]) and torch.equal(result["latents"], latents[0])


def test_a_session_may_exceed_1024_latent_frames(universal: MatrixGame) -> None:
    """A session can exceed 1024 latent frames, the length of the original implementation's rotation
    table, because this package computes rotations.
    """
    session = open_session(universal, output="latents")
    for _ in range(2):
        run_chunk(universal, session, output="latents")
    session.chunk_index = 342
    session.window.commit(1026)
    far = run_chunk(universal, session, output="latents")
    assert torch.isfinite(far).all() and 0.1 < far.std() < 10
    assert session.chunk_index == 343


# -- sessions --------------------------------------------------------------------------------------


def test_sessions_at_different_steps_in_one_batch_equal_solo_runs(
    game: MatrixGame, variant: str
) -> None:
    """Batched sessions generate the same latents, bit for bit, as when each session runs alone.
    Three sessions start at different times, so every batch mixes denoise steps and chunks.
    """
    held = HELD[variant]
    pairs, mixed = run_staggered(
        game,
        lambda name: open_session(game, name, output="latents"),
        lambda session, seed: make_request(session, seed=seed, actions=held, output="latents"),
    )
    assert mixed > 3
    assert all(torch.equal(ours, alone) for ours, alone in pairs)


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_aborted_chunk_leaves_no_trace(universal: MatrixGame, chunks: int) -> None:
    """A chunk leaves no trace if it is aborted before, between or after its denoise steps, or after
    decoding. Each case uses a separate session.
    """
    DRIVER.assert_aborts_leave_no_trace(universal, chunks, range(5))


def test_a_fork_is_independent(game: MatrixGame, variant: str) -> None:
    DRIVER.assert_forks_are_independent(game, 3, HELD[variant])


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["plain K/V", "FP8 K/V"])
def test_a_session_holds_the_bytes_that_admission_counted(
    variant: str, layouts: dict[str, Path], kv_dtype: torch.dtype | None
) -> None:
    game = load_game(layouts[variant], kv_dtype=kv_dtype)
    session = open_session(game)
    counted = game.session_nbytes(DiffusionParams(session_id="a"))
    run_chunk(game, session)
    own, cross, decoder = session.own, session.cross_kv, session.decoder_cache
    assert own is not None and cross is not None and own.condition is not None
    held = session.window.nbytes + cross.nbytes + decoder.nbytes
    held += sum(tensor.nbytes for tensor in own.tensors().values())
    assert session.nbytes == counted == held
    assert sum(tensor.nbytes for tensor in session.tensors().values()) < counted


def test_a_session_moves_to_the_host_and_back(universal: MatrixGame) -> None:
    DRIVER.assert_moves_to_the_host_and_back(universal)


# -- refusals --------------------------------------------------------------------------------------


def test_a_prompt_is_refused_with_a_list_of_the_controls(game: MatrixGame) -> None:
    with pytest.raises(RequestFailed, match="takes no prompt; it takes an image and buttons"):
        open_session(game, prompt="a beach")
    session = open_session(game, prompt="")
    run_chunk(game, session)
    with pytest.raises(RequestFailed, match="takes no prompt"):
        game.prepare_encode(make_request(session, prompt="a beach"))


@pytest.mark.parametrize(
    ("first", "tensors", "params", "code", "reason"),
    [
        *BAD_REQUESTS,
        (
            True,
            {"poses": torch.eye(4).repeat(9, 1, 1)},
            {},
            "invalid_request",
            "takes image, buttons, axes, scroll",
        ),
        (True, {}, {"options": {"camera_scale": 1.0}}, "invalid_request", "takes no options"),
        (True, {}, {"height": 64}, "invalid_request", "height is fixed at 32"),
        (
            False,
            {},
            {"actions": [["jump"]]},
            "invalid_action",
            "this model takes buttons w, s, a, d, i, k, j, l",
        ),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(
    universal: MatrixGame,
    first: bool,
    tensors: dict[str, Any],
    params: dict[str, Any],
    code: str,
    reason: str,
) -> None:
    DRIVER.assert_refused(universal, first, tensors, params, code, reason)


def test_a_first_chunk_needs_an_image(universal: MatrixGame) -> None:
    DRIVER.assert_needs_an_image(universal)


@pytest.mark.parametrize("field", IMAGE_AND_VIDEO_PARAMS)
def test_a_parameter_without_effect_is_refused(universal: MatrixGame, field: str) -> None:
    """A request parameter that the model does not use is refused with an error that names the
    parameter.
    """
    params = {field: IMAGE_AND_VIDEO_PARAMS[field]}
    reason = f"does not use {field}"
    DRIVER.assert_refused(universal, True, {}, params, "invalid_request", reason)
