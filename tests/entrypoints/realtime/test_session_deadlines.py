# SPDX-License-Identifier: Apache-2.0
"""What the doors' sessions tell an engine that schedules by deadline."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.fake_engine import FIRST, LATER, FakeEngine
from test_session import ended, job

from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.inputs import DiffusionParams


def sent(info: StreamInfo, fps: float | None) -> list[DiffusionParams]:
    """The params of three chunks that one request asks for."""

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
def test_chunks_are_due_one_playing_time_apart(
    target_fps: float | None, fps: float | None, expected: float
) -> None:
    info = StreamInfo(height=32, width=48, by_deadline=True, target_fps=target_fps)
    params = sent(info, fps)
    assert [chunk.chunk_period_s for chunk in params] == pytest.approx(
        [FIRST / expected, *[LATER / expected] * 2]
    )
    first, second, third = (chunk.deadline_s for chunk in params)
    assert first == pytest.approx(FIRST / expected)
    # Asked for at once after the one before: the fake engine takes no time, so what is not yet
    # played adds up.
    assert second == pytest.approx((FIRST + LATER) / expected, abs=0.3)
    assert third == pytest.approx((FIRST + 2 * LATER) / expected, abs=0.3)


def test_an_engine_that_does_not_go_by_deadlines_is_notified_none() -> None:
    params = sent(StreamInfo(height=32, width=48), 12.0)
    assert [(chunk.deadline_s, chunk.chunk_period_s) for chunk in params] == [(None, None)] * 3
