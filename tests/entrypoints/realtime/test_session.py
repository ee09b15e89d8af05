# SPDX-License-Identifier: Apache-2.0
"""Sessions, tested without an endpoint: committed and retained chunks, and interrupted requests."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, FakeEngine, camera
from helpers.waits import pause_task, seconds, until

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.chunk_source import (
    ChunkControls,
    ChunkSource,
    ChunkSpan,
    LiveChunks,
    PlannedChunks,
)
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.controls.camera import CameraPath
from vllm_omni.entrypoints.realtime.sessions.run import (
    FinishedChunk,
    ReplyOptions,
    SessionJob,
    SessionRun,
    SessionStart,
)
from vllm_omni.entrypoints.realtime.sessions.session import Session, new_session_id
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.inputs import DiffusionParams, SessionId


def job(
    num_frames: int,
    request_id: str,
    image: bool = False,
    render_after: threading.Event | None = None,
    source: ChunkSource | None = None,
    restart: bool = False,
    fps: float | None = None,
) -> SessionJob:
    """Return a request whose reply for each chunk is the chunk's index.

    Args:
        source: Source of the controls. None selects a camera path of `num_frames` poses.
    """

    def render(chunk: FinishedChunk) -> list[bytes]:
        if render_after is not None:
            assert render_after.wait(seconds(10))
        return [str(chunk.chunk_index).encode()]

    load_image = (lambda height, width: np.zeros((height, width, 3), np.uint8)) if image else None
    return SessionJob(
        request_id=request_id,
        digest=request_id.encode(),
        source=source
        or PlannedChunks(
            camera=CameraPath.parse(*camera(num_frames).values(), max_poses=1000, size=(832, 480))
        ),
        start=SessionStart(load_image=load_image, restart=restart),
        replies=ReplyOptions(render=render, fps=fps),
    )


async def ended(run: SessionRun) -> EndpointError | None:
    """Wait until a run has ended, without receiving its replies."""
    assert run.task is not None
    await asyncio.wait([run.task])
    await asyncio.sleep(0)
    return run.error


def scenario(test: Callable[[SessionManager, Session, FakeEngine], Awaitable[None]]) -> None:
    """Run `test` with a session from a new manager, and check that no task remains."""

    async def run() -> None:
        engine = FakeEngine()
        limits, info = EndpointLimits(unsent_chunks=1000), StreamInfo(height=32, width=48)
        manager = SessionManager(SessionEngine(engine), info, limits, ThreadPoolExecutor(1))  # type: ignore[arg-type]
        await test(manager, manager.open(("me", "s")), engine)
        await manager.shutdown()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def payloads(run: SessionRun) -> list[bytes]:
    return [reply.payload for reply in run.replies]


def test_finished_chunks_of_a_cancelled_request_are_retained() -> None:
    """A request is cancelled while chunk 0 is being rendered, chunk 1 is finished and chunk 2 is
    running. Chunks 0 and 1 are retained in the delivery log, and the result of chunk 2 is unknown.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        def slow_third(params: DiffusionParams) -> None:
            engine.delay_s = 5.0 if params.chunk_index == 2 else 0.0

        engine.fail = slow_third
        rendering = threading.Event()
        run = session.submit(job(FIRST + 3 * LATER, "r", image=True, render_after=rendering))
        await until(lambda: engine.running == 1 and engine.chunks[-1].params.chunk_index == 2)
        await pause_task(0.05)  # until chunk 1 has been processed
        session.cancel()
        rendering.set()
        error = await ended(run)
        assert error is not None
        assert (error.code, error.details["next_chunk_index"]) == ("cancelled", 2)
        assert (run.completed, payloads(run), session.next_chunk) == (2, [b"0", b"1"], 2)
        assert not session.in_step
        assert len(engine.aborted) == 1

    scenario(test)


@pytest.mark.parametrize("late", [False, True])
def test_the_position_after_an_abort_is_read_from_the_engine(late: bool) -> None:
    """After an abort, a new request continues at the engine's next chunk. Repeating the interrupted
    request requires a resync if the engine has committed the aborted chunk.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        await ended(session.submit(job(FIRST, "first", image=True)))
        engine.delay_s = 5.0
        cut = session.submit(job(2 * LATER, "cut"))
        await until(lambda: engine.running == 2)
        session.cancel()
        await ended(cut)
        engine.delay_s = 0.0
        if late:  # the chunk was committed before the abort arrived
            next(iter(engine.worlds.values())).chunk_index += 1
        again = session.submit(job(2 * LATER, "cut"))
        error = await ended(again)
        if late:
            assert error is not None
            assert error.code == "resync_required"
            fresh = session.submit(job(2 * LATER, "fresh"))
            assert await ended(fresh) is None
            assert payloads(fresh) == [b"2", b"3"]
        else:
            assert error is None
            assert payloads(again) == [b"1", b"2"]
        assert session.in_step

    scenario(test)


def test_a_request_cancelled_before_it_started_still_ends() -> None:
    """A request that is cancelled before its task has run does not leave the session busy."""

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        run = session.submit(job(FIRST, "r", image=True))
        session.cancel()
        error = await ended(run)
        assert error is not None
        assert error.code == "cancelled"
        assert not session.is_busy
        assert manager.find(session.key) is None
        assert engine.calls == []

    scenario(test)


def test_a_repeated_request_after_other_requests_is_out_of_date() -> None:
    """A repeated request is out of date if another request has advanced the session since the
    interruption.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        def fail_second(params: DiffusionParams) -> None:
            engine.delay_s = 5.0 if params.chunk_index == 1 else 0.0

        engine.fail = fail_second
        cut = session.submit(job(FIRST + LATER, "cut", image=True))
        await until(lambda: cut.completed == 1)
        session.cancel()
        await ended(cut)
        engine.fail = lambda params: None
        engine.delay_s = 0.0
        assert await ended(session.submit(job(LATER, "next"))) is None
        error = await ended(session.submit(job(FIRST + LATER, "cut", image=True)))
        assert error is not None
        assert (error.code, error.details["next_chunk_index"]) == ("resync_required", 2)

    scenario(test)


def test_inputs_are_freed_when_a_request_ends() -> None:
    """A request frees its inputs when it ends, because otherwise 64 retained requests could hold 64
    start images.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        requested = job(FIRST, "r", image=True)
        run = session.submit(requested)
        await ended(run)
        assert run.job.start.load_image is None
        assert run.job.source is not requested.source

    scenario(test)


def test_a_live_request_paused_before_its_chunk_continues_later() -> None:
    """A live request that is paused before its chunk continues later instead of ending as if it
    were complete.
    """

    class PausedAgain(LiveChunks):
        """Controls of a run that is paused again after its first wait and becomes ready only after
        its second.
        """

        num_chunks = 2
        waits = 0

        @property
        def ready(self) -> bool:
            return self.waits >= 2

        async def wait_until_ready(self) -> None:
            self.waits += 1

        def sample(self, span: ChunkSpan) -> ChunkControls:
            return ChunkControls(
                actions=[[]] * span.num_latents, prompt="a" if span.number == 0 else None
            )

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        run = session.submit(job(FIRST, "r", image=True, source=PausedAgain()))
        assert await ended(run) is None
        assert run.completed == 2

    scenario(test)


def sent(info: StreamInfo, fps: float | None) -> list[DiffusionParams]:
    """Return the engine parameters of the three chunks of one request."""

    async def run() -> list[DiffusionParams]:
        engine = FakeEngine()
        manager = SessionManager(
            SessionEngine(engine), info, EndpointLimits(unsent_chunks=1000), ThreadPoolExecutor(1)
        )  # type: ignore[arg-type]
        session = manager.open(("me", "s"))
        requested = session.submit(job(FIRST + 2 * LATER, "r", image=True, fps=fps))
        assert await ended(requested) is None
        await manager.shutdown()
        return [chunk.params for chunk in engine.chunks]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("target_fps", "fps", "expected"),
    [(None, None, 16.0), (20.0, None, 20.0), (20.0, 12.0, 12.0)],
    ids=["the model's rate", "the server's target", "the client's own"],
)
def test_deadlines_are_one_playing_time_apart(
    target_fps: float | None, fps: float | None, expected: float
) -> None:
    info = StreamInfo(height=32, width=48, by_deadline=True, target_fps=target_fps)
    params = sent(info, fps)
    assert [chunk.chunk_period_s for chunk in params] == pytest.approx(
        [FIRST / expected, *[LATER / expected] * 2]
    )
    first, second, third = (chunk.deadline_s for chunk in params)
    assert first == pytest.approx(FIRST / expected)
    # Each chunk is requested immediately after the previous one, because the fake engine takes no
    # time. Unplayed time therefore adds up.
    assert second == pytest.approx((FIRST + LATER) / expected, abs=0.3)
    assert third == pytest.approx((FIRST + 2 * LATER) / expected, abs=0.3)


def test_deadlines_are_sent_only_to_an_engine_that_uses_them() -> None:
    params = sent(StreamInfo(height=32, width=48), 12.0)
    assert [(chunk.deadline_s, chunk.chunk_period_s) for chunk in params] == [(None, None)] * 3


def test_the_ids_of_sessions_contain_the_name_of_the_server() -> None:
    """A session id contains the name of its server, so a reverse proxy can route requests by id.
    Such an id is still valid and unguessable.
    """
    plain, named = new_session_id(), new_session_id("rack-7")
    assert len(plain) == 22 and "." not in plain
    assert named.startswith("rack-7.") and len(named) == len("rack-7.") + 22
    assert msgspec.convert(named, SessionId) == named


def test_a_cancelled_branch_leaves_no_copy_in_the_engine() -> None:
    """A client disconnects while its session is being copied. The engine finishes the copy, which
    belongs to no session, so the copy is closed.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        await ended(session.submit(job(FIRST, "first", image=True)))
        engine.close_delay_s = 0.05
        branching = asyncio.create_task(manager.branch(session, ("me", "copy")))
        await until(lambda: engine.calls[-1].params.op == "fork")
        copy = engine.calls[-1].params.fork_to
        branching.cancel()
        await asyncio.wait([branching])
        assert branching.cancelled() and manager.find(("me", "copy")) is None
        await until(lambda: copy in engine.worlds)
        await manager.wait_for_closed_sessions()
        assert list(engine.worlds) == [session.engine_id]
        assert await ended(session.submit(job(LATER, "second"))) is None

    scenario(test)


def test_a_failed_branch_is_closed_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """If copying a session fails, the copy is closed, because some ranks may have created it."""

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        await ended(session.submit(job(FIRST, "first", image=True)))
        copies: list[str] = []

        async def fork_session(session_id: str, fork_to: str) -> None:
            copies.append(fork_to)
            raise EndpointError("oom", "out of memory")

        monkeypatch.setattr(manager.engine, "fork_session", fork_session)
        with pytest.raises(EndpointError, match="out of memory"):
            await manager.branch(session, ("me", "copy"))
        await manager.wait_for_closed_sessions()
        closed = [call.params.session_id for call in engine.calls if call.params.op == "close"]
        assert closed == copies and manager.find(("me", "copy")) is None

    scenario(test)


def test_a_request_for_a_session_that_is_being_copied_waits() -> None:
    """A request under the id of a copy that is not complete starts after the copy, with its
    state."""

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        await ended(session.submit(job(FIRST, "first", image=True)))
        engine.close_delay_s = 0.05
        branching = asyncio.create_task(manager.branch(session, ("me", "copy")))
        await until(lambda: engine.calls[-1].params.op == "fork")
        copy = manager.find(("me", "copy"))
        assert copy is not None
        run = copy.submit(job(LATER, "early"))
        assert await branching is copy and await ended(run) is None
        assert payloads(run) == [b"1"]

    scenario(test)
