# SPDX-License-Identifier: Apache-2.0
"""`ControlTrack` provides the actions, prompt and adapters for the next chunk, and reports the
outcome of each event.
"""

import math
import sys

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.actions import ActionFrame, ActionSpace, Axis, Button
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.controls.analog_track import MAX_WAITING
from vllm_omni.entrypoints.realtime.controls.camera import CameraPath
from vllm_omni.entrypoints.realtime.controls.control_track import (
    MAX_SCRIPT_ENTRIES,
    AdapterChange,
    ControlScript,
    ControlStates,
    ControlTrack,
    ControlTransition,
    Held,
    PromptChange,
    TooManyEvents,
)
from vllm_omni.entrypoints.realtime.controls.pose_track import (
    CameraCommand,
    PoseTrack,
    unit_quaternion,
)
from vllm_omni.entrypoints.realtime.controls.stream_state import decode_state, encode_state
from vllm_omni.inputs import Lora
from vllm_omni.worlds.movement import pitch_of

W, A, D, NONE = ("w",), ("a",), ("d",), ()


def script(*entries: Held) -> ControlScript:
    return ControlScript(tuple(map(ActionFrame, entries)))


def states(*transitions: Held) -> ControlStates:
    return ControlStates(tuple(map(ControlTransition, transitions)))


def test_a_session_without_key_events_has_no_actions() -> None:
    """A chunk of a session without key events has no actions, not even idle ones."""
    sample = ControlTrack().sample(3)
    assert (sample.actions, sample.prompt, sample.event_id) == (None, None, None)


def test_a_script_is_consumed_in_order_and_then_idle() -> None:
    """The first three of a script's four entries take effect in the first chunk. The fourth takes
    effect in the second chunk, which is padded with idle entries.
    """
    track = ControlTrack()
    track.apply([script(W, D, A, W)], 4)
    first, second, third = track.sample(3), track.sample(3), track.sample(3)
    assert first.actions == [["w"], ["d"], ["a"]]
    assert second.actions == [["w"], [], []]
    assert third.actions == [[], [], []]
    assert [sample.event_id for sample in (first, second, third)] == [4, 4, None]
    assert [sample.applied for sample in (first, second)] == [(4,), ()]


def test_states_and_scripts_replace_one_another() -> None:
    """The most recent event, whether it is a state or a script, determines the actions."""
    track = ControlTrack()
    track.apply([script(W, W, W, W, W, W)])
    track.apply([states(D)])
    assert track.sample(2).actions == [["d"], ["d"]]
    track.apply([script(A)])
    assert track.sample(2).actions == [["a"], []]
    assert track.sample(2).actions == [[], []]


def test_a_held_key_acts_until_it_is_released() -> None:
    """A held key acts until it is released, and its event id is reported for as long as it acts."""
    track = ControlTrack()
    track.apply([states(W)], 9)
    assert [track.sample(2).actions for _ in range(3)] == [[["w"], ["w"]]] * 3
    assert track.sample(2).event_id == 9
    track.apply([states(NONE)], 10)
    sample = track.sample(2)
    assert (sample.actions, sample.event_id) == ([[], []], 10)


@pytest.mark.parametrize(
    ("transitions", "expected"),
    [
        ((W, NONE), [["w"], [], []]),
        ((W, NONE, D, NONE), [["d"], [], []]),
        ((W, D), [["d"], ["d"], ["d"]]),
        ((W, NONE, D), [["d"], ["d"], ["d"]]),
        ((NONE,), [[], [], []]),
        (tuple([W, NONE] * 500), [["w"], [], []]),
    ],
)
def test_a_pulse_between_two_chunks_acts_for_one_entry(
    transitions: tuple[Held, ...], expected: list[list[str]]
) -> None:
    """If no key is held when a chunk starts, the last key that was pressed and released since the
    previous chunk acts for one entry. If a key is held, only the newest state has an effect.
    """
    track = ControlTrack()
    for keys in transitions:
        track.apply([states(keys)])
    assert track.sample(3).actions == expected
    track = ControlTrack()
    track.apply([states(*transitions)])
    assert track.sample(3).actions == expected


def test_the_latest_prompt_wins_and_waits_for_the_second_chunk() -> None:
    """The first chunk always uses the prompt of `init`, so a prompt event takes effect in the
    second chunk at the earliest.
    """
    track = ControlTrack()
    assert track.apply([PromptChange("rain")], 1) == []
    assert track.apply([PromptChange("snow")], 2) == [1]
    assert track.sample(3, with_prompt=False).prompt is None
    sample = track.sample(3)
    assert (sample.prompt, sample.event_id, sample.applied) == ("snow", 2, (2,))
    assert track.sample(3).prompt is None


def test_the_latest_adapters_win_and_may_act_from_the_first_chunk_on() -> None:
    """A new adapter event supersedes the pending one and may take effect in the first chunk."""
    track = ControlTrack()
    ink, wool = (Lora(name="ink"),), (Lora(name="wool"),)
    assert track.apply([AdapterChange(ink)], 1) == []
    assert track.apply([AdapterChange(wool)], 2) == [1]
    sample = track.sample(3, with_prompt=False)
    assert (sample.lora, sample.event_id, sample.applied) == (wool, 2, (2,))
    assert track.sample(3).lora is None


def test_a_prompt_is_not_masked_by_an_older_key() -> None:
    """A chunk reports the id of its newest active event, and whether that event is new."""
    track = ControlTrack()
    track.apply([states(W)], 5)
    assert (track.sample(3).event_id, track.sample(3).is_new) == (5, False)
    track.apply([PromptChange("rain")], 6)
    sample = track.sample(3)
    assert (sample.event_id, sample.is_new, sample.applied) == (6, True, (6,))
    sample = track.sample(3)
    assert (sample.event_id, sample.is_new, sample.applied) == (5, False, ())


def test_an_event_that_never_acts_is_superseded() -> None:
    """An event is reported as superseded only if another event replaced it before any chunk used
    it.
    """
    track = ControlTrack()
    assert track.apply([script(W)], 1) == []
    assert track.apply([states(D)], 2) == [1]
    track.sample(3)
    assert track.apply([states(NONE)], 3) == []
    assert track.apply([states(A)], 4) == []
    assert track.apply([states(W)], 5) == [3, 4]


def test_a_repeated_id_is_known_for_a_while() -> None:
    """The track recognises at least the last thousand event ids when they are repeated."""
    track = ControlTrack()
    for event_id in range(3000):
        track.apply([states(W)], event_id)
    assert track.is_repeated(2999)
    assert track.is_repeated(2000)
    assert not track.is_repeated(0)
    assert not track.is_repeated(None)


def test_memory_is_bounded() -> None:
    """Events that no chunk consumes occupy a bounded amount of memory: at most one script and two
    transitions are stored.
    """
    track = ControlTrack()
    for number in range(10_000):
        track.apply([states(W), states(NONE), PromptChange("x" * 100)], number)
    assert len(track._transitions) <= 2
    assert len(track._seen) <= 1024
    track.apply([script(*[W] * 10_000)])
    assert len(track._script) == MAX_SCRIPT_ENTRIES
    assert sys.getsizeof(track._script) < 100_000


SPACE = ActionSpace(
    buttons=(Button("w", "forward"), Button("jump", "jump")),
    axes=(
        Axis(name="steer", title="steer", unit="of full", low=-1, high=1),
        Axis(name="dx", title="turn", unit="pixels", kind="motion", low=-30, high=30, mouse="x"),
    ),
    scroll=True,
)


def state(**fields: object) -> ControlStates:
    return ControlStates((ControlTransition(**fields),))  # type: ignore[arg-type]


@pytest.fixture
def track() -> ControlTrack:
    return ControlTrack(SPACE)


def test_a_rate_is_held_until_it_changes(track: ControlTrack) -> None:
    """An event for another control leaves a held rate unchanged. A rate of zero is the rest
    position and is not sent.
    """
    track.apply([state(axes={"steer": 0.5})], 1)
    track.apply([state(buttons=("w",))], 2)
    expected = [ActionFrame(("w",), {"steer": 0.5})] * 2
    assert [track.sample(2).actions for _ in range(2)] == [expected] * 2
    track.apply([state(axes={"steer": 0.0})], 3)
    assert track.sample(2).actions == [["w"], ["w"]]


def test_motion_is_summed_up_and_spread_over_the_next_chunk(track: ControlTrack) -> None:
    """Motion since the previous chunk is summed and spread over the next chunk only. Later chunks
    have no motion, because motion is not queued.
    """
    for moved in (3.0, 9.0, -6.0):
        track.apply([state(axes={"dx": moved})])
    assert track.sample(3).actions == [ActionFrame(axes={"dx": 2.0})] * 3
    assert track.sample(3).actions == [[], [], []]


def test_motion_beyond_the_range_of_a_frame_is_dropped(track: ControlTrack) -> None:
    """Motion beyond the range of a frame is dropped, because the view would otherwise continue to
    turn after the mouse has stopped.
    """
    track.apply([state(axes={"dx": 1000.0})])
    assert track.sample(1).actions == [ActionFrame(axes={"dx": 30.0})]
    assert track.sample(1).actions == [[]]


@pytest.mark.parametrize(
    ("notches", "expected"), [((1, 1), [1, 1, 0]), ((-1,), [-1, 0, 0]), ((5,), [1, 1, 1])]
)
def test_notches_come_one_a_frame(
    track: ControlTrack, notches: tuple[float, ...], expected: list[int]
) -> None:
    """Each frame gets at most one wheel notch. If a chunk has fewer frames than pending notches,
    the excess notches are dropped.
    """
    for notch in notches:
        track.apply([state(scroll=notch)])
    sample = track.sample(3)
    assert sample.actions is not None
    assert [
        frame.scroll if isinstance(frame, ActionFrame) else 0 for frame in sample.actions
    ] == expected
    assert track.sample(3).actions == [[], [], []]


def test_a_button_pressed_between_chunks_acts_alongside_motion(track: ControlTrack) -> None:
    """A button pressed and released between chunks acts for one frame, even if the chunk also has
    motion.
    """
    track.apply(
        [
            ControlStates(
                (
                    ControlTransition(("jump",)),
                    ControlTransition(axes={"dx": 2.0}),
                    ControlTransition(()),
                )
            )
        ]
    )
    assert track.sample(2).actions == [
        ActionFrame(("jump",), {"dx": 1.0}),
        ActionFrame(axes={"dx": 1.0}),
    ]


def test_a_script_replaces_everything_and_is_taken_as_it_is(track: ControlTrack) -> None:
    """A script replaces all other controls, and every value in its frames reaches the chunk
    unchanged. A transition ends the script.
    """
    track.apply([state(axes={"steer": 1.0, "dx": 5.0}, scroll=1)], 1)
    script = ControlScript(
        (ActionFrame(axes={"dx": 7.0}), ActionFrame(("w",)), ActionFrame(scroll=-1))
    )
    assert track.apply([script], 2) == [1]
    assert track.sample(2).actions == [ActionFrame(axes={"dx": 7.0}), ["w"]]
    track.apply([state(axes={"steer": -1.0})], 3)
    assert track.sample(1).actions == [ActionFrame(axes={"steer": -1.0})]


def test_a_chunk_reports_the_events_that_act_in_it(track: ControlTrack) -> None:
    """A chunk reports the events that act in it: every motion event, and every rate event while the
    rate is held, but not a rate event that was replaced before the chunk.
    """
    assert track.apply([state(axes={"steer": 0.1})], "a") == []
    assert track.apply([state(axes={"steer": 0.2})], "b") == ["a"]
    for name in ("c", "d"):
        track.apply([state(axes={"dx": 1.0})], name)
    sample = track.sample(3)
    assert (sample.applied, sample.active, sample.event_id) == (("b", "c", "d"), ("b",), "d")
    sample = track.sample(3)
    assert (sample.applied, sample.active, sample.event_id) == ((), ("b",), "b")


def test_too_many_motion_events_are_refused_without_effect(
    track: ControlTrack,
) -> None:
    """A motion event that is rejected because too many are pending has no effect, and a button can
    still be released.
    """
    track.apply([state(buttons=("w",))])
    for number in range(MAX_WAITING):
        track.apply([state(axes={"dx": 0.001})], number)
    with pytest.raises(TooManyEvents):
        track.apply([state(axes={"dx": 1000.0})], "one more")
    assert not track.is_repeated("one more")
    track.apply([state(buttons=())])
    frame, *_ = track.sample(1).actions or []
    assert isinstance(frame, ActionFrame)
    assert frame.axes["dx"] == pytest.approx(0.001 * MAX_WAITING)


axes = st.dictionaries(st.sampled_from(["steer", "dx"]), st.floats(-1, 1), max_size=2)
transitions = st.builds(
    ControlTransition,
    st.none() | st.sampled_from([(), ("w",), ("jump",)]),
    axes,
    st.sampled_from([0.0, 1.0, -1.0]),
)
frames = st.builds(ActionFrame, st.sampled_from([(), ("w",)]), axes)
updates = (
    st.lists(transitions, max_size=4).map(lambda held: ControlStates(tuple(held)))
    | st.lists(frames, max_size=4).map(lambda entries: ControlScript(tuple(entries)))
    | st.builds(PromptChange, st.sampled_from(["rain", "snow"]))
)


@given(st.lists(st.tuples(updates, st.integers(0, 2))))
@settings(max_examples=200, deadline=None)
def test_every_event_has_at_most_one_fate(
    events: list[tuple[ControlStates | ControlScript | PromptChange, int]],
) -> None:
    """Every event is applied at most once or superseded at most once, but never both. Values stay
    in range, and a chunk has one entry per latent frame.
    """
    track, fates = ControlTrack(SPACE), []
    for event_id, (update, samples) in enumerate(events):
        fates += track.apply([update], event_id)
        for _ in range(samples):
            sample = track.sample(3)
            assert sample.actions is None or len(sample.actions) == 3
            for frame in sample.actions or ():
                values = frame.axes if isinstance(frame, ActionFrame) else {}
                assert all(-30 <= value <= 30 for value in values.values())
            fates += sample.applied
    assert len(fates) == len(set(fates))


INTRINSICS = [40.0, 40.0, 24.0, 16.0]


def command(
    event_id: str,
    mode: str = "target",
    move: tuple = (0, 0, 0),
    turn: tuple = (0, 0, 0, 1),
    chunks: int = 1,
):
    return CameraCommand(event_id, mode, np.array(move, float), unit_quaternion(turn), chunks)


def about_y(degrees: float) -> tuple[float, float, float, float]:
    half = math.radians(degrees) / 2
    return (0.0, math.sin(half), 0.0, math.cos(half))


def test_without_a_command_the_camera_rests() -> None:
    """Without a command, the camera rests: each pixel frame gets an identity pose."""
    poses_N44, progress = PoseTrack().sample(9, 3)
    np.testing.assert_array_equal(poses_N44, np.tile(np.eye(4, dtype=np.float32), (9, 1, 1)))
    assert (progress.started, progress.active, progress.completed) == ((), (), ())


def test_a_target_is_reached_evenly() -> None:
    """The camera reaches the target in the last pose of the chunk, in equal steps per pixel frame.
    The y axis is inverted.
    """
    track = PoseTrack()
    track.sample(9, 3)
    track.push(command("t", move=(0, 1.2, 2.4)))
    poses_N44, progress = track.sample(12, 3)
    np.testing.assert_allclose(poses_N44[-1, :3, 3], [0, -1.2, 2.4], atol=1e-6)
    np.testing.assert_allclose(np.diff(poses_N44[:, 2, 3]), 0.2, atol=1e-6)
    assert (progress.started, progress.active, progress.completed) == (("t",), (), ("t",))


@pytest.mark.parametrize(("limit", "reached"), [({}, 84.0), ({"pitch_limit_degrees": 40.0}, 36.0)])
def test_a_velocity_looks_up_to_the_limit_of_the_world(
    limit: dict[str, float], reached: float
) -> None:
    """A velocity turns the camera up in steps of 12 degrees until the next step would exceed the
    world's pitch limit. The model applies the same limit.
    """
    track, half = PoseTrack(walks=True, **limit), math.radians(12) / 2
    track.push(command("v", "velocity", turn=(-math.sin(half), 0, 0, math.cos(half))))
    poses_N44, _ = track.sample(48, 12)
    assert pitch_of(torch.from_numpy(poses_N44[-1])) == pytest.approx(reached, abs=1e-3)


def test_a_target_may_take_several_chunks() -> None:
    """A target command that spans several chunks stays active until the target is reached."""
    track = PoseTrack()
    track.push(command("t", turn=about_y(90), chunks=2))
    first, started = track.sample(9, 3)
    second, ended = track.sample(12, 3)
    assert (started.active, started.completed, ended.active, ended.completed) == (
        ("t",),
        (),
        (),
        ("t",),
    )
    angle = np.degrees(np.arctan2(second[-1, 0, 2], second[-1, 2, 2]))
    assert angle == pytest.approx(90, abs=1e-4)
    assert np.degrees(np.arctan2(first[-1, 0, 2], first[-1, 2, 2])) == pytest.approx(45, abs=1e-4)


def test_a_velocity_is_a_step_per_latent_frame_until_replaced() -> None:
    """A velocity of 0.05 per latent frame moves the camera by 0.15 in a chunk of three latent
    frames, until another command replaces it.
    """
    track = PoseTrack()
    track.push(command("v", "velocity", move=(0, 0, 0.05)))
    assert track.sample(9, 3)[0][-1, 2, 3] == pytest.approx(0.15)
    assert track.sample(12, 3)[0][-1, 2, 3] == pytest.approx(0.30)
    track.push(command("stop", "velocity"))
    poses_N44, progress = track.sample(12, 3)
    assert (progress.started, progress.active, progress.completed) == (("stop",), ("stop",), ("v",))
    np.testing.assert_allclose(poses_N44[:, 2, 3], 0.30, atol=1e-6)


def test_sixty_small_turns_make_a_circle() -> None:
    """After sixty turns of 6 degrees, the pose equals the identity to within 1e-3, and every pose
    passes the check that applies to client poses.
    """
    track = PoseTrack()
    track.push(command("v", "velocity", turn=about_y(6)))
    for number in range(20):
        poses_N44, _ = track.sample(9 if number == 0 else 12, 3)
        CameraPath.parse(poses_N44, INTRINSICS, max_poses=100, size=(832, 480))
    np.testing.assert_allclose(poses_N44[-1], np.eye(4), atol=1e-3)


def test_only_the_last_of_many_commands_acts() -> None:
    """Only the last of many commands acts. Earlier commands start and end in the same chunk, and
    the queue is bounded.
    """
    track = PoseTrack()
    for number in range(100):
        track.push(command(f"t{number}", move=(number, 0, 0), chunks=0))
    poses_N44, progress = track.sample(9, 3)
    assert poses_N44[-1, 0, 3] == 99
    assert len(progress.started) == 32
    assert progress.completed == progress.started


@pytest.mark.parametrize(
    "values", [(0, 0, 0, 0), (1e-9, 0, 0, 0), (math.nan, 0, 0, 1), (math.inf, 0, 0, 1)]
)
def test_a_rotation_needs_a_direction(values: tuple[float, ...]) -> None:
    """Zero, infinite and NaN quaternions are rejected."""
    with pytest.raises(ValueError, match="quaternion"):
        unit_quaternion(values)


class Controls(msgspec.Struct, tag="controls"):
    """Both control tracks of a stream: actions and poses."""

    track: ControlTrack
    poses: PoseTrack


class OtherControls(Controls, tag="other"):
    """The control tracks of a stream at another endpoint."""


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_controls_continue_exactly_from_their_bytes(num_before: int) -> None:
    """When a server restores controls from bytes, each later chunk gets the same controls, progress
    and poses as if the controls had not been restored.
    """
    here = Controls(ControlTrack(SPACE), PoseTrack())
    here.track.apply([script(W, A, NONE, D, W)], 1)
    here.poses.push(command("target", move=(0, 1.2, 2.4), chunks=3))
    for number in range(num_before):
        here.track.sample(2)
        here.poses.sample(9, 3)
        here.track.apply([state(axes={"steer": 0.5, "dx": 7.0}, scroll=2.0)], 10 + number)
        here.track.apply([states(W, NONE), PromptChange("rain")], 20 + number)
        here.track.apply([AdapterChange((Lora(name="x"),))], 30 + number)
        here.poses.push(command(f"turn-{number}", mode="velocity", move=(0.1, 0, 0.3)))
    there = decode_state(encode_state(here), Controls)
    assert there.track.is_repeated(1)
    for _ in range(4):
        assert there.track.sample(2) == here.track.sample(2)
        (poses_N44, progress), (expected_N44, expected) = (
            one.poses.sample(12, 3) for one in (there, here)
        )
        np.testing.assert_array_equal(poses_N44, expected_N44)
        assert progress == expected
    assert there.track.apply([state(buttons=("d",))], 99) == here.track.apply(
        [state(buttons=("d",))], 99
    )


def test_controls_of_another_endpoint_are_refused() -> None:
    data = encode_state(OtherControls(ControlTrack(SPACE), PoseTrack()))
    with pytest.raises(EndpointError, match="another endpoint"):
        decode_state(data, Controls)
