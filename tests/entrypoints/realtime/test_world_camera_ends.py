# SPDX-License-Identifier: Apache-2.0
"""How requests and connections of `/v1/realtime/world/camera` end: reset, stop, disconnects,
deadlines.
"""

import socket
import struct
import time
from collections.abc import Callable

from helpers.fake_engine import FIRST, LATER, Client, EndpointServer, FakeEngine, close_code, infer
from helpers.waits import seconds, wait_until

from vllm_omni.entrypoints.realtime.connection import codec
from vllm_omni.entrypoints.realtime.world_camera.handler import PATHS

MakeEndpoint = Callable[..., EndpointServer]


def test_reset_starts_a_new_world(client: Client, engine: FakeEngine) -> None:
    """After reset an image is needed again and chunks count from 0; the engine has freed the old
    world.
    """
    client.send(infer())
    client.frames()
    old = engine.chunks[0].params.session_id
    assert client.request({"endpoint": "reset"}) == "reset successful"
    assert client.error(infer(LATER, image=None)) == "missing_image"
    client.send(infer())
    assert client.frames()[0]["chunk_index"] == 0
    assert old not in engine.worlds


def test_reset_of_nothing_succeeds_and_speaks_both_dialects(client: Client) -> None:
    """Idempotent; clients that announce the protocol get a map."""
    assert client.request({"endpoint": "reset", "session_id": "nobody"}) == "reset successful"
    response = client.request({"endpoint": "reset", "protocol_version": 1})
    assert response == {
        "type": "reset",
        "status": "reset successful",
        "session_id": client.hello["session_id"],
    }


def test_reset_cancels_the_running_request(client: Client, engine: FakeEngine) -> None:
    """Its request ends with `cancelled`, its chunks are aborted in the engine."""
    engine.delay_s = 5.0
    client.send(infer(request_id="r1"))
    wait_until(lambda: engine.running == 1)
    client.send({"endpoint": "reset", "protocol_version": 1})
    responses = {client.receive()["type"]: True, client.receive()["type"]: True}
    assert set(responses) == {"error", "reset"}
    assert len(engine.aborted) == 1
    assert engine.running == 0


def test_stop_keeps_the_world_and_close_frees_it(client: Client, engine: FakeEngine) -> None:
    """Naming a session acts on it; naming none also ends the connection."""
    client.send(infer(session_id="a"))
    client.frames()
    stopped = client.request({"endpoint": "stop", "session_id": "a"})
    assert (stopped["type"], stopped["next_chunk_index"]) == ("stopped", 1)
    assert len(engine.worlds) == 1
    assert client.request({"endpoint": "close", "session_id": "a"})["type"] == "closed"
    wait_until(lambda: not engine.worlds)
    assert client.request({"endpoint": "stop"})["type"] == "stopped"
    assert close_code(client) == 1000


def test_disconnect_aborts_the_running_chunk_at_once(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """An abrupt end (RST) in the middle of a chunk frees the engine long before the chunk would
    have ended.
    """
    engine.delay_s = 5.0
    client = endpoint.client()
    client.send(infer(FIRST + LATER))
    wait_until(lambda: engine.running == 2)
    raw = client.connection.socket
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.shutdown(socket.SHUT_RD)
    raw.close()
    started_s = time.monotonic()
    wait_until(lambda: engine.running == 0, 2.0)
    assert time.monotonic() - started_s < seconds(1.0)
    assert len(engine.aborted) == 2
    client.connection.close()


def test_a_first_chunk_cut_off_leaves_no_world(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """The session begins afresh; the engine is told to forget what it may have begun."""
    engine.delay_s = 0.5
    with endpoint.client() as client:
        client.send(infer(session_id="a"))
        wait_until(lambda: engine.running == 1)
    wait_until(lambda: not engine.worlds and not len(endpoint.manager))
    engine.delay_s = 0.0
    with endpoint.client() as client:
        assert client.error(infer(session_id="a", image=None)) == "missing_image"


def test_a_session_survives_a_cut_and_finds_its_place(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """After an abort the door asks the engine where it is, and goes on there."""
    with endpoint.client() as client:
        client.send(infer(session_id="a"))
        client.frames()
        engine.delay_s = 1.0
        client.send(infer(2 * LATER, session_id="a", image=None))
        wait_until(lambda: engine.running == 2)
    wait_until(lambda: engine.running == 0)
    # as if the abort had come a moment too late
    next(iter(engine.worlds.values())).chunk_index += 1
    engine.delay_s = 0.0
    with endpoint.client() as client:
        client.send(infer(2 * LATER, session_id="a", image=None))
        assert [message["chunk_index"] for message in client.frames()] == [2, 3]


def test_idle_connections_are_closed_with_4010(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Waiting for a chunk is not idling."""
    with make_endpoint(idle_timeout_s=0.3).client() as client:
        engine.delay_s = 1.0
        client.send(infer())
        client.frames()
        assert client.receive()["code"] == "timeout"
        assert close_code(client) == 4010


def test_a_chunk_that_takes_too_long_is_dropped(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """The client gets `timeout`, the engine an abort."""
    with make_endpoint(chunk_timeout_s=0.2).client() as client:
        engine.delay_s = 5.0
        assert client.error(infer()) == "timeout"
        assert len(engine.aborted) == 1


def test_a_client_that_never_reads_is_disconnected(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """It loses its connection within the send deadline; the engine does not work ahead for it;
    others go on.
    """
    endpoint = make_endpoint(info={"height": 480, "width": 832}, send_deadline_s=1.0)
    size = {"height": 480, "width": 832, "video_format": "ndarray_u8"}
    deaf = socket.create_connection(("127.0.0.1", endpoint.port))
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    from websockets.client import ClientProtocol
    from websockets.uri import parse_uri

    protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{endpoint.port}{PATHS[0]}"))
    protocol.send_request(protocol.connect())
    for data in protocol.data_to_send():
        deaf.sendall(data)
    while not protocol.handshake_exc and protocol.state.name == "CONNECTING":
        protocol.receive_data(deaf.recv(4096))
    protocol.send_binary(codec.encode(infer(FIRST + 20 * LATER, extra_body=size)))
    for data in protocol.data_to_send():
        deaf.sendall(data)
    wait_until(lambda: len(engine.chunks) > 1)
    # the kernel's own timeout comes at 3 s
    wait_until(lambda: not endpoint.server.server_state.connections, 2.5)
    assert len(engine.chunks) <= 8
    wait_until(lambda: engine.running == 0)
    deaf.close()
    with endpoint.client() as client:
        client.send(infer(session_id="other", extra_body=size))
        client.frames()
