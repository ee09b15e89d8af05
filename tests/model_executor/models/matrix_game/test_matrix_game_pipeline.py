# SPDX-License-Identifier: Apache-2.0
"""A Matrix-Game session driven as the runner drives it: chunks, snapshots, and that nothing
leaks between sessions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.unreachable_weights import offloaded_out_of_reach
from helpers.unused_params import IMAGE_AND_VIDEO_PARAMS
from matrix_game_driver import (
    HEIGHT,
    WIDTH,
    Request,
    finish,
    latents_of,
    load_game,
    make_request,
    open_session,
    run_chunk,
    start_image,
    step,
)

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import SupportsStepExecution
from vllm_omni.model_executor.models.matrix_game.pipeline import MatrixGame
from vllm_omni.model_executor.models.matrix_game.state import MatrixGameSession
from vllm_omni.outputs import RequestFailed
from vllm_omni.testing.tiny.matrix_game import make_tiny

HELD: dict[str, list[list[str]]] = {
    "original": [["w", "l"], ["w"], ["a", "i"]],
    "original_gta": [["w", "d"], ["w"], ["s", "a"]],
    "original_templerun": [["jump"], [], ["left"]],
}


GTA = pytest.param("original_gta", marks=pytest.mark.nightly)
"""The modules of `original` with fewer keys: it repeats what that shows."""


@pytest.fixture(scope="module", params=["original", GTA, "original_templerun"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for layout in HELD:
        found[layout] = tmp_path_factory.mktemp(layout)
        make_tiny(found[layout], 0, layout)
    return found


@pytest.fixture(scope="module")
def game(variant: str, checkpoints: dict[str, Path]) -> MatrixGame:
    return load_game(checkpoints[variant])


@pytest.fixture(scope="module")
def universal(checkpoints: dict[str, Path]) -> MatrixGame:
    return load_game(checkpoints["original"])


def test_no_layer_is_used_without_its_fetch_from_host_memory(
    game: MatrixGame, variant: str, checkpoints: dict[str, Path]
) -> None:
    offloaded = offloaded_out_of_reach(lambda: load_game(checkpoints[variant]))
    chunks = [{"actions": HELD[variant]}] * 2
    assert torch.equal(latents_of(offloaded, chunks), latents_of(game, chunks))


def bits(session: MatrixGameSession) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return {name: tensor.clone() for name, tensor in session.tensors().items()}, session.scalars()


def assert_same(
    session: MatrixGameSession, before: tuple[dict[str, torch.Tensor], dict[str, Any]]
) -> None:
    tensors, scalars = session.tensors(), session.scalars()
    assert scalars == before[1]
    assert tensors.keys() == before[0].keys()
    assert all(torch.equal(tensors[name], before[0][name]) for name in tensors)


def run_chunks(game: MatrixGame, count: int, **params: Any) -> list[torch.Tensor]:
    session = open_session(game)
    return [run_chunk(game, session, **params) for _ in range(count)]


# -- results ---------------------------------------------------------------------------------------


def test_it_is_what_the_runner_requests_for(universal: MatrixGame) -> None:
    assert isinstance(universal, SupportsStepExecution)
    assert (universal.plan.window_frames, universal.schedule.num_steps) == (6, 3)


def test_a_session_streams_9_then_12_frames(game: MatrixGame, variant: str) -> None:
    session = open_session(game)
    for index in range(4):
        request = make_request(session, actions=HELD[variant])
        game.prepare_encode(request)
        assert (request.num_steps, request.clean_passes) == (game.schedule.num_steps + 1, 1)
        while request.step < request.num_steps:
            step([game], [[request]])
        meta, result = finish(game, request)
        assert (meta["first_frame"], meta["num_frames"]) == (
            (0, 9) if index == 0 else (12 * index - 3, 12)
        )
        assert result["frames"].shape == (meta["num_frames"], HEIGHT, WIDTH, 3)


def test_a_second_session_after_a_reset_equals_the_first(game: MatrixGame, variant: str) -> None:
    first, again = (run_chunks(game, 4, actions=HELD[variant]) for _ in range(2))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))
    assert first[3].float().std() > 1


@pytest.mark.parametrize("change", ["seed", "actions", "image"])
def test_inputs_change_the_frames(game: MatrixGame, variant: str, change: str) -> None:
    params: dict[str, Any] = {"seed": 5} if change == "seed" else {}
    held = None if change == "actions" else HELD[variant]
    tensors = {"image": start_image(1)} if change == "image" else {}
    base = run_chunk(game, open_session(game), actions=HELD[variant])
    assert not torch.equal(
        run_chunk(game, open_session(game), tensors, actions=held, **params), base
    )


def test_a_row_for_every_video_frame_equals_the_entries_it_repeats(universal: MatrixGame) -> None:
    """And rows that differ within a latent frame do not."""
    session, fine, finer = open_session(universal), open_session(universal), open_session(universal)
    for index, counts in enumerate(((1, 4, 4), (4, 4, 4))):
        buttons = torch.zeros(sum(counts), 8)
        buttons[: counts[0], 0] = 1
        buttons[counts[0] : counts[0] + counts[1], 7] = 1
        other = buttons.clone()
        other[1:3, 2] = 1
        expected = run_chunk(universal, session, actions=[["w"], ["l"], []])
        assert torch.equal(run_chunk(universal, fine, {"buttons": buttons}), expected)
        assert not torch.equal(run_chunk(universal, finer, {"buttons": other}), expected), index


def test_the_last_video_frame_of_a_chunk_first_matters_in_the_next(universal: MatrixGame) -> None:
    plain, late = open_session(universal), open_session(universal)
    rows = torch.zeros(9, 8)
    rows[8, 0] = 1
    assert torch.equal(run_chunk(universal, late, {"buttons": rows}), run_chunk(universal, plain))
    assert not torch.equal(run_chunk(universal, late), run_chunk(universal, plain))


def test_decoding_the_latents_of_a_session_gives_its_frames(universal: MatrixGame) -> None:
    from vllm_omni.model_executor.models.wan.vae.vae import to_uint8

    frames = run_chunks(universal, 3)
    session = open_session(universal, output="latents")
    latents = [run_chunk(universal, session, output="latents") for _ in range(3)]
    pixels, _ = universal.vae.decode(torch.cat(latents, dim=1).unsqueeze(0), None)
    # as the original makes levels
    assert torch.equal(to_uint8(pixels, "truncate"), torch.cat(frames))
    request = make_request(open_session(universal, output="both"), output="both")
    universal.prepare_encode(request)
    while request.step < request.num_steps:
        step([universal], [[request]])
    _, result = finish(universal, request)
    assert torch.equal(result["frames"], frames[0]) and torch.equal(result["latents"], latents[0])


def test_a_session_continues_behind_the_originals_1024_latent_frames(universal: MatrixGame) -> None:
    """Rotations are computed, so nothing ends there; the session's ring is at another slot, the
    keys are not.
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
    """Three sessions enter one after another, so every batch mixes steps and chunks; bit for
    bit.
    """
    names = ("a", "b", "c")
    common: dict[str, Any] = {"output": "latents", "actions": HELD[variant]}
    solo = {}
    for seed, name in enumerate(names):
        session = open_session(game, name, output="latents")
        solo[name] = [run_chunk(game, session, seed=seed, **common) for _ in range(3)]
    sessions = {name: open_session(game, name, output="latents") for name in names}
    done: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    live: list[Request] = []
    waiting, mixed = list(names), 0
    while any(len(chunks) < 3 for chunks in done.values()):
        if waiting:
            name = waiting.pop(0)
            request = make_request(sessions[name], seed=names.index(name), **common)
            game.prepare_encode(request)
            live.append(request)
        mixed += len({request.step for request in live}) > 1
        step([game], [live])
        for request in [request for request in live if request.step == request.num_steps]:
            name = request.session.session_id
            done[name].append(finish(game, request)[1]["latents"])
            live.remove(request)
            if len(done[name]) < 3:
                waiting.append(name)
    assert mixed > 3
    assert all(
        torch.equal(ours, alone)
        for name in names
        for ours, alone in zip(done[name], solo[name], strict=True)
    )


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_aborted_chunk_leaves_no_trace(universal: MatrixGame, chunks: int) -> None:
    """Abandoned before, between and after denoise steps, even after decoding: in a session of
    its own each time.
    """
    start = open_session(universal)
    for _ in range(chunks):
        run_chunk(universal, start, actions=[["w"]])
    expected = run_chunk(universal, start.fork("twin"))
    for steps in range(5):
        session = start.fork(f"abandoned at {steps}")
        before = bits(session)
        abandoned = make_request(session, seed=9, actions=[["k", "d"]] * 3)
        universal.prepare_encode(abandoned)
        for _ in range(steps):
            step([universal], [[abandoned]])
        if steps == abandoned.num_steps:
            universal.post_decode(abandoned)
        assert_same(session, before)
        assert torch.equal(run_chunk(universal, session), expected), steps


def test_an_aborted_first_chunk_leaves_a_new_session(universal: MatrixGame) -> None:
    session = open_session(universal)
    request = make_request(session, {"image": start_image(3)}, actions=[["d"]])
    universal.prepare_encode(request)
    step([universal], [[request]])
    assert torch.equal(run_chunk(universal, session), run_chunks(universal, 1)[0])


def test_a_fork_goes_its_own_way(game: MatrixGame, variant: str) -> None:
    session = open_session(game)
    for _ in range(3):
        run_chunk(game, session, actions=HELD[variant])
    fork, before = session.fork("b"), bits(session)
    assert fork.nbytes == session.nbytes
    assert_same(fork, before)
    other = run_chunk(game, fork, actions=HELD[variant][::-1])
    assert_same(session, before)
    assert not torch.equal(run_chunk(game, session, actions=HELD[variant]), other)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["plain K/V", "FP8 K/V"])
def test_a_session_holds_the_bytes_that_admission_counted(
    variant: str, checkpoints: dict[str, Path], kv_dtype: torch.dtype | None
) -> None:
    game = load_game(checkpoints[variant], kv_dtype=kv_dtype)
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
    session = open_session(universal)
    run_chunk(universal, session)
    twin = session.fork("twin")
    session.to("cpu")
    assert torch.equal(run_chunk(universal, session), run_chunk(universal, twin))


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
        (True, {"image": torch.zeros(3, 8, 8)}, {}, "invalid_image", "uint8 of shape"),
        (
            True,
            {"poses": torch.eye(4).repeat(9, 1, 1)},
            {},
            "invalid_request",
            "takes image, buttons, axes, scroll",
        ),
        (True, {}, {"options": {"camera_scale": 1.0}}, "invalid_request", "takes no options"),
        (True, {}, {"height": 64}, "invalid_request", "height is fixed at 32"),
        (False, {"image": start_image()}, {}, "invalid_image", "has one start image"),
        (False, {}, {"actions": [["w"]] * 4}, "invalid_action", "at most 3 entries"),
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
    session = open_session(universal)
    if not first:
        run_chunk(universal, session)
    before = bits(session)
    with pytest.raises(RequestFailed, match=reason) as refused:
        universal.prepare_encode(make_request(session, tensors, **params))
    assert refused.value.code == code
    assert_same(session, before)


def test_a_first_chunk_needs_an_image(universal: MatrixGame) -> None:
    session = open_session(universal)
    request = make_request(session)
    request.tensors = {}
    with pytest.raises(RequestFailed, match="needs an image") as refused:
        universal.prepare_encode(request)
    assert refused.value.code == "missing_image"


@pytest.mark.parametrize("field", IMAGE_AND_VIDEO_PARAMS)
def test_a_parameter_without_effect_is_refused(universal: MatrixGame, field: str) -> None:
    """By name, so that a client does not believe that it did something."""
    session = open_session(universal)
    with pytest.raises(RequestFailed, match=f"does not use {field}") as refused:
        universal.prepare_encode(make_request(session, **{field: IMAGE_AND_VIDEO_PARAMS[field]}))
    assert refused.value.code == "invalid_request"
