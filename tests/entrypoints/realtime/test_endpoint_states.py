# SPDX-License-Identifier: Apache-2.0
"""Stateful test of the camera endpoint: Hypothesis sends messages in any order over a real socket
and compares the endpoint's behaviour with a model of its sessions.
"""

from typing import Any

from helpers.fake_engine import FIRST, LATER, Client, EndpointServer, FakeEngine, camera, infer
from helpers.waits import wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo

NAMES = st.sampled_from(["a", "b", "c"])
MAX_SESSIONS = 2


class EndpointStates(RuleBasedStateMachine):
    """Model of the endpoint's state. `next_chunk` holds the index of the next chunk of each live
    session. Only one connection is open at a time; `reconnect` replaces it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine()
        info = StreamInfo(height=32, width=48, max_sessions=MAX_SESSIONS)
        self.endpoint = EndpointServer(self.engine, EndpointLimits(), info).__enter__()
        self.client: Client = self.endpoint.client()
        self.next_chunk: dict[str, int] = {}
        self.answered: dict[str, tuple[dict[str, Any], list[int]]] = {}

    def teardown(self) -> None:
        self.client.__exit__()
        self.endpoint.__exit__()

    def expect(self, message: dict[str, Any], chunks: int) -> list[int]:
        """Send an infer message, check its frames and `done`, and return the indices of its
        chunks.
        """
        name = message["session_id"]
        first = self.next_chunk.get(name, 0)
        self.client.send(message)
        indices = [frame["chunk_index"] for frame in self.client.frames()]
        assert indices == list(range(first, first + chunks))
        assert self.client.receive()["type"] == "done"
        self.next_chunk[name] = first + chunks
        return indices

    @rule(name=NAMES, more=st.integers(0, 2), data=st.data())
    def start(self, name: str, more: int, data: st.DataObject) -> None:
        """An infer message with an image starts or restarts a session, or is refused if the server
        is full.
        """
        message = infer(FIRST + more * LATER, session_id=name, protocol_version=1)
        if name in self.next_chunk:
            message["restart"] = True
            self.next_chunk[name] = 0
            self.answered = {
                key: value for key, value in self.answered.items() if value[0]["session_id"] != name
            }
        if name not in self.next_chunk and len(self.next_chunk) == MAX_SESSIONS:
            assert self.client.error(message) == "capacity"
            return
        message["request_id"] = f"r{len(self.engine.calls)}"
        self.answered[message["request_id"]] = (message, self.expect(message, 1 + more))

    @rule(name=NAMES, chunks=st.integers(1, 2))
    def continue_session(self, name: str, chunks: int) -> None:
        """An infer message without an image continues a live session and is refused otherwise."""
        message = infer(chunks * LATER, session_id=name, image=None, protocol_version=1)
        if name in self.next_chunk:
            self.expect(message, chunks)
        elif len(self.next_chunk) == MAX_SESSIONS:
            assert self.client.error(message) == "capacity"
        else:
            assert self.client.error(message) == "missing_image"

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A repeated request returns the same chunks and does not advance the session."""
        message, chunks = data.draw(st.sampled_from(list(self.answered.values())))
        self.client.send(message)
        assert [frame["chunk_index"] for frame in self.client.frames()] == chunks
        assert self.client.receive()["type"] == "done"

    @rule(name=NAMES, endpoint=st.sampled_from(["reset", "close"]))
    def end(self, name: str, endpoint: str) -> None:
        """The `reset` and `close` messages both free the session, and both succeed even if the
        session does not exist.
        """
        response = self.client.request(
            {"endpoint": endpoint, "session_id": name, "protocol_version": 1}
        )
        assert response["type"] == {"reset": "reset", "close": "closed"}[endpoint]
        self.next_chunk.pop(name, None)
        self.answered = {
            key: value for key, value in self.answered.items() if value[0]["session_id"] != name
        }

    @rule(name=NAMES)
    def stop(self, name: str) -> None:
        """A `stop` message without a running request has no effect."""
        response = self.client.request({"endpoint": "stop", "session_id": name})
        assert response["next_chunk_index"] == self.next_chunk.get(name, 0)

    @rule(name=NAMES, other=NAMES)
    def branch(self, name: str, other: str) -> None:
        """A branch copies a live session to a new name if that name is unused and the server has
        capacity.
        """
        response = self.client.request(
            {"endpoint": "branch", "session_id": name, "new_session_id": other}
        )
        if name not in self.next_chunk:
            assert response["code"] == "session_evicted"
        elif other in self.next_chunk:
            assert response["code"] == "invalid_request"
        elif len(self.next_chunk) == MAX_SESSIONS:
            assert response["code"] == "capacity"
        else:
            assert response["next_chunk_index"] == self.next_chunk[name]
            self.next_chunk[other] = self.next_chunk[name]

    @rule(
        name=NAMES,
        message=st.sampled_from([{"cameras": None}, {"cameras": camera(10)}, {"endpoint": "x"}]),
    )
    def mistake(self, name: str, message: dict[str, Any]) -> None:
        """An invalid message gets exactly one typed error."""
        assert (
            self.client.request(infer(**{"session_id": name, "image": None, **message}))["type"]
            == "error"
        )

    @rule()
    def reconnect(self) -> None:
        """Sessions outlive their connection."""
        self.client.__exit__()
        self.client = self.endpoint.client()
        for name in self.next_chunk:  # prevents eviction by a new session
            response = self.client.request(
                {"endpoint": "resume", "session_id": name, "last_chunk_id": 10_000}
            )
            assert response["next_chunk_index"] == self.next_chunk[name]

    @invariant()
    def the_engine_agrees(self) -> None:
        """The engine holds exactly the live sessions. Between messages, no request is running and
        no message is undelivered.
        """
        if hasattr(self, "client"):
            assert self.client.request({"endpoint": "ping", "t": 1.0})["type"] == "pong"
            assert self.engine.running == 0
            live = sorted(self.next_chunk.values())  # freed in the background
            wait_until(
                lambda: sorted(world.chunk_index for world in self.engine.worlds.values()) == live
            )


EndpointStates.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestEndpointStates = EndpointStates.TestCase
