# SPDX-License-Identifier: Apache-2.0
"""A timed prompt takes effect at the first chunk at or after its time."""

import pytest

from vllm_omni.entrypoints.timed_prompts import PromptSchedule, TimedPrompt

FRAMES = (0, 9, 21, 33, 45, 57)
"""Index of each chunk's first frame. The first chunk has 9 frames, and each later chunk has 12."""


def taken(*prompts: TimedPrompt, fps: float = 16) -> list[str | None]:
    schedule = PromptSchedule(prompts, fps)
    return [schedule.take_prompt(chunk, frame) for chunk, frame in enumerate(FRAMES)]


def test_a_prompt_starts_with_the_first_chunk_at_or_after_its_time() -> None:
    """A prompt takes effect at the first chunk at or after its time. At 16 fps, chunks start at 0,
    0.56, 1.31, 2.06, 2.81 and 3.56 s.
    """
    night = TimedPrompt(prompt="night", seconds=2)
    assert taken(night) == [None, None, None, "night", None, None]
    assert taken(night, fps=24) == [None, None, None, None, None, "night"]
    assert taken(TimedPrompt(prompt="snow", chunk=1), night) == [
        None,
        "snow",
        None,
        "night",
        None,
        None,
    ]


def test_the_last_of_several_prompts_for_a_chunk_acts() -> None:
    prompts = [
        TimedPrompt(prompt=name, seconds=second)
        for name, second in (("a", 0.6), ("b", 0.7), ("c", 99))
    ]
    assert taken(*prompts) == [None, None, "b", None, None, None]
    assert taken(TimedPrompt(prompt="first", seconds=0))[0] == "first"


def test_times_are_written_as_seconds_or_chunks() -> None:
    assert TimedPrompt.parse("3:a town: at night") == TimedPrompt(
        prompt="a town: at night", chunk=3
    )
    assert TimedPrompt.parse("7.5s:snow") == TimedPrompt(prompt="snow", seconds=7.5)


@pytest.mark.parametrize(
    "text", ["snow", "x:snow", "3:", "-1:snow", "nans:snow", "99999s:snow", "s:snow"]
)
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected CHUNK:PROMPT or SECONDSs:PROMPT"):
        TimedPrompt.parse(text)


@pytest.mark.parametrize("fields", [{}, {"seconds": 1, "chunk": 1}, {"seconds": -1}, {"chunk": -2}])
def test_a_prompt_has_seconds_or_a_chunk(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"seconds|chunk"):
        TimedPrompt(prompt="snow", **fields)
