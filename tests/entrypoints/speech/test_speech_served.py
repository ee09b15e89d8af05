# SPDX-License-Identifier: Apache-2.0
"""Speech over HTTP: a tiny Qwen2.5-Omni (three engines, one address) served with `vllm serve
--omni` and called through the `openai` client.
"""

import base64
import hashlib
import io
import json
import math
import signal
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import openai
import psutil
import pytest
from helpers.openai_server import KEY, Served, serve
from helpers.otlp_collector import CALLER_SPAN, TRACE_ID, TRACEPARENT, Collector
from helpers.waits import seconds, wait_until

pytestmark = pytest.mark.nightly

CODES = 40
"""Maximum number of codes in a reply. A limit is needed, because the tiny talker could otherwise
generate any number of codes.
"""
PIECE = 2
SMALL_KEY = "a-key-with-a-small-quota"
SAMPLES_PER_CODE = 480
MESSAGES: list[Any] = [{"role": "user", "content": "Good morning!"}]
SPEECH: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "wav"},
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def speech_server(
    qwen2_5_omni: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Served]:
    """Start a server that gives its second key a small quota and sends its spans to the
    collector.
    """
    folder = tmp_path_factory.mktemp("speech_server")
    quotas = folder / "quotas.toml"
    digest = hashlib.sha256(SMALL_KEY.encode()).hexdigest()
    quotas.write_text(f'[keys.small]\nsha256 = "{digest}"\nchunks_per_minute = 1\n')
    flags = [
        "--api-key",
        KEY,
        SMALL_KEY,
        "--otlp-traces-endpoint",
        f"http://127.0.0.1:{collector.port}",
    ]
    log = folder / "server.log"
    yield from serve_speech(
        qwen2_5_omni, log, *flags, OTEL_BSP_SCHEDULE_DELAY="200", quotas=str(quotas)
    )


def serve_speech(
    model: Path, log: Path, *flags: str, quotas: str | None = None, **environ: str
) -> Iterator[Served]:
    engine = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 2}
    speech = {
        "chunk_codes": 2,
        "most_chunk_codes": 2,
        "left_codes": 4,
        "right_codes": 1,
        "max_codes": CODES,
        "temperature": 0,
        "top_k": 0,
    }
    yield from serve(
        model,
        log,
        ["--max-model-len", "256", "--max-num-seqs", "4", "--skip-mm-profiling", *flags],
        {"model": {"talker": engine, "speech": speech}, "quotas": quotas},
        VLLM_CPU_KVCACHE_SPACE="1",
        **environ,
    )


def wav_samples(data: bytes) -> bytes:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        return file.readframes(file.getnframes())


def num_codes(samples: bytes) -> int:
    codes, rest = divmod(len(samples), 2 * SAMPLES_PER_CODE)
    assert rest == 0
    return codes


def spoken(served: Served, **requested: Any) -> Any:
    return served.client.chat.completions.create(
        model="null",
        messages=MESSAGES,
        temperature=0,
        max_tokens=12,
        seed=5,
        **{**SPEECH, **requested},
    )


def test_a_reply_has_text_and_audio(speech_server: Served) -> None:
    """The transcript of a reply is the thinker's text, and the audio is generated from all of the
    talker's codes. The same seed yields the same reply.
    """
    silent = speech_server.client.chat.completions.create(
        model="null", messages=MESSAGES, temperature=0, max_tokens=12, seed=5
    )
    choice = spoken(speech_server).choices[0]
    assert choice.message.content is None
    assert choice.message.audio.transcript == silent.choices[0].message.content != ""
    sound = wav_samples(base64.b64decode(choice.message.audio.data))
    assert 0 < num_codes(sound) <= CODES and len(set(sound)) > 50
    again = spoken(speech_server).choices[0]
    assert again.message.audio.data == choice.message.audio.data
    other = spoken(speech_server, audio={"voice": "Chelsie", "format": "wav"}).choices[0]
    assert other.message.audio.data != choice.message.audio.data


def test_a_streamed_reply_is_the_whole_one_in_parts(speech_server: Served) -> None:
    whole = spoken(speech_server).choices[0].message.audio
    pcm16 = {"voice": "Ethan", "format": "pcm16"}
    text, sound, last = "", [], None
    for chunk in spoken(
        speech_server, audio=pcm16, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            if choice.delta.audio is not None:
                text += choice.delta.audio.transcript or ""
                sound += (
                    [base64.b64decode(choice.delta.audio.data)] if choice.delta.audio.data else []
                )
            last = choice.finish_reason or last
        usage = chunk.usage
    expected = wav_samples(base64.b64decode(whole.data))
    assert text == whole.transcript and len(sound) == math.ceil(num_codes(expected) / PIECE) > 1
    assert b"".join(sound) == expected
    assert last == "length" and usage is not None and usage.completion_tokens == 12


@pytest.mark.parametrize("audio_format", ["wav", "mp3"])
def test_a_text_is_read_aloud(speech_server: Served, audio_format: Any) -> None:
    """When a text is read aloud, the audio file has the requested format and the duration of its
    codes, except that mp3 pads both ends.
    """
    with speech_server.client.audio.speech.with_streaming_response.create(
        model="null",
        voice="Ethan",
        input="The harbour is quiet today.",
        response_format=audio_format,
    ) as speech:
        data = speech.read()
    with av.open(io.BytesIO(data), "r") as container:
        seconds = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
    assert SAMPLES_PER_CODE / 24_000 <= seconds <= CODES * SAMPLES_PER_CODE / 24_000 + 0.1


def test_speech_as_events(speech_server: Served) -> None:
    body = {"model": "null", "voice": "Ethan", "input": "Rain.", "stream_format": "sse"}
    response = httpx.post(
        f"{speech_server.url}/v1/audio/speech",
        json=body,
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=seconds(60),
    )
    events = [
        json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line
    ]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * (len(events) - 1) + [
        "speech.audio.done"
    ]
    assert len(events) > 2


def test_refusals_list_the_allowed_values(speech_server: Served) -> None:
    for requested, says in (
        ({"audio": {"voice": "Nobody"}}, "Chelsie, Ethan"),
        ({"audio": {"format": "midi"}}, "format"),
        ({"stream": True, "audio": {"format": "mp3"}}, "pcm16"),
        ({"n": 2}, "n=2"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            spoken(speech_server, **requested)
    with pytest.raises(openai.AuthenticationError):
        speech_server.connect("wrong").audio.speech.create(model="null", voice="Ethan", input="x")
    assert spoken(speech_server).choices[0].message.audio.data


def test_a_spoken_reply_has_spans_and_a_request_id(
    speech_server: Served, collector: Collector
) -> None:
    """Each engine's span is a child of the reply's span, which belongs to the caller's trace. The
    response and the request's log lines contain the request id.
    """
    body = {"model": "null", "messages": MESSAGES, "max_tokens": 12, **SPEECH}
    own = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "spoken-1", "traceparent": TRACEPARENT}
    response = httpx.post(
        f"{speech_server.url}/v1/chat/completions", json=body, headers=own, timeout=seconds(60)
    )
    assert (response.status_code, response.headers.get_list("x-request-id")) == (200, ["spoken-1"])
    wait_until(lambda: any(span.name == "speech" for span in collector.spans(TRACE_ID)))
    spans = collector.spans(TRACE_ID)
    (speech,) = [span for span in spans if span.name == "speech"]
    assert speech.parent_span_id.hex() == CALLER_SPAN
    assert {span.name for span in spans if span.parent_span_id == speech.span_id} == {
        "thinker",
        "talker",
        "token2wav",
    }
    (thinker,) = [span for span in spans if span.name == "thinker"]
    assert [span.name for span in spans if span.parent_span_id == thinker.span_id] == [
        "llm_request"
    ]
    wait_until(
        lambda: (
            '/v1/chat/completions HTTP/1.1" 200 OK request_id=spoken-1'
            in speech_server.log.read_text()
        )
    )
    refused = httpx.get(f"{speech_server.url}/v1/models", headers={"X-Request-Id": "spoken-2"})
    assert (refused.status_code, refused.headers.get_list("x-request-id")) == (401, ["spoken-2"])


def test_speech_with_a_key_beyond_its_quota_is_refused(speech_server: Served) -> None:
    small = speech_server.connect(SMALL_KEY)
    small.audio.speech.create(model="null", voice="Ethan", input="Once.")
    with pytest.raises(openai.RateLimitError, match="1 chunks a minute"):
        small.audio.speech.create(model="null", voice="Ethan", input="Twice.")
    assert spoken(speech_server).choices[0].message.audio.data


def test_a_client_that_leaves_holds_no_slot(speech_server: Served) -> None:
    """Clients that disconnect hold no slot. Even if more clients than the talker has slots
    disconnect after their first event, later clients are served immediately.
    """
    pcm16 = {"voice": "Ethan", "format": "pcm16"}
    for _ in range(4):
        stream = spoken(speech_server, audio=pcm16, stream=True)
        next(iter(stream))
        stream.close()
    assert spoken(speech_server).choices[0].message.audio.data


def test_a_dead_engine_is_reported(speech_server: Served) -> None:
    """When the process of one engine is killed, requests that need this engine get 503, and
    `/health` names the engine. This test is the last in the module, because it kills an engine.
    """
    workers = [
        child
        for child in psutil.Process(speech_server.process.pid).children(recursive=True)
        if any("EngineCore" in part for part in child.cmdline())
    ]
    assert len(workers) == 3
    max(workers, key=lambda process: process.create_time()).send_signal(signal.SIGKILL)
    wait_until(lambda: speech_server.get("/health")[0] == 503)
    assert len(json.loads(speech_server.get("/health")[2])["stages"]) == 1
    with pytest.raises(openai.InternalServerError) as reported:
        spoken(speech_server)
    assert reported.value.status_code == 503
