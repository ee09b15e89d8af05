# SPDX-License-Identifier: Apache-2.0
"""A session that another runner restores from a snapshot continues bit for bit, for every model
family and cache type.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, step
from helpers.snapshot_steps import (
    PLAY,
    Worker,
    frame_chunk,
    game_chunk,
    placed_chunk,
    played_chunk,
    referenced_chunk,
    resting_chunk,
    text_chunk,
    video_chunk,
    world_chunk,
)

from vllm_omni.model_executor.one_shot import OneShotSession
from vllm_omni.outputs import RequestFailed


@pytest.fixture
def make_worker(make_runner: Any, request: pytest.FixtureRequest) -> Callable[..., Worker]:
    def make(family: str, omni: dict[str, Any] | None = None) -> Worker:
        return Worker(
            make_runner(request.getfixturevalue(family), SIZES.get(family, {}) | (omni or {}))
        )

    return make


Chunk = Callable[..., dict[str, torch.Tensor]]
SMALL = {"window_frames": 7, "sink_frames": 2}
SIZES = {
    "abot_world": {"height": 32, "width": 64},
    "dreamx_world": {"height": 64, "width": 96},
}
"""Frame sizes for models that do not support the tests' default size."""
CASES: dict[str, tuple[str, dict[str, Any], Chunk, int]] = {
    "null world": ("null_world", {}, text_chunk, 3),
    "null world of buttons and axes": ("null_world", {"actions": PLAY}, played_chunk, 3),
    "world, before its window is full": ("lingbot_world", {}, world_chunk, 1),
    "world, ring and sinks": ("lingbot_world", SMALL, world_chunk, 4),
    "world, tiny decoder": ("lingbot_world", {**SMALL, "decoder": "tiny"}, world_chunk, 2),
    "world with poses, its start unknown": ("lingbot_poses", SMALL, world_chunk, 2),
    "world with poses, its start given": ("lingbot_poses", SMALL, placed_chunk, 2),
    "world with poses, its camera at rest": ("lingbot_poses", SMALL, resting_chunk, 5),
    "world as SGLang's": ("lingbot_world", {**SMALL, "convention": "sglang"}, world_chunk, 3),
    "world as SGLang's, before it repeats": (
        "lingbot_world",
        {**SMALL, "convention": "sglang"},
        world_chunk,
        1,
    ),
    "world as PR 3701's": ("lingbot_world", {**SMALL, "convention": "pr3701"}, world_chunk, 3),
    "world as PR 3701's, before it repeats": (
        "lingbot_world",
        {**SMALL, "convention": "pr3701"},
        world_chunk,
        1,
    ),
    "world before distillation, a window for each branch": ("lingbot_pretrain", {}, world_chunk, 2),
    "game, windows of trunk, mouse and keyboard": ("matrix_game", {}, game_chunk, 3),
    "references, outside a full window": ("abot_world", {"decoder": "wan"}, referenced_chunk, 4),
    "references, each chunk at another base": (
        "abot_world",
        {"positions": "window", "window_frames": 6},
        referenced_chunk,
        3,
    ),
    "world with a camera branch, before a frame has left": ("dreamx_world", {}, world_chunk, 1),
    "world with a camera branch, moving sinks": ("dreamx_world", SMALL, world_chunk, 4),
    "keys and mouse, two kinds of rings, not full": ("waypoint", {}, frame_chunk, 1),
    "keys and mouse, two kinds of rings": ("waypoint", {}, frame_chunk, 11),
    "stream, moving sinks": ("causal_wan", SMALL, text_chunk, 4),
    "stream, video in": ("causal_wan", SMALL, video_chunk, 3),
    "stream, recomputed by a new prompt": (
        "causal_wan",
        {**SMALL, "prompt_switch": "recompute"},
        text_chunk,
        4,
    ),
    "stream, a window for every step": (
        "causal_wan",
        {**SMALL, "cache": "noise_matched"},
        text_chunk,
        3,
    ),
    "stream, renewed sinks": (
        "causal_wan",
        {
            "window_frames": 4,
            "sink_frames": 1,
            "latent_frames_per_chunk": 1,
            "sink_refresh_threshold": 0.999,
        },
        text_chunk,
        7,
    ),
}


DAILY = (
    "null world of buttons and axes",
    "world, ring and sinks",
    "world with poses, its camera at rest",
    "world, tiny decoder",
    "world as PR 3701's",
    "game, windows of trunk, mouse and keyboard",
    "world with a camera branch, moving sinks",
    "stream, moving sinks",
    "stream, renewed sinks",
    "stream, recomputed by a new prompt",
)


@pytest.mark.parametrize(
    "case",
    [case if case in DAILY else pytest.param(case, marks=pytest.mark.nightly) for case in CASES],
)
def test_a_restored_session_continues_bit_for_bit(
    case: str, make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """A restored session has the same state as its source and generates the same chunks, bit for
    bit, even after a new prompt.

    The restored session runs on another runner under another id.
    """
    family, model, chunk, chunks = CASES[case]
    here, there = (make_worker(family, {"model": model}) for _ in range(2))
    for index in range(chunks):
        chunk(here, "a", index)
    path = tmp_path / "a.safetensors"
    header = here.save("a", path)
    assert header.chunk_index == chunks
    there.restore("b", path)
    assert there.bits("b") == here.bits("a")
    assert there.runner.sessions.nbytes == here.runner.sessions.nbytes
    for index, fields in ((chunks, {}), (chunks + 1, {"prompt": "at night"}), (chunks + 2, {})):
        ours, theirs = chunk(here, "a", index, **fields), chunk(there, "b", index, **fields)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_session_with_a_known_start_image_continues_bit_for_bit(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """A session whose start image the server knows does not run the encoder. It generates the same
    chunks as on a new server, also when it is restored in between.
    """
    here, there, new = (make_worker("lingbot_world", {"model": SMALL}) for _ in range(3))
    expected = [world_chunk(new, "a", index) for index in range(4)]
    for index in range(12):
        world_chunk(here, "earlier", index)
    found = [world_chunk(here, "a", index) for index in range(2)]
    condition = here.runner.sessions.get("a").condition
    assert condition.settled and condition.cache is None and condition.last_1CFhw.shape[2] > 1
    path = tmp_path / "a.safetensors"
    here.save("a", path)
    there.restore("b", path)
    assert there.bits("b") == here.bits("a")
    for name, worker in (("a", here), ("b", there)):
        rest = [world_chunk(worker, name, index) for index in range(2, 4)]
        for ours, theirs in zip([*found, *rest], expected, strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("family", "chunk"), [("lingbot_world", world_chunk), ("matrix_game", game_chunk)]
)
def test_a_session_never_gets_the_conditioning_of_another_image(
    family: str, chunk: Any, make_worker: Callable[..., Worker]
) -> None:
    """A server that knows one start image encodes another one of the same size."""
    here, new = make_worker(family), make_worker(family)
    for index in range(12):
        chunk(here, "known", index)
    known = chunk(here, "again", 0)["frames"]
    assert here.runner.sessions.get("again").condition.cache is None
    image = torch.arange(32 * 48 * 3, dtype=torch.uint8).view(32, 48, 3).flip(0)
    fields = {"prompt": "a harbour"} if family == "lingbot_world" else {}
    other, expected = (
        worker.chunk("other", {"image": image}, seed=3, actions=[["w"]] * 3, **fields)["frames"]
        for worker in (here, new)
    )
    assert torch.equal(other, expected) and not torch.equal(other, known)
    assert here.runner.sessions.get("other").condition.cache is not None


@pytest.mark.nightly
def test_a_snapshot_during_a_chunk_has_the_state_before_it(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """A snapshot taken between two denoise steps of a chunk contains the state before that chunk
    and does not change the session.
    """
    here, there = (
        make_worker("lingbot_world", {"model": SMALL}),
        make_worker("lingbot_world", {"model": SMALL}),
    )
    for worker in (here, there):
        for index in range(4):
            world_chunk(worker, "a", index)
    fields = {"session_id": "a", "actions": [["w"]] * 3}
    execute(here.runner, step(new=[new_request("r", **fields)]))
    execute(here.runner, step(running=["r"]))
    here.save("a", tmp_path / "a")
    execute(here.runner, step(finished=["r"]))
    there.restore("b", tmp_path / "a")
    assert there.bits("b") == there.bits("a") == here.bits("a")
    assert torch.equal(world_chunk(there, "b", 4)["frames"], world_chunk(here, "a", 4)["frames"])


def test_unknown_and_unstarted_sessions_cannot_be_saved(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """Saving an unknown session, or one that has not started, leaves no file and fails with an
    error that states the reason.
    """
    worker = make_worker("null_world")
    execute(worker.runner, step(new=[new_request("r", session_id="young", prompt="a field")]))
    for session_id, reason in (
        ("young", "has no finished chunk yet"),
        ("absent", "is not live here"),
    ):
        with pytest.raises(RequestFailed) as failure:
            worker.save(session_id, tmp_path / "none")
        assert failure.value.code == "unknown_session"
        assert failure.value.message.startswith(f"session '{session_id}' {reason}")
    assert not (tmp_path / "none").exists()


def test_pending_results_are_applied_before_a_snapshot(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a snapshot, the last stage's pending results are applied and the GPU is
    synchronized.
    """
    worker = make_worker("null_world")
    calls: list[Any] = []
    text_chunk(worker, "a", 0)
    monkeypatch.setattr(worker.runner, "settle", calls.append)
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    worker.snapshots.committed("a")
    assert calls == ["a"]
    worker.runner.device = torch.device("cuda", 0)
    worker.snapshots.committed("a")
    assert calls == ["a", "a", worker.runner.device]


def test_one_shot_sessions_cannot_be_saved_or_restored() -> None:
    """One-shot sessions, which image models use, cannot be saved or restored, because they have no
    state.
    """
    session = OneShotSession("a", 1)
    for call in (session.start_params, lambda: session.restore({}, None)):  # type: ignore[arg-type]
        with pytest.raises(RequestFailed, match="end with their request") as failure:
            call()
        assert failure.value.code == "unsupported"
