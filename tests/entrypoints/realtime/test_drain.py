# SPDX-License-Identifier: Apache-2.0
"""Draining without a server: which work is finished or refused, and when each session is saved."""

import asyncio
from typing import Any

import pytest
from helpers.fake_engine import FIRST, LATER, FakeEngine
from helpers.waits import pause_task, until
from test_session import ended, job, payloads, scenario

from vllm_omni.entrypoints.errors import EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.chunk_source import ChunkControls, ChunkSpan, LiveChunks
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager


class Keeper:
    """Records the chunk index at which each session is saved."""

    def __init__(self, manager: SessionManager, fails: bool = False) -> None:
        self.saved: list[tuple[str, int]] = []
        self._fails = fails
        manager.drain.save_to = self.save

    async def save(self, session: Session) -> None:
        await pause_task(0.01)
        if self._fails:
            raise EndpointError("engine_error", "no room on the disk")
        self.saved.append((session.session_id, session.next_chunk))


class Source(LiveChunks):
    """Controls of a live run. A paused run waits for its client indefinitely."""

    def __init__(self, paused: bool = False) -> None:
        self.paused = paused

    @property
    def ready(self) -> bool:
        return not self.paused

    async def wait_until_ready(self) -> None:
        if self.paused:
            await asyncio.Event().wait()

    def sample(self, span: ChunkSpan) -> ChunkControls:
        return ChunkControls(
            actions=[[]] * span.num_latents, prompt="a" if span.chunk_index == 0 else None
        )


def live(request_id: str, source: Source) -> Any:
    return job(FIRST, request_id, image=True, source=source)


def test_chunks_in_flight_are_finished_and_no_other_is_started() -> None:
    """When a drain starts during a request for ten chunks, the chunks in flight are delivered. The
    request then ends with `draining` and the index of its next chunk.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        keeper = Keeper(manager)
        engine.delay_s = 0.05
        run = session.submit(job(FIRST + 9 * LATER, "r", image=True))
        # Wait until every submitted chunk is running.
        await until(lambda: run.completed >= 2 and engine.running == 2)
        started = len(engine.chunks)
        await manager.drain.drain_sessions(manager)
        error = await ended(run)
        assert error is not None
        assert (error.code, error.close, error.details["next_chunk_index"]) == (
            "draining",
            WebSocketCloseCode.CAPACITY,
            started,
        )
        assert error.retryable
        assert payloads(run) == [str(index).encode() for index in range(started)]
        assert (len(engine.chunks), engine.aborted) == (started, [])
        assert keeper.saved == [("s", started)]
        assert session.in_step

    scenario(test)


def test_a_request_that_is_complete_with_its_last_chunk_is_not_an_error() -> None:
    """A request whose last chunk is in flight when the drain starts ends without an error. Only an
    interrupted request ends with `draining`.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        engine.delay_s = 0.05
        run = session.submit(job(FIRST, "r", image=True))
        await until(lambda: engine.running == 1)
        await manager.drain.drain_sessions(manager)
        assert await ended(run) is None
        assert payloads(run) == [b"0"]

    scenario(test)


@pytest.mark.parametrize("paused", [False, True])
def test_a_live_stream_is_saved_before_its_client_gets_the_error(
    paused: bool,
) -> None:
    """A live stream is saved before its client gets the error, because its session is freed when
    the connection closes. A paused stream does not block the drain.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        keeper = Keeper(manager)
        engine.delay_s = 0.02
        source = Source()
        run = session.submit(live("r", source))
        delivered: list[bytes] = []

        async def deliver(payload: bytes) -> None:
            delivered.append(payload)

        following = asyncio.create_task(
            run.follow(deliver, object(), manager.delivery_window(None))
        )
        await until(lambda: run.completed == 2)
        source.paused = paused
        await until(lambda: not paused or engine.running == 0)
        await manager.drain.drain_sessions(manager)
        with pytest.raises(EndpointError, match="stopping"):
            await following
        assert delivered == payloads(run)
        assert keeper.saved == [("s", run.completed)]

    scenario(test)


def test_draining_waits_until_the_last_error_is_sent() -> None:
    """Draining waits until the last error has been sent, because otherwise the server's exit could
    close the socket first, with a different code.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        engine.delay_s = 0.02
        run = session.submit(job(FIRST + 9 * LATER, "r", image=True))
        reported: list[str] = []

        async def deliver(payload: bytes) -> None:
            pass

        async def response() -> None:
            try:
                await run.follow(deliver, object(), manager.delivery_window(None))
            except EndpointError as error:
                await pause_task(0.2)  # the message, followed by the close frame
                reported.append(error.code)

        manager.spawn(response())
        await until(lambda: run.completed == 1)
        await manager.drain.drain_sessions(manager)
        assert reported == ["draining"]

    scenario(test)


def test_an_idle_session_is_saved_once_and_an_empty_one_not() -> None:
    """Of two idle sessions, only the one that exists in the engine is saved, and it is saved only
    once.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        keeper = Keeper(manager)
        assert await ended(session.submit(job(FIRST, "r", image=True))) is None
        manager.open(("me", "empty"))
        await manager.drain.drain_sessions(manager)
        await manager.drain.drain_sessions(manager)
        assert keeper.saved == [("s", 1)]

    scenario(test)


def test_nothing_new_starts() -> None:
    """While the server drains, new sessions, new requests and waiting requests are refused. A
    `restart` does not discard the session.
    """

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        keeper = Keeper(manager)
        engine.delay_s = 0.05
        running = session.submit(job(FIRST, "r", image=True))
        waiting = session.submit(job(FIRST, "again", image=True, restart=True))
        await until(lambda: engine.running == 1)
        draining = asyncio.create_task(manager.drain.drain_sessions(manager))
        await asyncio.sleep(0)
        for refused in (
            lambda: manager.open(("me", "new")),
            lambda: session.submit(job(LATER, "late")),
        ):
            with pytest.raises(EndpointError) as failure:
                refused()
            assert failure.value.code == "draining"
        await draining
        assert await ended(running) is None
        error = await ended(waiting)
        assert error is not None
        assert error.code == "draining"
        assert keeper.saved == [("s", 1)]
        assert manager.open(("me", "s")) is session  # existing sessions stay available
        assert len(engine.worlds) == 1

    scenario(test)


def test_a_failed_save_does_not_stop_the_drain() -> None:
    """If saving a session fails, the failure is logged and the drain continues."""

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        keeper = Keeper(manager, fails=True)
        assert await ended(session.submit(job(FIRST, "r", image=True))) is None
        await manager.drain.drain_sessions(manager)
        assert keeper.saved == []

    scenario(test)
