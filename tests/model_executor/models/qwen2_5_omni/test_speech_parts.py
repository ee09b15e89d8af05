# SPDX-License-Identifier: Apache-2.0
"""Tests of the division of speech into parts while its codes are arriving."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.waits import seconds
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.model_executor.models.qwen2_5_omni.options import SpeechDefaults
from vllm_omni.model_executor.models.qwen2_5_omni.speech import (
    SpeechComposition,
    SpeechReply,
    ready_chunks,
)


def test_speech_may_be_one_clip() -> None:
    """With `chunk_codes=0`, no part is emitted before the end of the speech. One part then contains
    all codes and has no context.
    """
    how = SpeechDefaults(chunk_codes=0)
    assert list(ready_chunks(500, False, 0, how)) == []
    assert list(ready_chunks(500, True, 0, how)) == [(0, 500, 0, 0)]
    assert list(ready_chunks(0, True, 0, how)) == []


@pytest.mark.parametrize(
    ("num_codes", "finished", "emitted", "expected"),
    [
        (35, False, 0, []),
        (36, False, 0, [(0, 24, 0, 12)]),
        (84, False, 24, [(24, 72, 24, 12)]),
        (83, False, 24, []),
        (80, True, 24, [(24, 72, 24, 8), (72, 80, 24, 0)]),
        (400, False, 72, [(72, 168, 24, 12), (168, 264, 24, 12), (264, 360, 24, 12)]),
        (10, True, 0, [(0, 10, 0, 0)]),
        (48, True, 48, []),
    ],
)
def test_parts_wait_for_their_context(
    num_codes: int, finished: bool, emitted: int, expected: list[tuple[int, int, int, int]]
) -> None:
    assert list(ready_chunks(num_codes, finished, emitted, SpeechDefaults())) == expected


def test_parts_may_have_one_length() -> None:
    """All parts have the same length if `most_chunk_codes` is 0 or at most `chunk_codes`."""
    for most in (0, 24):
        how = SpeechDefaults(chunk_codes=24, most_chunk_codes=most)
        assert [last - first for first, last, _, _ in ready_chunks(120, True, 0, how)] == [24] * 5
        assert how.part_sizes == (36, 60)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, (36, 84, 132)),
        ({"chunk_codes": 0}, ()),
        ({"left_codes": 60}, (36, 84, 168)),
        ({"left_codes": 0}, (36, 60, 108)),
    ],
)
def test_part_sizes_are_known_in_advance(fields: dict[str, int], sizes: tuple[int, ...]) -> None:
    """The sizes of a long speech's parts are known in advance, except at its end."""
    how = SpeechDefaults(**fields)
    assert how.part_sizes == sizes
    made = [
        left + last - first + right
        for first, last, left, right in ready_chunks(2000, False, 0, how)
    ]
    assert tuple(dict.fromkeys(made)) == sizes


@given(
    st.integers(0, 300),
    st.integers(1, 50),
    st.integers(0, 200),
    st.integers(0, 40),
    st.integers(0, 40),
    st.data(),
)
def test_every_code_is_in_one_part(
    total: int, chunk: int, most: int, left: int, right: int, data: st.DataObject
) -> None:
    """The division into parts does not depend on how the codes arrive. Parts neither overlap nor
    leave gaps, and their contexts lie within the speech.
    """
    how = SpeechDefaults(
        chunk_codes=chunk, most_chunk_codes=most, left_codes=left, right_codes=right
    )
    emitted, known = 0, 0
    ends = [last for _, last, _, _ in ready_chunks(total, True, 0, how)]
    arrived = []
    while True:
        finished = known == total
        for first, last, before, after in ready_chunks(known, finished, emitted, how):
            assert first == emitted and last > first
            assert before <= first and last + after <= known
            emitted = last
            arrived.append(last)
        if finished:
            break
        known += data.draw(st.integers(1, total - known))
    assert emitted == total and arrived == ends


class Talker:
    """Simulates a talker engine that returns 200 codes at once."""

    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=512),
            scheduler_config=SimpleNamespace(max_num_seqs=1),
        )
    )

    def check_alive(self) -> None:
        pass

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        for code in range(200):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[code])])


def test_the_talker_slot_is_free_after_its_last_code() -> None:
    """The talker serves the next request before token2wav has produced any audio for the current
    request.
    """
    builder = SimpleNamespace(voices=["v"], stop_codes=[-1], check_voice=lambda voice: None)
    engine: Any = Talker()
    composition = SpeechComposition(
        engine, engine, engine, builder=builder, defaults=SpeechDefaults()
    )  # type: ignore[arg-type]
    prompt: Any = SimpleNamespace(
        token_ids=[1], reply_RD=[1], to_engine_input=lambda name, slot: None
    )
    spoken = SpeechReply("r", SpeechDefaults(max_codes=256), seed=0)
    asyncio.run(asyncio.wait_for(composition._generate_codes(prompt, spoken), seconds(5)))
    assert composition._slots.qsize() == 1 and spoken.codes.qsize() == 200


@pytest.mark.parametrize(
    ("requested", "of_speech", "spoken"),
    [(None, None, "v"), ("", None, "v"), (None, "w", "w"), ("v", "w", "v")],
)
def test_the_voice_of_a_request_takes_precedence(
    requested: str | None, of_speech: str | None, spoken: str
) -> None:
    """The voice in the request takes precedence over the voice in the speech settings, which takes
    precedence over the server's default voice.
    """
    builder = SimpleNamespace(voices=["v", "w"], check_voice=lambda voice: None)
    engine: Any = Talker()
    composition = SpeechComposition(
        engine, engine, engine, builder=builder, defaults=SpeechDefaults()
    )  # type: ignore[arg-type]
    composition.check_voice(requested)
    assert (
        composition._start("r", SpeechDefaults(voice=of_speech), requested, 0, None).how.voice
        == spoken
    )
