# SPDX-License-Identifier: Apache-2.0
"""`SessionRecorder` records every chunk in order, including cancelled chunks. A branch's recording
contains its parent's chunks.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, FakeEngine
from helpers.waits import until

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.sessions.recorder import SessionRecorder
from vllm_omni.inputs import DiffusionParams, UsedLora
from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.recording import (
    RecordingHeader,
    committed_chunks,
    digest_of,
    read_recording,
)

HEADER = RecordingHeader(
    package_version="0.1",
    family="null_world",
    model="my_world",
    additional_config={},
    dtype="float32",
    enforce_eager=False,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
)


async def chunk(
    world: SessionEngine, index: int, session_id: str = "s", **fields: Any
) -> np.ndarray:
    first = {"prompt": "a", "seed": 1, "height": 32, "width": 48} if index == 0 else {}
    params = DiffusionParams(session_id=session_id, chunk_index=index, **{**first, **fields})
    return (
        await world.generate(params, {"poses": np.full((1, 4, 4), index, np.float32)})
    ).frames_THWC


def recorded(folder: Path, session_id: str) -> list[tuple[int, int, str | None]]:
    """Return `(index, first pose value, digest)` for each chunk in a session's recording."""
    (path,) = folder.glob(f"*_{session_id}.recording")
    header, chunks, whole = read_recording(path)
    assert (header, whole) == (HEADER, True)
    assert path.stat().st_mode & 0o777 == 0o600
    return [
        (i, int(c.arrays["poses"][0, 0, 0]), c.outcome and c.outcome.digest)
        for i, c in committed_chunks(chunks)
    ]


def test_a_session_is_recorded_chunk_by_chunk_and_a_branch_with_its_past(tmp_path: Path) -> None:
    """A cancelled chunk that is requested again is recorded once, and a refused chunk is not
    recorded.
    """
    engine, recorder = FakeEngine(), SessionRecorder(tmp_path / "new", HEADER)
    world = SessionEngine(engine, recorder=recorder)  # type: ignore[arg-type]

    def refuse_prompt(params: DiffusionParams) -> None:
        if params.prompt == "refused":
            raise RequestFailed("invalid_request", "no")

    engine.fail = refuse_prompt

    async def scenario() -> list[np.ndarray]:
        frames = [await chunk(world, 0), await chunk(world, 1)]
        with pytest.raises(EndpointError):
            await chunk(world, 2, prompt="refused")
        engine.delay_s = 10.0
        cancelled = asyncio.create_task(chunk(world, 2))
        await until(lambda: engine.running)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        engine.delay_s = 0.0
        frames.append(await chunk(world, 2))
        await world.fork_session("s", "branch")
        frames.append(await chunk(world, 3, "branch"))
        await world.close_session("s")
        return frames

    frames = asyncio.run(scenario())
    recorder.flush()
    digests = [digest_of(one) for one in frames]
    assert [len(one) for one in frames] == [FIRST, LATER, LATER, LATER]
    assert recorded(tmp_path / "new", "s") == [(i, i, digests[i]) for i in range(3)]
    assert recorded(tmp_path / "new", "branch") == [(i, i, digests[i]) for i in range(4)]


def test_a_session_that_started_elsewhere_is_not_recorded(tmp_path: Path) -> None:
    """A session that started on another server is not recorded, because a recording without the
    first chunk cannot be replayed.
    """
    engine, recorder = FakeEngine(), SessionRecorder(tmp_path, HEADER)

    async def scenario() -> None:
        await chunk(SessionEngine(engine), 0)  # type: ignore[arg-type]
        await chunk(SessionEngine(engine, recorder=recorder), 1)  # type: ignore[arg-type]

    asyncio.run(scenario())
    recorder.flush()
    assert list(tmp_path.iterdir()) == []


def test_adapters_of_a_chunk_are_recorded_with_their_digests(tmp_path: Path) -> None:
    recorder, used = (
        SessionRecorder(tmp_path, HEADER),
        UsedLora(name="ink", scale=0.5, digest="0" * 32),
    )
    params, frames = (
        DiffusionParams(session_id="s", chunk_index=0),
        np.zeros((1, 2, 2, 3), np.uint8),
    )
    asyncio.run(
        recorder.finished(
            params, {}, {"chunk_index": 0, "lora": [msgspec.to_builtins(used)]}, frames
        )
    )
    recorder.flush()
    (path,) = tmp_path.iterdir()
    (one,) = read_recording(path)[1]
    assert one.outcome is not None and one.outcome.lora == [used]


def test_a_missing_folder_stops_no_session(tmp_path: Path) -> None:
    """If the folder is missing, the recording is lost and the loss is logged, but the chunk is
    delivered.
    """
    engine, recorder = FakeEngine(), SessionRecorder(tmp_path / "gone", HEADER)
    (tmp_path / "gone").rmdir()
    frames = asyncio.run(chunk(SessionEngine(engine, recorder=recorder), 0))  # type: ignore[arg-type]
    recorder.flush()
    assert len(frames) == FIRST
