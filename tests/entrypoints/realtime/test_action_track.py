# SPDX-License-Identifier: Apache-2.0
"""Axes and wheel beside buttons: what a chunk gets of them, what becomes of their events, and
the bounds.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.actions import ActionFrame, ActionSpace, Axis, Button
from vllm_omni.entrypoints.realtime.controls.analog_track import MAX_WAITING
from vllm_omni.entrypoints.realtime.controls.control_track import (
    ControlTrack,
    Script,
    States,
    TooManyEvents,
    Transition,
)

SPACE = ActionSpace(
    buttons=(Button("w", "forward"), Button("jump", "jump")),
    axes=(
        Axis(name="steer", title="steer", unit="of full", low=-1, high=1),
        Axis(name="dx", title="turn", unit="pixels", kind="motion", low=-30, high=30, mouse="x"),
    ),
    scroll=True,
)


def state(**fields: object) -> States:
    return States((Transition(**fields),))  # type: ignore[arg-type]


@pytest.fixture
def track() -> ControlTrack:
    return ControlTrack(SPACE)


def test_a_rate_is_held_until_it_changes(track: ControlTrack) -> None:
    """Other events leave it alone; zero is rest, which is not written."""
    track.apply([state(axes={"steer": 0.5})], 1)
    track.apply([state(buttons=("w",))], 2)
    expected = [ActionFrame(("w",), {"steer": 0.5})] * 2
    assert [track.sample(2).actions for _ in range(2)] == [expected] * 2
    track.apply([state(axes={"steer": 0.0})], 3)
    assert track.sample(2).actions == [["w"], ["w"]]


def test_motion_is_summed_up_and_spread_over_the_next_chunk(track: ControlTrack) -> None:
    """Then it rests: there is no backlog."""
    for moved in (3.0, 9.0, -6.0):
        track.apply([state(axes={"dx": moved})])
    assert track.sample(3).actions == [ActionFrame(axes={"dx": 2.0})] * 3
    assert track.sample(3).actions == [[], [], []]


def test_motion_beyond_the_range_of_a_frame_is_dropped(track: ControlTrack) -> None:
    """Or the picture would turn on after the hand rests."""
    track.apply([state(axes={"dx": 1000.0})])
    assert track.sample(1).actions == [ActionFrame(axes={"dx": 30.0})]
    assert track.sample(1).actions == [[]]


@pytest.mark.parametrize(
    ("notches", "expected"), [((1, 1), [1, 1, 0]), ((-1,), [-1, 0, 0]), ((5,), [1, 1, 1])]
)
def test_notches_come_one_a_frame(
    track: ControlTrack, notches: tuple[float, ...], expected: list[int]
) -> None:
    """What a chunk cannot take is dropped."""
    for notch in notches:
        track.apply([state(scroll=notch)])
    sample = track.sample(3)
    assert sample.actions is not None
    assert [
        frame.scroll if isinstance(frame, ActionFrame) else 0 for frame in sample.actions
    ] == expected
    assert track.sample(3).actions == [[], [], []]


def test_a_button_pressed_between_chunks_acts_alongside_motion(track: ControlTrack) -> None:
    """For one frame, as without axes."""
    track.apply([States((Transition(("jump",)), Transition(axes={"dx": 2.0}), Transition(())))])
    assert track.sample(2).actions == [
        ActionFrame(("jump",), {"dx": 1.0}),
        ActionFrame(axes={"dx": 1.0}),
    ]


def test_a_script_replaces_everything_and_is_taken_as_it_is(track: ControlTrack) -> None:
    """Its frames say each value themselves; a transition ends it."""
    track.apply([state(axes={"steer": 1.0, "dx": 5.0}, scroll=1)], 1)
    script = Script((ActionFrame(axes={"dx": 7.0}), ActionFrame(("w",)), ActionFrame(scroll=-1)))
    assert track.apply([script], 2) == [1]
    assert track.sample(2).actions == [ActionFrame(axes={"dx": 7.0}), ["w"]]
    track.apply([state(axes={"steer": -1.0})], 3)
    assert track.sample(1).actions == [ActionFrame(axes={"steer": -1.0})]


def test_what_became_of_each_event_is_notified(track: ControlTrack) -> None:
    """Every mover acts, a rate that was replaced before a chunk never does, a held one goes on."""
    assert track.apply([state(axes={"steer": 0.1})], "a") == []
    assert track.apply([state(axes={"steer": 0.2})], "b") == ["a"]
    for name in ("c", "d"):
        track.apply([state(axes={"dx": 1.0})], name)
    sample = track.sample(3)
    assert (sample.applied, sample.active, sample.event_id) == (("b", "c", "d"), ("b",), "d")
    sample = track.sample(3)
    assert (sample.applied, sample.active, sample.event_id) == ((), ("b",), "b")


def test_too_many_events_of_motion_are_refused_and_nothing_of_them_is_taken(
    track: ControlTrack,
) -> None:
    """A button can still be released."""
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
    Transition,
    st.none() | st.sampled_from([(), ("w",), ("jump",)]),
    axes,
    st.sampled_from([0.0, 1.0, -1.0]),
)
frames = st.builds(ActionFrame, st.sampled_from([(), ("w",)]), axes)
updates = st.lists(transitions, max_size=4).map(lambda held: States(tuple(held))) | st.lists(
    frames, max_size=4
).map(lambda entries: Script(tuple(entries)))


@given(st.lists(st.tuples(updates, st.integers(0, 2))))
@settings(max_examples=200, deadline=None)
def test_every_event_has_at_most_one_fate(events: list[tuple[States | Script, int]]) -> None:
    """Applied or superseded, never both, never twice; values stay within their ranges."""
    track, fates = ControlTrack(SPACE), []
    for event_id, (update, samples) in enumerate(events):
        fates += track.apply([update], event_id)
        for _ in range(samples):
            sample = track.sample(3)
            assert sample.actions is not None and len(sample.actions) == 3
            for frame in sample.actions:
                values = frame.axes if isinstance(frame, ActionFrame) else {}
                assert all(-30 <= value <= 30 for value in values.values())
            fates += sample.applied
    assert len(fates) == len(set(fates))
