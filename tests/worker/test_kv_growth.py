# SPDX-License-Identifier: Apache-2.0
"""`omni.kv_growth`: sessions whose K/V windows are allocated as they fill."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.logged import logged
from helpers.scheduling import execute, new_request, run_to_end, step
from helpers.snapshot_steps import Worker, game_chunk, world_chunk

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.capabilities import Refusals, check_refusals
from vllm_omni.outputs import RequestFailed

WINDOW = {"window_frames": 36, "sink_frames": 3}
"""A window of 36 latent frames, large enough that rounding to 4 KiB memory pages matters little.

For each layer, the buffer has one row for the keys and one for the values. A frame takes up 1.5 KiB
in each row.
"""
FIRST_FRAMES = 6
"""Number of latent frames that a session initially has memory for: one chunk and the chunk before
it.
"""


@pytest.fixture
def make_worker(make_runner: Any, request: pytest.FixtureRequest) -> Callable[..., Worker]:
    def make(family: str = "lingbot_world", kv_growth: bool = True, **omni: Any) -> Worker:
        engine = omni.pop("engine", {})
        options = {"kv_growth": kv_growth, "model": WINDOW, **omni}
        return Worker(make_runner(request.getfixturevalue(family), options, **engine))

    return make


def latents(worker: Worker, name: str, chunks: range) -> list[torch.Tensor]:
    return [world_chunk(worker, name, index, output="latents")["latents"] for index in chunks]


def session_bytes(worker: Worker, **fields: Any) -> int:
    params = DiffusionParams(session_id="s", prompt="a harbour", output="latents", **fields)
    return int(worker.runner.model.session_nbytes(params))


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("family", "omni", "chunk", "count"),
    [
        ("lingbot_world", {}, world_chunk, 14),
        (
            "lingbot_world",
            {"engine": {"kv_cache_dtype": "fp8"}, "model": {**WINDOW, "window_frames": 12}},
            world_chunk,
            6,
        ),
        pytest.param("lingbot_pretrain", {}, world_chunk, 2, marks=pytest.mark.nightly),
        ("matrix_game", {"model": {"window_frames": 9}}, game_chunk, 5),
    ],
    ids=["world", "world with FP8 K/V", "windows of two branches", "game"],
)
def test_results_equal_those_of_full_windows(
    family: str,
    omni: dict[str, Any],
    chunk: Callable[..., dict[str, torch.Tensor]],
    count: int,
    make_worker: Callable[..., Worker],
) -> None:
    """Results are bit-identical to those obtained with fully allocated windows, even after the
    window is full.

    The results of a fork and the contents of a snapshot are also bit-identical.
    """
    growing = make_worker(family, **dict(omni))
    full = make_worker(family, kv_growth=False, **dict(omni))
    before = 0
    for index in range(count):
        ours, theirs = (chunk(worker, "a", index) for worker in (growing, full))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        nbytes = growing.runner.sessions.nbytes
        assert before <= nbytes <= full.runner.sessions.nbytes + 2**16
        before = nbytes
        if index == 1:
            for worker in (growing, full):
                run_to_end(worker.runner, new_request("f", session_id="a", op="fork", fork_to="b"))
            assert growing.runner.sessions.nbytes == 2 * nbytes
            ours, theirs = (chunk(worker, "b", 2) for worker in (growing, full))
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
            for worker in (growing, full):
                run_to_end(worker.runner, new_request("c", session_id="b", op="close"))
    assert growing.bits("a") == full.bits("a")


def test_a_session_counts_with_the_memory_of_its_frames(
    make_worker: Callable[..., Worker],
) -> None:
    """Only the memory allocated for a session's frames counts towards its size, both when the
    session is created and after each chunk.

    A closed session counts as zero bytes.
    """
    growing, full = make_worker(), make_worker(kv_growth=False)
    first, most = session_bytes(growing), session_bytes(full)
    frame = (most - first) // (36 - FIRST_FRAMES)
    for index in range(13):
        latents(growing, "a", range(index, index + 1))
        frames = min(36, max(FIRST_FRAMES, 3 * (index + 1)))
        expected = first + (frames - FIRST_FRAMES) * frame
        assert abs(growing.runner.sessions.nbytes - expected) <= 8 * 2 * 4096
    run_to_end(growing.runner, new_request("c", session_id="a", op="close"))
    assert growing.runner.sessions.stats()["bytes"] == 0
    own = session_bytes(growing, window_frames=6, sink_frames=3)
    assert own == session_bytes(full, window_frames=6, sink_frames=3)


def test_more_short_sessions_fit(make_worker: Callable[..., Worker]) -> None:
    """The same memory holds more short sessions than it would with fully allocated windows, which
    would use up the memory sooner.
    """
    for kv_growth, fitting in ((False, 2), (True, 3)):
        worker = make_worker(kv_growth=kv_growth, max_session_bytes=2_000_000)
        for number in range(fitting):
            latents(worker, f"s{number}", range(1))
        with pytest.raises(RequestFailed, match="capacity"):
            latents(worker, "more", range(1))


def test_a_session_without_memory_keeps_its_window(make_worker: Callable[..., Worker]) -> None:
    """A session whose window cannot grow any further continues with the window size that it has
    reached.

    The session then generates the same latents, bit for bit, as one opened with this window size.
    Its results report the shorter window, the shortening is logged once, and other sessions are not
    affected.
    """
    budget = 2 * session_bytes(make_worker()) + 2**16
    worker, roomy = make_worker(max_session_bytes=budget), make_worker(kv_growth=False)
    latents(worker, "other", range(1))
    metas = []
    with logged(
        logging.getLogger("vllm.vllm_omni.model_executor.streaming.session"), logging.WARNING
    ) as lines:
        for index in range(9):
            latents(worker, "a", range(index, index + 1))
            metas.append(worker.runner.sessions.get("a").degradations)
    reached = worker.runner.sessions.get("a").plan.window_frames
    assert FIRST_FRAMES < reached < 27
    assert metas[0] == () and metas[-1] == ("short_window",) and len(lines) == 1
    assert f"session a keeps a K/V window of {reached} instead of 36 latent frames" in lines[0]
    result = run_to_end(
        worker.runner,
        new_request("r", session_id="a", actions=[["w"], ["w", "j"], ["i"]], output="latents"),
    )["r"]
    assert result[0]["degradations"] == ["short_window"]
    assert result[0]["window_frames"] == reached
    own = {"window_frames": reached, "sink_frames": 3}
    for index in range(9):
        world_chunk(roomy, "a", index, output="latents", **(own if index == 0 else {}))
    expected = latents(roomy, "a", range(9, 10))[0]
    assert torch.equal(result[1]["latents"], expected)
    assert worker.runner.sessions.nbytes <= budget
    assert worker.runner.sessions.get("other").degradations == ()
    run_to_end(worker.runner, new_request("c", session_id="a", op="close"))
    latents(worker, "other", range(1, 4))
    assert worker.runner.sessions.get("other").degradations == ()


def test_a_shortened_session_can_be_copied_and_moved(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """A fork or a restored copy of a session with a shortened window has the same window size as
    that session.

    The restoring server may be one that allocates full windows.
    """
    worker, there = make_worker(), make_worker(kv_growth=False)
    worker.runner.sessions.max_bytes = session_bytes(worker) + 2**16
    latents(worker, "a", range(6))
    assert worker.runner.sessions.get("a").degradations
    reached = worker.runner.sessions.get("a").plan.window_frames
    worker.save("a", tmp_path / "a")
    there.restore("a", tmp_path / "a")
    assert there.runner.sessions.get("a").plan.window_frames == reached
    assert there.bits("a") == worker.bits("a")
    worker.runner.sessions.max_bytes = None
    run_to_end(worker.runner, new_request("f", session_id="a", op="fork", fork_to="b"))
    ours = latents(worker, "a", range(6, 8))
    assert equal(latents(there, "a", range(6, 8)), ours)
    assert equal(latents(worker, "b", range(6, 8)), ours)
    assert worker.runner.sessions.get("b").degradations == ("short_window",)


def test_a_restored_session_has_the_memory_of_its_frames(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """A restored session gets memory for its own frames only, and continues bit for bit.

    If this memory is not available, the session is refused.
    """
    here, there = make_worker(), make_worker()
    latents(here, "a", range(6))
    here.save("a", tmp_path / "a")
    there.restore("b", tmp_path / "a")
    assert here.runner.sessions.nbytes == there.runner.sessions.nbytes
    assert equal(latents(there, "b", range(6, 9)), latents(here, "a", range(6, 9)))
    small = make_worker()
    small.runner.sessions.max_bytes = session_bytes(here) + 2**14
    with pytest.raises(RequestFailed, match="capacity"):
        small.restore("b", tmp_path / "a")
    assert len(small.runner.sessions) == 0


def test_an_idle_session_is_closed_for_a_window_that_grows(
    make_worker: Callable[..., Worker],
) -> None:
    """An idle session is closed to make room for a growing window, just as for a new session. A
    session in use is not closed.
    """
    budget = 2 * session_bytes(make_worker()) + 2**14
    worker = make_worker(max_session_bytes=budget)
    sessions, now = worker.runner.sessions, [0.0]
    sessions._clock = lambda: now[0]
    latents(worker, "old", range(1))
    latents(worker, "a", range(2))
    now[0] = 1000.0
    latents(worker, "a", range(2, 6))
    assert "old" not in sessions and sessions.get("a").degradations == ()


def test_ranks_use_the_shortest_of_their_windows(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks use the size of the shortest window on any rank. In this test, another rank has
    memory for only 12 frames, and this rank has already allocated more.
    """
    worker = make_worker()
    monkeypatch.setattr(
        worker.runner.agreement, "least", lambda values: [min(12, value) for value in values]
    )
    latents(worker, "a", range(7))
    session = worker.runner.sessions.get("a")
    assert (session.window.window_frames, session.window.held_frames) == (12, 15)


@pytest.mark.parametrize(("frames", "sink_frames"), [(6, 0), (7, 1), (9, 3), (12, 3)])
def test_a_session_retains_as_many_sink_frames_as_fit(
    frames: int,
    sink_frames: int,
    make_worker: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session retains as many sink frames as fit in addition to a chunk and the chunk before it.

    The session generates the same latents as one opened with the same numbers of window and sink
    frames.
    """
    worker, roomy = make_worker(), make_worker(kv_growth=False)
    monkeypatch.setattr(
        worker.runner.agreement, "least", lambda values: [min(frames, value) for value in values]
    )
    own = {"window_frames": frames, "sink_frames": sink_frames}
    world_chunk(roomy, "a", 0, output="latents", **own)
    world_chunk(worker, "a", 0, output="latents")
    assert equal(latents(worker, "a", range(1, 7)), latents(roomy, "a", range(1, 7)))
    plan = worker.runner.sessions.get("a").plan
    assert (plan.window_frames, plan.sink_frames) == (frames, sink_frames)


def test_a_failed_chunk_leaves_the_session_as_it_was(
    make_worker: Callable[..., Worker],
) -> None:
    """A failed chunk leaves the session unchanged, except for newly allocated memory, which remains
    and is used by the next chunk.
    """
    worker, full = make_worker(), make_worker(kv_growth=False)
    for index in range(5):
        for one in (worker, full):
            world_chunk(one, "a", index, output="latents")
        bad = new_request("bad", session_id="a", actions=[["no such key"]] * 3)
        [failure] = execute(worker.runner, step(new=[bad])).values()
        assert isinstance(failure, RequestFailed)
        execute(worker.runner, step(finished=["bad"]))
    assert worker.bits("a") == full.bits("a")


def test_a_model_with_a_fixed_window_refuses_kv_growth_at_start() -> None:
    with pytest.raises(ValueError, match=r"omni\.kv_growth true: .* windows of different lengths"):
        check_refusals("Causal Wan", Refusals(), OmniConfig(kv_growth=True), 1)


def test_pipeline_stages_refuse_kv_growth_at_start() -> None:
    """If pipeline stages are configured, `omni.kv_growth` is refused at startup, because window
    lengths could differ between stages.
    """
    with pytest.raises(ValueError, match="stages of a pipeline cannot agree"):
        OmniConfig(kv_growth=True).check_stages(2)
    OmniConfig(kv_growth=True).check_stages(1)
