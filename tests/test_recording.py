# SPDX-License-Identifier: Apache-2.0
"""Tests of recordings: writing, reading, damaged files, and cancelled chunks."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni.actions import ActionFrame
from vllm_omni.inputs import DiffusionParams
from vllm_omni.session_files.recording import (
    MAGIC,
    ChunkOutcome,
    RecordedChunk,
    RecordingHeader,
    committed_chunks,
    digest_of,
    read_recording,
    write_chunk,
    write_header,
)

HEADER = RecordingHeader(
    package_version="0.1",
    family="null_world",
    model="my_world",
    additional_config={"omni": {"height": 32}},
    dtype="float32",
    enforce_eager=True,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
)


def chunk(index: int | None, prompt: str = "a") -> RecordedChunk:
    outcome = None if index is None else ChunkOutcome(chunk_index=index, digest="d", num_frames=9)
    arrays = {"poses": np.eye(4, dtype=np.float32)[None]}
    return RecordedChunk(DiffusionParams(session_id="s", prompt=prompt, seed=7), arrays, outcome)


def recording(tmp_path: Path, *chunks: RecordedChunk) -> Path:
    buffer = io.BytesIO()
    write_header(buffer, HEADER)
    for one in chunks:
        write_chunk(buffer, one)
    path = tmp_path / "a.recording"
    path.write_bytes(buffer.getvalue())
    return path


def test_typed_actions_are_read_as_they_were_sent(tmp_path: Path) -> None:
    """Typed actions are read exactly as they were sent. Axis values keep every bit, so a replay
    generates the same frames.
    """
    actions = [
        ["w"],
        ActionFrame(("jump",), {"dx": 0.1 + 0.2, "dy": -1e-9}, -1.0),
        ActionFrame(axes={"dx": 1e6}),
    ]
    sent = RecordedChunk(DiffusionParams(session_id="s", actions=actions), {}, None)
    _, (got,), _ = read_recording(recording(tmp_path, sent))
    assert got.params == sent.params
    assert got.params.actions == actions


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Reading a recording returns the same header, parameters, arrays and outcomes that were
    written.
    """
    header, chunks, whole = read_recording(recording(tmp_path, chunk(0), chunk(None), chunk(1)))
    assert header == HEADER
    assert whole
    assert [one.outcome and one.outcome.chunk_index for one in chunks] == [0, None, 1]
    assert chunks[0].params == chunk(0).params
    assert np.array_equal(chunks[0].arrays["poses"], chunk(0).arrays["poses"])


def test_a_recording_that_ends_within_a_record_is_good_up_to_there(tmp_path: Path) -> None:
    """If a recording ends with an incomplete record, as when its server was killed, it can be read
    up to that record.
    """
    path = recording(tmp_path, chunk(0), chunk(1))
    path.write_bytes(path.read_bytes()[:-5])
    _, chunks, whole = read_recording(path)
    assert (len(chunks), whole) == (1, False)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04K\x01.", MAGIC, MAGIC + b"\xff" * 7, MAGIC + bytes(16)]
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """A file that is not a recording is rejected with a one-line error. The test files are an empty
    file, a pickle, noise, and a file without a header.
    """
    path = tmp_path / "a.recording"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="recording"):
        read_recording(path)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([0, 1, 2], [(0, "0"), (1, "1"), (2, "2")]),
        # Chunk 1 was cancelled before it finished, and was generated again.
        ([0, None, 1], [(0, "0"), (1, "2")]),
        # Chunk 1 was cancelled too late, so it is part of the session.
        ([0, None, 2], [(0, "0"), (1, "1"), (2, "2")]),
        ([None, 1], [(0, "0"), (1, "1")]),
        ([0, None], [(0, "0")]),
        # The session contains the second of two attempts at chunk 1.
        ([0, None, None, 2], [(0, "0"), (1, "2"), (2, "3")]),
        ([], []),
    ],
)
def test_which_requests_made_the_session(outcomes: list[int | None], expected: list[Any]) -> None:
    """The indices of the finished chunks show whether a cancelled chunk became part of the
    session.
    """
    chunks = [chunk(index, str(number)) for number, index in enumerate(outcomes)]
    assert [(index, one.params.prompt) for index, one in committed_chunks(chunks)] == expected


@pytest.mark.parametrize("outcomes", [[0, 2], [1, 2], [0, 1, 5]])
def test_a_gap_is_named(outcomes: list[int]) -> None:
    """An incompletely recorded session cannot be replayed, and the error names the gap."""
    with pytest.raises(ValueError, match=r"missing|starts at"):
        list(committed_chunks([chunk(index) for index in outcomes]))


def test_a_digest_sees_every_byte_and_the_shape() -> None:
    """A digest depends on every byte and on the shape, even for arrays that are not contiguous."""
    frames = np.zeros((2, 4, 6, 3), np.uint8)
    other = frames.copy()
    other[1, 3, 5, 2] = 1
    assert len({digest_of(frames), digest_of(other), digest_of(frames.reshape(2, 6, 4, 3))}) == 3
    assert digest_of(np.repeat(frames, 2, axis=0)[::2]) == digest_of(frames)
