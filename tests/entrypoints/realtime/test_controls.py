# SPDX-License-Identifier: Apache-2.0
"""What steers the next chunk: scripts, held keys, pulses, prompts, and what becomes of events
that never act.
"""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.actions import ActionFrame
from vllm_omni.entrypoints.realtime.controls.control_track import (
    MAX_SCRIPT_ENTRIES,
    Adapters,
    ControlTrack,
    Held,
    Prompt,
    Script,
    States,
    Transition,
)
from vllm_omni.inputs import Lora

W, A, D, NONE = ("w",), ("a",), ("d",), ()


def script(*entries: Held) -> Script:
    return Script(tuple(map(ActionFrame, entries)))


def states(*transitions: Held) -> States:
    return States(tuple(map(Transition, transitions)))


def test_no_key_was_ever_spoken_of() -> None:
    """Then there is nothing to send, not even idle."""
    sample = ControlTrack().sample(3)
    assert (sample.actions, sample.prompt, sample.event_id) == (None, None, None)


def test_a_script_is_consumed_in_order_and_then_idle() -> None:
    """Four entries, three a chunk: the rest waits for the next one, which is filled up with
    idle.
    """
    track = ControlTrack()
    track.apply([script(W, D, A, W)], 4)
    first, second, third = track.sample(3), track.sample(3), track.sample(3)
    assert first.actions == [["w"], ["d"], ["a"]]
    assert second.actions == [["w"], [], []]
    assert third.actions == [[], [], []]
    assert [sample.event_id for sample in (first, second, third)] == [4, 4, None]
    assert [sample.applied for sample in (first, second)] == [(4,), ()]


def test_a_new_script_replaces_the_rest_of_the_old() -> None:
    """What was not consumed is gone."""
    track = ControlTrack()
    track.apply([script(W, W, W, W)])
    track.sample(3)
    track.apply([script(D)])
    assert track.sample(3).actions == [["d"], [], []]


def test_states_and_scripts_replace_one_another() -> None:
    """The latest kind counts."""
    track = ControlTrack()
    track.apply([script(W, W, W, W, W, W)])
    track.apply([states(D)])
    assert track.sample(2).actions == [["d"], ["d"]]
    track.apply([script(A)])
    assert track.sample(2).actions == [["a"], []]
    assert track.sample(2).actions == [[], []]


def test_a_held_key_is_held() -> None:
    """Until it is released, with its event's id."""
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
def test_what_happened_between_two_chunks(
    transitions: tuple[Held, ...], expected: list[list[str]]
) -> None:
    """A press and release act for one entry; otherwise only the newest state counts, however
    many there were.
    """
    track = ControlTrack()
    for keys in transitions:
        track.apply([states(keys)])
    assert track.sample(3).actions == expected
    track = ControlTrack()
    track.apply([states(*transitions)])
    assert track.sample(3).actions == expected


def test_the_latest_prompt_wins_and_waits_for_the_second_chunk() -> None:
    """Chunk 0 has the prompt of `init`."""
    track = ControlTrack()
    assert track.apply([Prompt("rain")], 1) == []
    assert track.apply([Prompt("snow")], 2) == [1]
    assert track.sample(3, with_prompt=False).prompt is None
    sample = track.sample(3)
    assert (sample.prompt, sample.event_id, sample.applied) == ("snow", 2, (2,))
    assert track.sample(3).prompt is None


def test_the_latest_adapters_win_and_may_act_from_the_first_chunk_on() -> None:
    """They are a slot of one, as a prompt is."""
    track = ControlTrack()
    ink, wool = (Lora(name="ink"),), (Lora(name="wool"),)
    assert track.apply([Adapters(ink)], 1) == []
    assert track.apply([Adapters(wool)], 2) == [1]
    sample = track.sample(3, with_prompt=False)
    assert (sample.lora, sample.event_id, sample.applied) == (wool, 2, (2,))
    assert track.sample(3).lora is None


def test_a_prompt_is_not_masked_by_an_older_key() -> None:
    """The id told is of the newest event at work in the chunk; it is new once."""
    track = ControlTrack()
    track.apply([states(W)], 5)
    assert (track.sample(3).event_id, track.sample(3).is_new) == (5, False)
    track.apply([Prompt("rain")], 6)
    sample = track.sample(3)
    assert (sample.event_id, sample.is_new, sample.applied) == (6, True, (6,))
    sample = track.sample(3)
    assert (sample.event_id, sample.is_new, sample.applied) == (5, False, ())


def test_an_event_that_never_acts_is_superseded() -> None:
    """Once, by the event that replaced it; one that has acted is not."""
    track = ControlTrack()
    assert track.apply([script(W)], 1) == []
    assert track.apply([states(D)], 2) == [1]
    track.sample(3)
    assert track.apply([states(NONE)], 3) == []
    assert track.apply([states(A)], 4) == []
    assert track.apply([states(W)], 5) == [3, 4]


def test_a_repeated_id_is_known_for_a_while() -> None:
    """At least the last thousand ids."""
    track = ControlTrack()
    for event_id in range(3000):
        track.apply([states(W)], event_id)
    assert track.is_repeated(2999)
    assert track.is_repeated(2000)
    assert not track.is_repeated(0)
    assert not track.is_repeated(None)


keys = st.sampled_from([W, A, D, NONE, ("w", "d")])
updates = st.lists(
    st.builds(Prompt, st.sampled_from(["rain", "snow"]))
    | st.lists(keys, max_size=8).map(lambda entries: script(*entries))
    | st.lists(keys, max_size=8).map(lambda held: states(*held)),
    min_size=1,
    max_size=2,
)


@given(st.lists(st.tuples(updates, st.integers(0, 3))))
@settings(max_examples=200, deadline=None)
def test_every_event_has_at_most_one_fate(events: list[tuple[list, int]]) -> None:
    """Applied or superseded, never both, never twice; chunks always have as many entries as
    latent frames.
    """
    track, fates = ControlTrack(), []
    for event_id, (update, samples) in enumerate(events):
        fates += track.apply(update, event_id)
        for _ in range(samples):
            sample = track.sample(3)
            assert sample.actions is None or [len(sample.actions)] == [3]
            assert sample.event_id is None or sample.event_id <= event_id
            fates += sample.applied
    assert len(fates) == len(set(fates))


def test_memory_is_bounded() -> None:
    """A flood without a chunk leaves no more than one script and two transitions."""
    track = ControlTrack()
    for number in range(10_000):
        track.apply([states(W), states(NONE), Prompt("x" * 100)], number)
    assert len(track._transitions) <= 2
    assert len(track._seen) <= 1024
    track.apply([script(*[W] * 10_000)])
    assert len(track._script) == MAX_SCRIPT_ENTRIES
    assert sys.getsizeof(track._script) < 100_000
