# SPDX-License-Identifier: Apache-2.0
"""What a client of `/v1/realtime_video/generate` sees: real sockets, a real uvicorn server, a fake engine.

Cases marked U hold on the original server too, so unmodified clients depend on them; the others are promises of ours.
"""

import contextlib
import io
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_engine import FIRST, LATER, DoorServer, FakeEngine, wait_until
from live_clients import HEIGHT, WIDTH, ExtendedClient, GenerateClient, png, webui_unpack
from PIL import Image
from websockets.exceptions import ConnectionClosed

from vllm_omni.entrypoints.realtime.generate_door import PATHS
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

MakeDoor = Callable[..., DoorServer]
INIT = {"type": "init", "prompt": "a path", "size": f"{WIDTH}x{HEIGHT}", "first_frame": png()}


@pytest.fixture
def client(door: DoorServer) -> Iterator[GenerateClient]:
    with GenerateClient(door.port) as client:
        yield client


@pytest.fixture
def extended(door: DoorServer) -> Iterator[ExtendedClient]:
    with ExtendedClient(door.port) as client:
        yield client


def actions(engine: FakeEngine) -> list[Any]:
    return [call.params.actions for call in engine.chunks]


# -- init and life -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        "text",
        b"\xc1",
        [1, 2],
        {"type": "init"},
        {**INIT, "type": "begin"},
        {**INIT, "max_chunks": 0},
        {**INIT, "enhance_prompt": True},
        {**INIT, "first_frame": "/etc/passwd"},
        {**INIT, "first_frame": "http://127.0.0.1/x.png"},
        {**INIT, "first_frame": b"not a picture"},
        {**INIT, "first_frame": None},
        {**INIT, "seed": 1.5},
        {**INIT, "size": "48by32"},
        {**INIT, "size": "4800x3200"},
        {**INIT, "prompt": 5},
        {**INIT, "realtime_output_format": "mp4"},
        {**INIT, "condition_inputs": {"camera_actions": "w"}},
    ],
)
def test_a_bad_init_is_one_error_and_a_good_one_follows(client: GenerateClient, message: Any) -> None:
    """U. The server keeps listening; exactly one error each, with the text that clients know and nothing else."""
    client.send(message)
    assert client.receive() == {"type": "error", "content": "invalid generate request"}
    client.init(max_chunks=1)
    assert client.chunk().numbers() == list(range(FIRST))


def test_javascripts_numbers_and_unknown_keys_are_fine(client: GenerateClient, engine: FakeEngine) -> None:
    """U. Large integers arrive as floats; the WebUI sends settings that a deployment fixes."""
    webui = {"num_frames": 9.0, "num_inference_steps": 4, "guidance_scale": 1.0, "realtime_causal_sink_size": 9}
    client.init(seed=100000.0, fps=25, max_chunks=1.0, model="m", zoom={"a": [1]}, **webui)
    client.chunk()
    assert engine.chunks[0].params.seed == 100000
    assert engine.chunks[0].params.options == {}


@pytest.mark.parametrize("path", PATHS)
def test_max_chunks_end_with_a_normal_close(door: DoorServer, engine: FakeEngine, path: str) -> None:
    """U. Frames and stats of every chunk, then 1000 `generation complete`; the world is freed."""
    with GenerateClient(door.port, path) as client:
        client.init(max_chunks=3)
        chunks = [client.chunk() for _ in range(3)]
        assert client.close_code() == (1000, "generation complete")
    assert [chunk.index for chunk in chunks] == [0, 1, 2]
    assert [number for chunk in chunks for number in chunk.numbers()] == list(range(FIRST + 2 * LATER))
    wait_until(lambda: not engine.worlds and not len(door.manager))


def test_the_image_prompt_and_seed_begin_the_world(client: GenerateClient, engine: FakeEngine) -> None:
    """Once, with the first chunk; the seed is 42 unless another is asked for (U)."""
    client.init(max_chunks=2)
    client.chunk()
    client.chunk()
    first, second = engine.chunks
    assert (first.params.prompt, first.params.seed, first.params.chunk_index) == ("a path", 42, 0)
    assert (first.params.width, first.params.height) == (WIDTH, HEIGHT)
    assert first.arrays["image"].shape == (HEIGHT, WIDTH, 3)
    assert (second.params.prompt, second.params.seed, second.arrays) == (None, None, {})


def test_idle_connections_take_no_slot(make_door: MakeDoor) -> None:
    """U. Nor do those with only bad inits."""
    door = make_door(facts={"max_sessions": 1})
    with GenerateClient(door.port), GenerateClient(door.port) as bad, GenerateClient(door.port) as good:
        bad.send({**INIT, "max_chunks": 0})
        assert bad.error() == "invalid generate request"
        good.init(max_chunks=1)
        good.chunk()


def test_a_full_server_waits_a_second_and_refuses(make_door: MakeDoor, engine: FakeEngine) -> None:
    """U. One error with the known text and 1008; the client that has the slot does not notice."""
    door = make_door(facts={"max_sessions": 1})
    engine.delay_s = 0.05
    with GenerateClient(door.port) as first, GenerateClient(door.port) as second:
        first.init()
        first.chunk()
        started_s = time.monotonic()
        second.init()
        assert second.error() == "another realtime session is already active"
        assert second.close_code()[0] == 1008
        assert 0.9 <= time.monotonic() - started_s < 2.0
        assert first.chunk().index == 1


def test_a_slot_that_becomes_free_in_time_is_taken(make_door: MakeDoor, engine: FakeEngine) -> None:
    """U. The WebUI replaces its session by closing the old one and opening the next."""
    door = make_door(facts={"max_sessions": 1})
    engine.delay_s = engine.close_delay_s = 0.1
    engine.max_worlds = 1
    with GenerateClient(door.port) as first:
        first.init()
        first.chunk()
    with GenerateClient(door.port) as second:
        second.init(max_chunks=1)
        assert second.chunk().index == 0


def test_many_sessions_run_side_by_side(door: DoorServer, engine: FakeEngine) -> None:
    """Ours: eight worlds at once, each with its own frames."""
    engine.delay_s = 0.02
    clients = [GenerateClient(door.port) for _ in range(8)]
    for client in clients:
        client.init(max_chunks=3)
    for client in clients:
        assert [client.chunk().index for _ in range(3)] == [0, 1, 2]
        assert client.close_code()[0] == 1000
    assert engine.most_running > 1


def test_a_failed_chunk_ends_with_its_reason_and_a_close_frame(client: GenerateClient, engine: FakeEngine) -> None:
    """The chunks before it arrive first; no path or traceback in the text."""

    def fail(params: DiffusionParams) -> None:
        if params.chunk_index == 2:
            raise RequestFailed("oom", "the device ran out of memory")

    engine.fail = fail
    client.init()
    assert [client.chunk().index, client.chunk().index] == [0, 1]
    assert client.error() == "error during generate loop: the device ran out of memory"
    code, reason = client.close_code()
    assert (code, reason) == (1011, "the device ran out of memory")


def test_an_unforeseen_failure_says_nothing_of_the_server(client: GenerateClient, engine: FakeEngine) -> None:
    """A fixed text and 1011."""

    def fail(params: DiffusionParams) -> None:
        raise ZeroDivisionError("/secret/path 0x7f00")

    engine.fail = fail
    client.init()
    content = client.error()
    assert content.startswith("error during generate loop: ")
    assert not re.search(r"secret|0x|Traceback|ZeroDivision|/", content)
    assert client.close_code()[0] == 1011


def test_a_text_frame_does_not_end_the_session(client: GenerateClient, engine: FakeEngine) -> None:
    """The third one does, with 1003."""
    engine.delay_s = 0.05
    client.init()
    client.chunk()
    client.send("hello")
    contents, seen = [], 0
    while not contents or seen < 3:
        message = client.receive()
        contents += [message["content"]] if message["type"] == "error" else []
        seen += message["type"] == "chunk_stats"
    assert contents == ["invalid event"]
    client.send("hello")
    client.send("hello")
    assert client.close_code()[0] == 1003


def test_an_idle_connection_is_closed_but_a_stream_is_not(make_door: MakeDoor, engine: FakeEngine) -> None:
    """4010 without an error message, which the WebUI would show for ever; whoever only watches is not idle."""
    door = make_door(idle_timeout_s=0.3)
    engine.delay_s = 0.2
    with GenerateClient(door.port) as idle, GenerateClient(door.port) as watching:
        watching.init()
        assert idle.close_code()[0] == 4010
        assert [watching.chunk().index for _ in range(5)] == [0, 1, 2, 3, 4]


# -- frames ------------------------------------------------------------------------------------------------------------

RAW_FIELDS = {
    "type", "request_id", "chunk_index", "content_type", "num_frames", "total_size", "frame_batch_index",
    "num_frame_batches", "is_final_frame_batch", "format", "width", "height", "channels", "bytes_per_frame", "raw_size",
    "encoding",
}  # fmt: skip
STATS_FIELDS = {
    "type", "session_id", "request_id", "chunk_index", "event_id", "request_prepare_ms", "scheduler_forward_ms",
    "pace_wait_ms", "header_write_ms", "raw_payload_build_ms", "raw_write_ms", "ws_write_ms", "chunk_total_ms",
    "num_batches", "num_frames", "raw_bytes", "ws_payload_bytes", "content_type",
}  # fmt: skip


def test_messages_are_byte_for_byte_of_the_known_form(door: DoorServer) -> None:
    """U. Sixteen header fields and the payload in one map, eighteen in the stats, `type` first, whole numbers only."""
    with GenerateClient(door.port) as client:
        client.init(max_chunks=1)
        frames, stats = client.connection.recv(), client.connection.recv()
    assert isinstance(frames, bytes)
    assert isinstance(stats, bytes)
    assert frames.startswith(bytes.fromhex("de0011a474797065ab6672616d655f6261746368"))
    assert stats.startswith(bytes.fromhex("de0012a474797065ab6368756e6b5f7374617473"))
    assert b"\xcb" not in stats
    message, told = webui_unpack(frames), webui_unpack(stats)
    assert set(message) == RAW_FIELDS | {"payload"}
    assert set(told) == STATS_FIELDS
    assert (message["content_type"], message["format"], message["encoding"]) == (
        "application/x-raw-rgb",
        "rgb24",
        "raw",
    )
    assert message["total_size"] == message["raw_size"] == FIRST * WIDTH * HEIGHT * 3 == len(message["payload"])
    assert re.fullmatch(r"[0-9a-f]{32}_[0-9a-f]{32}", message["request_id"])
    assert message["request_id"].startswith(told["session_id"] + "_")
    assert told["ws_payload_bytes"] == len(frames)
    assert told["raw_bytes"] == message["total_size"]
    assert told["event_id"] is None


@pytest.mark.parametrize(("width", "height", "inline"), [(48, 32, True), (64, 64, False)])
def test_large_payloads_travel_alone(make_door: MakeDoor, width: int, height: int, inline: bool) -> None:
    """U. From 64 KiB on, a header map and the bytes as the next message."""
    door = make_door(facts={"width": width, "height": height})
    with GenerateClient(door.port) as client:
        client.init(size=f"{width}x{height}", max_chunks=2)
        types = []
        for _ in range(2):
            chunk = client.chunk()
            types += [header["type"] for header in chunk.headers]
            assert chunk.frames().shape == (FIRST if chunk.index == 0 else LATER, height, width, 3)
        assert types == ["frame_batch" if inline else "frame_batch_header"] * len(types)


def test_header_and_payload_stay_together_whatever_else_is_said(make_door: MakeDoor, engine: FakeEngine) -> None:
    """U. A hundred invalid events while chunks are sent: each answered, none between a header and its payload."""
    door = make_door(facts={"width": 128, "height": 64})
    with GenerateClient(door.port) as client:
        client.init(size="128x64", max_chunks=20)
        for number in range(100):
            client.event("dance", number, event_id=number)
        errors, chunks = 0, 0
        while chunks < 20 or errors < 100:  # `receive` takes the message behind a header for its payload
            message = client.receive()
            errors += message["type"] == "error"
            chunks += message["type"] == "chunk_stats"
        assert errors == 100


def test_chunks_are_split_by_frames(make_door: MakeDoor) -> None:
    """U. At most 16 raw frames or 6 encoded ones a message, with the last one flagged."""
    door = make_door(facts={"latent_frames_per_chunk": 5})  # a first chunk of 17 frames
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fake_engine.FIRST", 17)
        for kind, counts in (("raw", [16, 1]), ("jpeg", [6, 6, 5])):
            with GenerateClient(door.port) as client:
                client.init(max_chunks=1, realtime_output_format=kind)
                assert [header["num_frames"] for header in client.chunk().headers] == counts


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_pictures_decode_to_the_size_that_was_told(client: GenerateClient, kind: str) -> None:
    """U. One file a frame, lengths in `payload_lengths`, scaled down to the preview's width and never up."""
    client.init(max_chunks=1, realtime_output_format=kind, realtime_preview_max_width=24, output_compression=90)
    chunk = client.chunk()
    pictures = [Image.open(io.BytesIO(file)) for file in chunk.files()]
    header = chunk.headers[0]
    assert [picture.size for picture in pictures] == [(24, 16)] * FIRST
    assert pictures[0].format == kind.upper()
    assert (header["width"], header["height"]) == (header["preview_width"], header["preview_height"]) == (24, 16)
    assert (header["source_width"], header["source_height"]) == (WIDTH, HEIGHT)
    assert (header["content_type"], header["encoding"], header["format"]) == (f"image/{kind}", kind, kind)
    assert header["bytes_per_frame"] == WIDTH * HEIGHT * 3
    assert len(header) + 1 == 21  # with `payload`, as the original
    for number, picture in enumerate(pictures):
        assert abs(int(np.asarray(picture.convert("RGB"))[8, 12, 0]) - number) <= 3


@pytest.mark.parametrize("kind", ["raw", "delta_gzip", "delta-gzip", None])
def test_lossless_frames_are_lossless(client: GenerateClient, kind: str | None) -> None:
    """Raw bytes (U), or XOR with the frame before and gzip, a chunk at a time."""
    client.init(max_chunks=3, realtime_output_format=kind)
    chunks = [client.chunk() for _ in range(3)]
    assert [number for chunk in chunks for number in chunk.numbers()] == list(range(FIRST + 2 * LATER))
    assert [int(chunk.frames()[0, 0, 0, 0]) for chunk in chunks] == [0, 1, 2]
    if kind is not None and kind.startswith("delta"):
        assert sum(len(payload) for chunk in chunks for payload in chunk.payloads) < chunks[0].stats["raw_bytes"] / 10


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_javascript_reads_our_messages(door: DoorServer) -> None:
    """What a page's decoder makes of them equals what was meant: integers, texts and byte counts."""
    program = """
    const bytes = Buffer.from(process.argv[1], "hex"); const view = new DataView(bytes.buffer, bytes.byteOffset);
    let at = 0; const text = (n) => { at += n; return bytes.toString("utf8", at - n, at); };
    const read = () => { const b = bytes[at++];
      if (b < 0x80) return b; if (b < 0x90) return map(b & 15); if (b < 0xa0) return list(b & 15);
      if (b < 0xc0) return text(b & 31);
      switch (b) { case 0xc0: return null; case 0xc2: return false; case 0xc3: return true;
        case 0xcc: return bytes[at++]; case 0xcd: at += 2; return view.getUint16(at - 2);
        case 0xce: at += 4; return view.getUint32(at - 4); case 0xd9: return text(bytes[at++]);
        case 0xde: at += 2; return map(view.getUint16(at - 2)); }
      throw new Error("lead byte " + b); };
    const map = (n) => { const o = {}; for (let i = 0; i < n; i++) { const k = read(); o[k] = read(); } return o; };
    const list = (n) => Array.from({ length: n }, read);
    console.log(JSON.stringify(read()));"""
    with GenerateClient(door.port) as client:
        client.init(max_chunks=1)
        client.connection.recv()
        stats = client.connection.recv()
    assert isinstance(stats, bytes)
    read = subprocess.run(["node", "-e", program, stats.hex()], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(read.stdout) == webui_unpack(stats)


# -- controls ----------------------------------------------------------------------------------------------------------


def test_without_keys_the_camera_rests(client: GenerateClient, engine: FakeEngine) -> None:
    """One entry a latent frame."""
    client.init(max_chunks=2)
    client.chunk()
    client.chunk()
    assert actions(engine) == [[[], [], []], [[], [], []]]


def test_a_script_in_init_steers_the_first_chunks(client: GenerateClient, engine: FakeEngine) -> None:
    """U. Four entries, three a chunk; the rest, then idle. Unknown keys are ignored."""
    client.init(max_chunks=3, condition_inputs={"camera_actions": [["w"], ["D", "x"], ["a"], ["s"]]})
    for _ in range(3):
        client.chunk()
    assert actions(engine) == [[["w"], ["d"], ["a"]], [["s"], [], []], [[], [], []]]


def test_events_act_from_the_next_chunk_on(client: GenerateClient, engine: FakeEngine) -> None:
    """U. Held keys stay held, a pulse acts once, the id is told with the chunk that used it."""
    engine.delay_s = 0.15
    client.init()
    client.chunk()
    client.state(["w"], event_id=864)
    told = [client.chunk() for _ in range(3)]
    assert [chunk.event_id for chunk in told] == [None, 864, 864]
    assert told[1].stats["event_id"] == 864
    client.state(["l"], [], event_id=865)
    client.chunk()
    assert client.chunk().event_id == 865
    assert actions(engine)[2:4] == [[["w"]] * 3, [["w"]] * 3]
    assert [["l"], [], []] in actions(engine)


def test_a_prompt_switches_once_and_never_in_chunk_0(client: GenerateClient, engine: FakeEngine) -> None:
    """U. The latest of two; the id is not masked by an older key (ours)."""
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


def test_a_composite_event_is_all_or_nothing(client: GenerateClient, engine: FakeEngine) -> None:
    """U. One bad part and nothing of it applies."""
    engine.delay_s = 0.1
    client.init()
    client.chunk()
    parts = {"input_types": ["prompt", "camera_actions"], "prompt": "rain"}
    client.event("composite_input", {**parts, "camera_actions": "w"}, event_id=1)
    client.event("composite_input", {**parts, "camera_actions": [["w"]]}, event_id=2)
    messages = []
    while sum(message["type"] == "chunk_stats" for message in messages) < 4:
        messages.append(client.receive())
    assert [message["content"] for message in messages if message["type"] == "error"] == ["invalid event"]
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
        {"type": "event", "kind": "camera_actions", "payload": {"mode": "state", "transitions": [["w"]]}},
        {"type": "event", "kind": "prompt", "payload": "rain", "event_id": -1},
        {"type": "event", "kind": "prompt", "payload": "rain", "event_id": 1 << 32},
        {"type": "event", "kind": "composite_input", "payload": {"input_types": ["prompt"]}},
        {"type": "control", "op": "pause"},
        INIT,
    ],
)
def test_an_invalid_event_is_one_error_and_the_session_goes_on(
    client: GenerateClient, engine: FakeEngine, event: Any
) -> None:
    """U. Nothing of it applies; extensions that were not asked for do not exist."""
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
    """Ours: the same id again, as after a reconnecting proxy, is ignored."""
    engine.delay_s = 0.1
    client.init()
    client.chunk()
    for _ in range(3):
        client.event("camera_actions", [["w"]], event_id=7)
        client.chunk()
    client.chunk()
    assert sum(call == [["w"], [], []] for call in actions(engine)) == 1


# -- pace --------------------------------------------------------------------------------------------------------------


def test_the_next_chunk_is_made_while_this_one_is_sent(client: GenerateClient, engine: FakeEngine) -> None:
    """U. Ten chunks of 50 ms take little more than half a second."""
    engine.delay_s = 0.05
    client.init(max_chunks=10)
    client.chunk()
    started_s = time.monotonic()
    for _ in range(9):
        client.chunk()
    assert time.monotonic() - started_s < 9 * 0.05 * 1.5
    assert engine.most_running == 1


def test_pacing_spaces_chunks_as_they_play(client: GenerateClient) -> None:
    """U. At 120 frames a second a chunk of 12 lasts 100 ms, though the model needs none."""
    client.init(max_chunks=8, realtime_output_pacing=True, fps=120)
    arrivals, waits = [], []
    for _ in range(8):
        waits.append(client.chunk().stats["pace_wait_ms"])
        arrivals.append(time.monotonic())
    spacing_s = (arrivals[-1] - arrivals[1]) / 6
    assert spacing_s == pytest.approx(LATER / 120, rel=0.1)
    assert waits[0] == 0
    assert sum(waits) > 400


def test_a_reaction_is_not_held_back(client: GenerateClient, engine: FakeEngine) -> None:
    """U. A chunk with a new event goes out at once."""
    client.init(realtime_output_pacing=True, fps=24)
    client.chunk()
    client.chunk()
    client.state(["w"], event_id=1)
    while (chunk := client.chunk()).event_id != 1:
        pass
    assert chunk.stats["pace_wait_ms"] <= 1


# -- extensions --------------------------------------------------------------------------------------------------------


def test_extensions_are_granted_by_name(extended: ExtendedClient) -> None:
    """The first message says which; unknown ones are left out."""
    extended.init(max_chunks=1, extensions=["receipts", "ping", "teleport"])
    session = extended.receive()
    assert (session["type"], session["protocol"], session["granted"]) == ("session", 1, ["receipts", "ping"])
    extended.send({"type": "ping", "t": 1.5})
    assert extended.receive()["type"] in ("pong", "frame_batch")


def test_unknown_extensions_change_nothing(client: GenerateClient) -> None:
    """Nothing granted, nothing said."""
    client.init(max_chunks=1, extensions=["teleport"])
    client.chunk()


def test_receipts_say_what_became_of_an_event(extended: ExtendedClient, engine: FakeEngine) -> None:
    """Accepted at once, then applied in a chunk or superseded, or rejected with a code."""
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
    told = [(ack["event_id"], ack["status"]) for ack in acks if ack["type"] == "event_ack"]
    assert told == [(1, "accepted"), (1, "superseded"), (2, "accepted"), (3, "rejected")]
    assert [(ack["event_id"], ack["chunk_index"]) for ack in acks if ack["type"] == "event_applied"] == [(2, 1)]
    (error,) = [ack for ack in acks if ack["type"] == "error"]
    assert (error["code"], error["content"]) == ("invalid_request", "invalid event")


def test_credit_is_what_may_be_made(extended: ExtendedClient, engine: FakeEngine) -> None:
    """No credit, no chunk; each credit one."""
    extended.init(extensions=["credit"])
    extended.receive()
    time.sleep(0.1)
    assert engine.chunks == []
    extended.send({"type": "credit", "chunks": 2})
    assert [extended.chunk().index, extended.chunk().index] == [0, 1]
    time.sleep(0.1)
    assert len(engine.chunks) == 2
    extended.send({"type": "credit", "chunks": 1})
    assert extended.chunk().index == 2


def test_pause_resume_reset_and_stop(extended: ExtendedClient, engine: FakeEngine) -> None:
    """A paused session costs the engine nothing; reset begins the same world again; stop closes normally."""
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
    time.sleep(0.15)
    assert len(engine.chunks) == made
    result("resume")
    wait_until(lambda: len(engine.chunks) > made)
    result("reset")
    assert extended.chunk().index == 0
    result("stop")
    assert extended.close_code() == (1000, "stopped by the client")


def test_a_paused_session_without_a_word_is_idle(make_door: MakeDoor, engine: FakeEngine) -> None:
    """It would keep its place for ever."""
    with ExtendedClient(make_door(idle_timeout_s=0.3).port) as client:
        client.init(extensions=["credit"])
        client.receive()
        assert client.close_code()[0] == 4010


def test_no_compression_is_negotiated(door: DoorServer) -> None:
    """Browsers always offer it; it would cost a core for fifty sessions."""
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{door.port}{PATHS[0]}") as connection:
        assert connection.response is not None
        assert "Sec-WebSocket-Extensions" not in connection.response.headers


def test_an_oversized_message_closes_with_1009(client: GenerateClient) -> None:
    """U. The limit is the server's `--ws-max-size`."""
    with contextlib.suppress(ConnectionClosed):
        client.send(bytes((1 << 20) + 1))
    assert client.close_code()[0] == 1009
