# SPDX-License-Identifier: Apache-2.0
"""How speech is cut into pieces while its codes arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.model_executor.models.qwen2_5_omni.options import SpeechDefaults
from vllm_omni.model_executor.models.qwen2_5_omni.speech import pieces


def test_one_clip() -> None:
    """`chunk_codes=0`: nothing before the end, then all of it without context."""
    how = SpeechDefaults(chunk_codes=0)
    assert list(pieces(500, False, 0, how)) == []
    assert list(pieces(500, True, 0, how)) == [(0, 500, 0, 0)]
    assert list(pieces(0, True, 0, how)) == []


@pytest.mark.parametrize(
    ("num_codes", "finished", "emitted", "expected"),
    [
        (35, False, 0, []),
        (36, False, 0, [(0, 24, 0, 12)]),
        (60, False, 24, [(24, 48, 24, 12)]),
        (59, False, 24, []),
        (60, True, 24, [(24, 48, 24, 12), (48, 60, 24, 0)]),
        (10, True, 0, [(0, 10, 0, 0)]),
        (48, True, 48, []),
    ],
)
def test_pieces_wait_for_their_context(
    num_codes: int, finished: bool, emitted: int, expected: list[tuple[int, int, int, int]]
) -> None:
    assert list(pieces(num_codes, finished, emitted, SpeechDefaults())) == expected


@given(st.integers(0, 300), st.integers(1, 50), st.integers(0, 40), st.integers(0, 40), st.data())
def test_every_code_sounds_once(total: int, chunk: int, left: int, right: int, data: st.DataObject) -> None:
    """However codes arrive, pieces join without gaps or overlap and never reach outside what is there."""
    how = SpeechDefaults(chunk_codes=chunk, left_codes=left, right_codes=right)
    emitted, known = 0, 0
    while True:
        finished = known == total
        for first, last, before, after in pieces(known, finished, emitted, how):
            assert first == emitted and last > first
            assert before <= first and last + after <= known
            emitted = last
        if finished:
            break
        known += data.draw(st.integers(1, total - known))
    assert emitted == total
