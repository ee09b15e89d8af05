# SPDX-License-Identifier: Apache-2.0
"""Speech at `vllm serve --omni` with three engines, as a user starts it: a spoken reply and a text
read aloud.
"""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.openai_server import Served
from test_speech_served import CODES, num_codes, serve_speech, spoken, wav_samples


@pytest.fixture(scope="module")
def speech_server(qwen2_5_omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve_speech(qwen2_5_omni, tmp_path_factory.mktemp("speech_door") / "server.log")


def test_a_reply_is_spoken_and_a_text_is_read_aloud(speech_server: Served) -> None:
    audio = spoken(speech_server).choices[0].message.audio
    assert audio.transcript
    assert 0 < num_codes(wav_samples(base64.b64decode(audio.data))) <= CODES
    read = speech_server.client.audio.speech.create(
        model="null", voice="Ethan", input="The harbour is quiet today.", response_format="wav"
    )
    assert 0 < num_codes(wav_samples(read.content)) <= CODES
