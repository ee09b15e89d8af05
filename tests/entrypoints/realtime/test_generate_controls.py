# SPDX-License-Identifier: Apache-2.0
"""Controls, pacing and extensions of `/v1/realtime_video/generate`.

(U) marks behaviour of SGLang's server that unmodified clients depend on.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.fake_engine import EndpointServer, FakeEngine
from helpers.live_clients import HEIGHT, WIDTH, ExtendedClient, GenerateClient, png, webui_unpack
from helpers.waits import exactly_in_task, pause, wait_until

from vllm_omni.entrypoints.realtime.generate import handler
from vllm_omni.entrypoints.realtime.generate.frames import FrameMessage
from vllm_omni.inputs import Lora

MakeEndpoint = Callable[..., EndpointServer]
INIT = {"type": "init", "prompt": "a path", "size": f"{WIDTH}x{HEIGHT}", "first_frame": png()}


@pytest.fixture
def client(endpoint: EndpointServer) -> Iterator[GenerateClient]:
    with GenerateClient(endpoint.port) as client:
        yield client


@pytest.fixture
def extended(endpoint: EndpointServer) -> Iterator[ExtendedClient]:
    with ExtendedClient(endpoint.port) as client:
        yield client


def actions(engine: FakeEngine) -> list[Any]:
    return [call.params.actions for call in engine.chunks]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (None, [[[], [], []]] * 3),
        ([["w"], ["D", "x"], ["a"], ["s"]], [[["w"], ["d"], ["a"]], [["s"], [], []], [[], [], []]]),
    ],
)
def test_a_script_in_init_steers_the_first_chunks(
    client: GenerateClient, engine: FakeEngine, script: Any, expected: list[Any]
) -> None:
    """A script of four entries fills a chunk of three latent frames and part of the next chunk.
    Idle entries fill the rest of that chunk. (U)
    """
    client.init(max_chunks=3, condition_inputs=script and {"camera_actions": script})
    for _ in range(3):
        client.chunk()
    assert actions(engine) == expected


def test_events_act_from_the_next_chunk_on(client: GenerateClient, engine: FakeEngine) -> None:
    """Events take effect in the next chunk: held keys act until they are released, and a pulse acts
    once. The chunk reports the event's id. (U)
    """
    engine.delay_s = 0.15
    client.init()
    client.chunk()
    client.state(["w"], event_id=864)
    reported = [client.chunk() for _ in range(3)]
    assert [chunk.event_id for chunk in reported] == [None, 864, 864]
    assert reported[1].stats["event_id"] == 864
    client.state(["l"], [], event_id=865)
    client.chunk()
    assert client.chunk().event_id == 865
    assert actions(engine)[2:4] == [[["w"]] * 3, [["w"]] * 3]
    assert [["l"], [], []] in actions(engine)


def test_a_prompt_switches_once_and_never_in_chunk_0(
    client: GenerateClient, engine: FakeEngine
) -> None:
    """Of two prompts, only the later takes effect, once, and never in chunk 0 (U). A key event that
    is older than a prompt does not mask the prompt's event id.
    """
    engine.delay_s = 0.15
    client.init()
    client.event("prompt", "rain", event_id=1)
    client.event("prompt", "snow", event_id=2)
    client.state(["w"], event_id=3)
    chunks = [client.chunk() for _ in range(3)]
    assert [call.params.prompt for call in engine.chunks][:3] == ["a path", "snow", None]
    client.event("prompt", "fog", event_id=4)
    chunks += [client.chunk() for _ in range(3)]
    assert [chunk.event_id for chunk in chunks][1:3] == [3, 3]
    assert [chunk.event_id for chunk in chunks].count(4) == 1
    assert [call.params.prompt for call in engine.chunks].count("fog") == 1


def test_adapters_of_init_and_of_an_event(client: GenerateClient, engine: FakeEngine) -> None:
    """Adapters may be selected in `init` and by an event. The first chunk that uses the adapters
    reports their names and strengths. A malformed adapter list has no effect.
    """
    engine.delay_s = 0.15
    client.init(lora=[{"name": "ink"}])
    client.chunk()
    client.event("lora", [{"name": "wool", "scale": 2}], event_id=1)
    client.event("lora", [{"name": "wool", "scale": "much"}], event_id=2)
    assert client.error() == "invalid event"
    chunks = [client.chunk() for _ in range(3)]
    sent = [call.params.lora for call in engine.chunks]
    assert sent[0] == [Lora(name="ink")] and sent.count([Lora(name="wool", scale=2.0)]) == 1
    assert sent.count(None) == len(sent) - 2
    assert [chunk.event_id for chunk in chunks].count(1) == 1


def test_a_composite_event_is_all_or_nothing(client: GenerateClient, engine: FakeEngine) -> None:
    """If one part of a composite event is invalid, the whole event is rejected. (U)"""
    engine.delay_s = 0.1
    client.init()
    client.chunk()
    parts = {"input_types": ["prompt", "camera_actions"], "prompt": "rain"}
    client.event("composite_input", {**parts, "camera_actions": "w"}, event_id=1)
    client.event("composite_input", {**parts, "camera_actions": [["w"]]}, event_id=2)
    messages = []
    while sum(message["type"] == "chunk_stats" for message in messages) < 4:
        messages.append(client.receive())
    assert [message["content"] for message in messages if message["type"] == "error"] == [
        "invalid event"
    ]
    assert {message.get("event_id") for message in messages} <= {None, 2}
    assert [call.params.prompt for call in engine.chunks].count("rain") == 1
    assert [["w"], [], []] in actions(engine)


@pytest.mark.parametrize(
    "event",
    [
        b"\xc1",
        5,
        {"type": "event"},
        {"type": "event", "kind": "dance", "payload": []},
        {"type": "event", "kind": "prompt", "payload": ""},
        {"type": "event", "kind": "prompt", "payload": 5},
        {"type": "event", "kind": "camera_actions", "payload": "w"},
        {"type": "event", "kind": "camera_actions", "payload": [["w"], "w"]},
        {"type": "event", "kind": "camera_actions", "payload": [["w"]] * 513},
        {"type": "event", "kind": "camera_actions", "payload": {"mode": "state"}},
        {
            "type": "event",
            "kind": "camera_actions",
            "payload": {"mode": "state", "transitions": [["w"]]},
        },
        {"type": "event", "kind": "prompt", "payload": "rain", "event_id": -1},
        {"type": "event", "kind": "prompt", "payload": "rain", "event_id": 1 << 32},
        {"type": "event", "kind": "composite_input", "payload": {"input_types": ["prompt"]}},
        {"type": "control", "op": "pause"},
        INIT,
    ],
)
def test_an_invalid_event_is_one_error_and_the_session_continues(
    client: GenerateClient, engine: FakeEngine, event: Any
) -> None:
    """An invalid event gets one error and the session continues. Events from extensions that were
    not requested are invalid too. (U)
    """
    engine.delay_s = 0.02
    client.init()
    client.chunk()
    client.send(event)
    seen, errors = [], []
    while not errors or len(seen) < 3:
        message = client.receive()
        if message["type"] == "error":
            errors.append(message)
        elif message["type"] == "chunk_stats":
            seen.append(message["chunk_index"])
    assert errors == [{"type": "error", "content": "invalid event"}]
    assert seen == list(range(1, 1 + len(seen)))
    assert {call.params.prompt for call in engine.chunks} == {"a path", None}


def test_a_repeated_event_has_no_second_effect(client: GenerateClient, engine: FakeEngine) -> None:
    """An event whose id is sent again, for example by a reconnecting proxy, has no second
    effect.
    """
    engine.delay_s = 0.1
    client.init()
    client.chunk()
    for _ in range(3):
        client.event("camera_actions", [["w"]], event_id=7)
        client.chunk()
    client.chunk()
    assert sum(call == [["w"], [], []] for call in actions(engine)) == 1


def test_the_next_chunk_is_made_while_this_one_is_sent(
    client: GenerateClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten chunks that each take 0.1 s to generate and 0.1 s to send take about one second instead
    of two, because the next chunk is generated while a chunk is sent. (U)
    """
    sends, took_s = handler._Client.deliver, 0.1

    async def send_slowly(self: handler._Client, payload: FrameMessage) -> None:
        if payload.is_first:
            await exactly_in_task(took_s)
        await sends(self, payload)

    monkeypatch.setattr(handler._Client, "deliver", send_slowly)
    engine.delay_s = took_s
    client.init(max_chunks=10)
    client.chunk()
    started_s = time.monotonic()
    for _ in range(9):
        client.chunk()
    assert time.monotonic() - started_s < 9 * 2 * took_s * 0.9
    assert engine.most_running == 1


def test_a_chunk_with_a_new_event_is_not_paced(client: GenerateClient, engine: FakeEngine) -> None:
    """A chunk with a new event is sent without pacing. (U)"""
    client.init(realtime_output_pacing=True, fps=24)
    client.chunk()
    client.chunk()
    client.state(["w"], event_id=1)
    while (chunk := client.chunk()).event_id != 1:
        pass
    assert chunk.stats["pace_wait_ms"] <= 1


def test_extensions_are_granted_by_name(extended: ExtendedClient) -> None:
    """The first message lists the granted extensions and omits unknown extensions."""
    extended.init(extensions=["receipts", "ping", "teleport"])
    session = extended.receive()
    assert (session["type"], session["protocol"], session["granted"]) == (
        "session",
        1,
        ["receipts", "ping"],
    )
    extended.send({"type": "ping", "t": 1.5})
    assert extended.receive()["type"] in ("pong", "frame_batch")


def test_unknown_extensions_change_nothing(client: GenerateClient) -> None:
    """A client that requests only unknown extensions gets no session message."""
    client.init(max_chunks=1, extensions=["teleport"])
    messages = [client.connection.recv() for _ in range(2)]
    assert [
        webui_unpack(message)["type"] for message in messages if isinstance(message, bytes)
    ] == [
        "frame_batch",
        "chunk_stats",
    ]


def test_receipts_report_the_fate_of_an_event(extended: ExtendedClient, engine: FakeEngine) -> None:
    """A receipt reports that an event is accepted and later applied or superseded, or that it is
    rejected with a code.
    """
    engine.delay_s = 0.2
    extended.init(extensions=["receipts"])
    extended.receive()
    extended.event("prompt", "rain", event_id=1)
    extended.event("prompt", "snow", event_id=2)
    extended.event("prompt", "", event_id=3)
    acks, chunks = [], []
    while len(chunks) < 3:
        message = extended.receive()
        if message["type"] in ("event_ack", "event_applied", "error"):
            acks.append(message)
        elif message["type"] == "chunk_stats":
            chunks.append(message["chunk_index"])
    reported = [(ack["event_id"], ack["status"]) for ack in acks if ack["type"] == "event_ack"]
    assert reported == [(1, "accepted"), (1, "superseded"), (2, "accepted"), (3, "rejected")]
    assert [
        (ack["event_id"], ack["chunk_index"]) for ack in acks if ack["type"] == "event_applied"
    ] == [(2, 1)]
    (error,) = [ack for ack in acks if ack["type"] == "error"]
    assert (error["code"], error["content"]) == ("invalid_request", "invalid event")


def test_a_chunk_needs_a_credit(extended: ExtendedClient, engine: FakeEngine) -> None:
    """Each credit allows one chunk."""
    extended.init(extensions=["credit"])
    extended.receive()
    pause(0.1)
    assert engine.chunks == []
    extended.send({"type": "credit", "chunks": 2})
    assert [extended.chunk().index, extended.chunk().index] == [0, 1]
    pause(0.1)
    assert len(engine.chunks) == 2
    extended.send({"type": "credit", "chunks": 1})
    assert extended.chunk().index == 2


def test_pause_resume_reset_and_stop(extended: ExtendedClient, engine: FakeEngine) -> None:
    """A paused session requests no chunks, `reset` restarts the session, and `stop` closes it
    normally.
    """
    engine.delay_s = 0.02
    extended.init(extensions=["control"])
    extended.receive()
    extended.chunk()

    def result(op: str) -> dict[str, Any]:
        extended.send({"type": "control", "op": op, "id": f"my-{op}"})
        while (message := extended.receive())["type"] != "control_result":
            pass
        assert (message["id"], message["ok"]) == (f"my-{op}", True)
        return message

    result("pause")
    wait_until(lambda: not engine.running)
    made = len(engine.chunks)
    pause(0.15)
    assert len(engine.chunks) == made
    result("resume")
    wait_until(lambda: len(engine.chunks) > made)
    result("reset")
    assert extended.chunk().index == 0
    result("stop")
    assert extended.close_code() == (1000, "stopped by the client")


def test_a_paused_session_without_messages_is_idle(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A paused session whose client sends no messages counts as idle, because otherwise it would
    hold its slot indefinitely.
    """
    with ExtendedClient(make_endpoint(idle_timeout_s=0.3).port) as client:
        client.init(extensions=["credit"])
        client.receive()
        assert client.close_code()[0] == 4010
