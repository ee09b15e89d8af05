# SPDX-License-Identifier: Apache-2.0
"""Work that runs between two chunks of a session, tested without a second server."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from helpers.fake_engine import FIRST, LATER, FakeEngine
from helpers.waits import pause_task, until
from test_session import ended, job, scenario

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.sessions.pause import Destination, SessionPause
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager


def test_no_chunk_runs_during_a_pause_and_the_request_goes_on() -> None:
    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        engine.delay_s = 0.02
        run = session.submit(job(FIRST + 3 * LATER, "r", image=True))
        await until(lambda: len(engine.chunks) > 0)

        async def work(pause: SessionPause) -> None:
            num_chunks = len(engine.chunks)
            assert engine.running == 0
            await pause_task(0.1)
            assert (engine.running, len(engine.chunks)) == (0, num_chunks)

        await session.pause(work)
        assert await ended(run) is None
        assert run.completed == 4
        await session.reset()

    scenario(test)


def test_a_second_pause_is_refused_and_a_failed_one_changes_nothing() -> None:
    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        assert await ended(session.submit(job(FIRST, "r", image=True))) is None

        async def fail(pause: SessionPause) -> None:
            with pytest.raises(EndpointError, match="session_busy"):
                session.pause(fail)
            raise EndpointError("move_failed", "no")

        with pytest.raises(EndpointError, match="move_failed"):
            await session.pause(fail)
        assert await ended(session.submit(job(LATER, "next"))) is None
        await session.reset()

    scenario(test)


def test_every_request_of_a_session_that_has_left_ends_with_moved() -> None:
    """After a session has left the server, its running request, its waiting request and all later
    requests end with `moved`. The server still recognises the session id.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        engine.delay_s = 0.02
        runs = [session.submit(job(FIRST + 3 * LATER, "r", image=True))]
        runs.append(session.submit(job(LATER, "next")))
        await until(lambda: len(engine.chunks) > 0)
        destination = Destination("b", None, 1)

        async def leave(pause: SessionPause) -> Destination:
            session.leave(destination)
            return destination

        assert await session.pause(leave) is destination
        errors = [await ended(run) for run in runs]
        assert [error and error.code for error in errors] == ["moved", "moved"]
        assert manager.find(session.key) is None
        with pytest.raises(EndpointError, match="moved") as refused:
            manager.open(session.key)
        assert refused.value.details["server"] == "b"
        await manager.wait_for_closed_sessions()
        assert engine.worlds == {}

    scenario(test)


def test_a_disconnect_during_a_pause_waits_for_its_end() -> None:
    """If the client disconnects during a pause, `is_cancelled` reports this to the work that runs
    in the pause, and the work runs to completion. The session then ends as after any other
    disconnect.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        engine.delay_s = 0.02
        run = session.submit(job(FIRST + 3 * LATER, "r", image=True))
        await until(lambda: len(engine.chunks) > 0)
        seen: list[bool] = []
        started = asyncio.Event()

        async def work(pause: SessionPause) -> None:
            started.set()
            await until(lambda: pause.is_cancelled)
            seen.append(session.started)

        waiting = session.pause(work)
        await started.wait()
        await session.reset()
        await waiting
        assert seen == [True]
        error = await ended(run)
        assert error is not None
        assert error.code == "cancelled"
        assert manager.find(session.key) is None

    scenario(test)


def test_a_pause_does_not_wait_for_a_reader_to_begin() -> None:
    """A run that waits for its reader is paused immediately, and afterwards waits for the reader
    again.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        request = job(FIRST + 9 * LATER, "r", image=True)
        request = replace(request, replies=replace(request.replies, unsent_chunks=2))
        run = session.submit(request)
        await until(lambda: len(run.replies) == 3)
        seen: list[int] = []

        async def work(pause: SessionPause) -> None:
            seen.append(len(engine.chunks))

        await asyncio.wait_for(session.pause(work), 5)
        await pause_task(0.05)
        assert seen[0] <= len(engine.chunks) < 10
        await session.reset()

    scenario(test)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_pause_waits_until_a_client_has_every_finished_chunk(leaves: bool) -> None:
    """A pause waits until the client has received every finished chunk, even those of a completed
    request, because the session may move away and return, and its return discards its old replies.
    A pause does not wait for a client that has disconnected.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        run = session.submit(job(FIRST, "r", image=True))
        may_read = asyncio.Event()

        async def deliver(payload: Any) -> None:
            await may_read.wait()

        window = manager.delivery_window(None)
        following = asyncio.ensure_future(run.follow(deliver, "client", window))
        await until(lambda: run.finished)

        async def work(pause: SessionPause) -> None:
            await pause.wait_until_delivered()

        waiting = session.pause(work)
        await pause_task(0.05)
        assert not waiting.done()
        if leaves:
            following.cancel()
        else:
            may_read.set()
            assert await following
        await asyncio.wait_for(waiting, 5)
        await session.reset()

    scenario(test)


def test_a_stream_that_waits_for_a_pause_moves_on_with_its_newest_controls() -> None:
    """A stream whose request waits for the end of a pause moves with its newest controls, because
    its client may steer it before the request starts.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        assert await ended(session.submit(job(FIRST, "r", image=True))) is None
        session.stream_state = lambda: b"arrived"
        controls = [b"arrived"]
        started, waiting = asyncio.Event(), job(LATER, "stream")
        waiting.source.state = lambda: controls[-1]  # type: ignore[method-assign]

        async def leave(pause: SessionPause) -> Destination:
            started.set()
            await until(lambda: len(controls) == 2)
            assert pause.stream_state() is None
            assert session.stream_state() == b"steered"
            session.leave(Destination("b", None, 1))
            return Destination("b", None, 1)

        moved = session.pause(leave)
        await started.wait()
        run = session.submit(waiting)
        controls.append(b"steered")
        await moved
        error = await ended(run)
        assert error is not None
        assert error.code == "moved"

    scenario(test)
