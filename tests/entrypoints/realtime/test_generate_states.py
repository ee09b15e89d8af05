# SPDX-License-Identifier: Apache-2.0
"""Messages of `/v1/realtime_video/generate` in any order: a model of what must come back, driven
by hypothesis.
"""

from typing import Any

from helpers.fake_engine import EndpointServer, FakeEngine, first_frame_of
from helpers.live_clients import ExtendedClient
from helpers.waits import wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo

KEYS = st.lists(st.sampled_from(["w", "a", "l", "x"]), max_size=3)
BAD = [
    b"\xc1",
    {"type": "event", "kind": "dance"},
    {"type": "event", "kind": "prompt", "payload": ""},
    {"type": "event", "kind": "camera_actions", "payload": 5},
    {"type": "credit", "chunks": 0},
    {"type": "init", "prompt": "again"},
]


class GenerateStates(RuleBasedStateMachine):
    """One connection with credit and receipts, so that chunks come exactly when they are asked for.

    Invariants: chunk and frame numbers are contiguous; each event has one receipt and at most one
    fate; each mistake one error; the engine holds one world while a session runs and none
    otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine()
        info = StreamInfo(height=32, width=48, max_sessions=2)
        self.endpoint = EndpointServer(self.engine, EndpointLimits(), info).__enter__()
        self.connect()

    def connect(self) -> None:
        self.client = ExtendedClient(self.endpoint.port)
        self.running = False
        self.next_chunk = 0
        self.next_event = 1
        self.open_events: set[int] = set()
        self.applied: set[int] = set()

    def teardown(self) -> None:
        self.client.__exit__()
        self.endpoint.__exit__()

    def receive(self, kind: str) -> dict[str, Any]:
        message = self.client.receive()
        assert message["type"] == kind, message
        return message

    @initialize()
    def start(self) -> None:
        self.start_now()

    @precondition(lambda self: not self.running)
    @rule()
    def start_now(self) -> None:
        """A valid init starts a session."""
        self.client.init(extensions=["credit", "receipts", "control", "ping"])
        self.receive("session")
        self.running = True

    @precondition(lambda self: not self.running)
    @rule(bad=st.sampled_from([*BAD[:-1], {"type": "init"}, "text"]))
    def bad_init(self, bad: Any) -> None:
        """One error; the connection waits on."""
        if bad == "text" and getattr(self, "texts", 0) >= 2:
            return
        self.texts = getattr(self, "texts", 0) + (bad == "text")
        self.client.send(bad)
        assert self.receive("error")["content"] == "invalid generate request"

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 3))
    def chunks(self, count: int) -> None:
        """As many chunks as credit was given, in order, each with its frames; events act in
        them.
        """
        self.client.send({"type": "credit", "chunks": count})
        wanted = self.next_chunk + count
        while self.next_chunk < wanted:
            message = self.client.receive()
            if message["type"] == "event_applied":
                self.apply(message)
            elif message["type"] == "frame_batch":
                frame = int(message["payload"][(1 * 48 + 1) * 3])
                assert message["chunk_index"] == self.next_chunk
                assert frame == first_frame_of(self.next_chunk) % 256
            else:
                assert (message["type"], message["chunk_index"]) == ("chunk_stats", self.next_chunk)
                self.next_chunk += 1

    def apply(self, message: dict[str, Any]) -> None:
        assert message["event_id"] in self.open_events
        self.open_events.discard(message["event_id"])
        self.applied.add(message["event_id"])

    @precondition(lambda self: self.running)
    @rule(
        held=st.lists(KEYS, max_size=3),
        script=st.booleans(),
        prompt=st.sampled_from([None, "rain", "snow"]),
    )
    def event(self, held: list[list[str]], script: bool, prompt: str | None) -> None:
        """Accepted; what it replaces before that acted is superseded, once."""
        keys: Any = (
            held if script else {"mode": "state", "transitions": [{"actions": one} for one in held]}
        )
        if prompt is not None:
            keys = {
                "input_types": ["prompt", "camera_actions"],
                "prompt": prompt,
                "camera_actions": keys,
            }
        kind = "camera_actions" if prompt is None else "composite_input"
        self.client.event(kind, keys, self.next_event)
        while True:
            message = self.client.receive()
            if message["type"] == "event_applied":
                self.apply(message)
                continue
            assert message["type"] == "event_ack", message
            if message["status"] == "accepted":
                assert message["event_id"] == self.next_event
                break
            assert message["status"] == "superseded"
            assert message["event_id"] in self.open_events
            self.open_events.discard(message["event_id"])
        self.open_events.add(self.next_event)
        self.next_event += 1

    @precondition(lambda self: self.running)
    @rule(bad=st.sampled_from(BAD))
    def bad_event(self, bad: Any) -> None:
        """One error with its code; nothing changes."""
        self.client.send(bad)
        while (message := self.client.receive())["type"] == "event_applied":
            self.apply(message)
        assert (message["type"], message["content"]) == ("error", "invalid event")

    @precondition(lambda self: self.running)
    @rule()
    def reset(self) -> None:
        """The world begins again with chunk 0; credit stays, events are forgotten."""
        self.client.send({"type": "control", "op": "reset", "id": 1})
        while (message := self.client.receive())["type"] == "event_applied":
            self.apply(message)
        assert (message["type"], message["op"]) == ("control_result", "reset")
        self.next_chunk = 0
        self.open_events.clear()

    @rule(politely=st.booleans())
    def reconnect(self, politely: bool) -> None:
        """A new connection is a new session; the old one leaves nothing."""
        if politely and self.running:
            self.client.send({"type": "control", "op": "stop", "id": "x"})
            assert self.client.close_code() == (1000, "stopped by the client")
        self.client.__exit__()
        self.texts = 0
        self.connect()

    @invariant()
    def the_engine_agrees(self) -> None:
        """One world for a session that has begun, and nothing runs between chunks."""
        if hasattr(self, "client"):
            started = int(self.running and self.next_chunk > 0)
            wait_until(lambda: len(self.engine.worlds) == started and not self.engine.running)
            wait_until(lambda: len(self.endpoint.manager) == int(self.running))
            if started:
                (world,) = self.engine.worlds.values()
                assert world.chunk_index == self.next_chunk
            wait_until(lambda: self.endpoint.manager.held_bytes == 0)


GenerateStates.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestGenerateStates = GenerateStates.TestCase
