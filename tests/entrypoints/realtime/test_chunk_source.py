# SPDX-License-Identifier: Apache-2.0
"""`PlannedChunks` divides a plan into chunks. A live request without a length runs until it is
cancelled.
"""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, camera

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.chunk_source import (
    ChunkControls,
    ChunkSource,
    ChunkSpan,
    LiveChunks,
    PlannedChunks,
)
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.controls.camera import CameraPath
from vllm_omni.entrypoints.realtime.sessions.run import ReplyOptions, SessionJob, SessionRun

INFO = StreamInfo()
LIMITS = EndpointLimits()


class Live(LiveChunks):
    def sample(self, span: ChunkSpan) -> ChunkControls:
        return ChunkControls()


def path(num_poses: int) -> CameraPath:
    return CameraPath.parse(*camera(num_poses).values(), max_poses=1000, size=(832, 480))


def run_of(
    source: ChunkSource, *, starts_session: bool = True, first_chunk: int = 0, completed: int = 0
) -> SessionRun:
    run = SessionRun(
        SessionJob(request_id="r", source=source, replies=ReplyOptions(render=lambda chunk: []))
    )
    run.sizes = source.plan(INFO, LIMITS, starts_session=starts_session)
    run.first_chunk, run.completed = first_chunk, completed
    return run


def test_the_chunks_of_a_camera_path_are_the_path() -> None:
    camera_path = path(FIRST + 2 * LATER)
    source = PlannedChunks(camera=camera_path, prompt="dusk")
    run = run_of(source)
    assert (run.sizes, run.num_chunks) == ((FIRST, LATER, LATER), 3)
    chunks = [source.sample(span) for span in islice(run.spans(INFO), 3)]
    assert [chunk.prompt for chunk in chunks] == ["dusk", None, None]
    for name in ("poses_N44", "intrinsics_N4"):
        joined = np.concatenate([getattr(chunk.camera, name) for chunk in chunks])
        np.testing.assert_array_equal(joined, getattr(camera_path, name))


def test_a_path_that_ends_within_a_chunk_holds_its_last_pose() -> None:
    camera_path = path(FIRST + 1)
    source = PlannedChunks(camera=camera_path, policy="hold_last")
    *_, last = islice(run_of(source).spans(INFO), 2)
    held = source.sample(last).camera
    assert held is not None and len(held) == LATER
    assert (held.poses_N44 == camera_path.poses_N44[-1]).all()


@pytest.mark.parametrize(
    ("num_actions", "num_frames", "starts_session", "message"),
    [
        (
            0,
            None,
            True,
            "actions has 0 entries; a session's first request takes 3 + 3k entries, one per latent "
            "frame (9 + 12k frames)",
        ),
        (
            4,
            None,
            False,
            "actions has 4 entries; a later request takes 3k entries, one per latent frame (12k "
            "frames)",
        ),
        (
            3,
            21,
            True,
            "num_frames is 21 but actions has 3 entries, for 9 frames; send one entry per latent "
            "frame",
        ),
    ],
)
def test_a_wrong_number_of_actions_is_refused_with_the_right_number(
    num_actions: int, num_frames: int | None, starts_session: bool, message: str
) -> None:
    """An error about the number of actions counts latent frames and does not mention poses."""
    source = PlannedChunks(actions=[[]] * num_actions, num_frames=num_frames)
    with pytest.raises(EndpointError) as refused:
        source.plan(INFO, LIMITS, starts_session=starts_session)
    error = refused.value
    assert (error.code, error.param, error.message) == ("invalid_action", "actions", message)


def test_a_request_that_was_cut_continues_in_the_middle_of_its_script() -> None:
    """An interrupted request continues in the middle of its script. Keys are given per latent
    frame, and no key is held in latent frames after the end of the script.
    """
    script = [[key] for key in "wasdwas"]
    source = PlannedChunks(
        actions=script, num_frames=FIRST + 2 * LATER, policy="hold_last", prompt="dusk"
    )
    spans = list(islice(run_of(source, first_chunk=4, completed=1).spans(INFO), 2))
    assert [
        (span.chunk_index, span.number, span.first_latent, span.first_frame) for span in spans
    ] == [
        (5, 1, 3, FIRST),
        (6, 2, 6, FIRST + LATER),
    ]
    assert [source.sample(span) for span in spans] == [
        ChunkControls(actions=[["d"], ["w"], ["a"]]),
        ChunkControls(actions=[["s"], [], []]),
    ]


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ({"camera": FIRST + 1}, "invalid_camera"),
        ({"actions": []}, "invalid_action"),
        ({"actions": [["w"]] * 3 * 1000}, "invalid_request"),
    ],
)
def test_a_plan_of_incomplete_or_too_many_chunks_is_refused(
    plan: dict[str, Any], code: str
) -> None:
    fields = {**plan, "camera": path(plan["camera"])} if "camera" in plan else plan
    with pytest.raises(EndpointError) as refused:
        PlannedChunks(**fields).plan(INFO, LIMITS, starts_session=True)
    assert refused.value.code == code


def test_a_live_request_continues_until_it_is_cancelled() -> None:
    run = run_of(Live())
    assert (run.sizes, run.num_chunks) == ((), None)
    spans = list(islice(run.spans(INFO), 100))
    assert [span.num_frames for span in spans] == [FIRST] + [LATER] * 99
    assert [span.chunk_index for span in spans] == list(range(100))


def test_a_live_request_of_a_started_session_has_later_chunks() -> None:
    assert next(run_of(Live(), starts_session=False, first_chunk=3).spans(INFO)).num_frames == LATER


def test_a_live_request_samples_controls_as_late_as_the_engine_allows() -> None:
    planned, live = PlannedChunks(), Live()
    assert live.most_in_flight(INFO, LIMITS) == 1 < planned.most_in_flight(INFO, LIMITS)
    several = StreamInfo(chunks_in_flight=3)
    assert (live.most_in_flight(several, LIMITS), planned.most_in_flight(several, LIMITS)) == (3, 4)


def test_the_first_latent_frame_may_be_as_long_as_the_others() -> None:
    """Three actions produce three latent frames of four pixel frames each, even in the first
    chunk.
    """
    info = StreamInfo(latent_frames_per_chunk=1, first_stride=4)
    script = PlannedChunks(actions=[["w"], [], ["w"]])
    assert (
        script.plan(info, LIMITS, starts_session=True)
        == script.plan(info, LIMITS, starts_session=False)
        == (4, 4, 4)
    )
