# SPDX-License-Identifier: Apache-2.0
"""Sessions at `/v1/realtime/world/camera` across requests and connections: repeated requests,
resuming, branches and capacity.
"""

import socket
from collections.abc import Callable

import numpy as np
from helpers.fake_engine import (
    FIRST,
    LATER,
    Client,
    EndpointServer,
    FakeEngine,
    close_code,
    infer,
    numbers,
)
from helpers.waits import pause, seconds, wait_until

MakeEndpoint = Callable[..., EndpointServer]


def test_a_repeated_request_gets_the_same_response(client: Client, engine: FakeEngine) -> None:
    """A repeated request reaches the engine only once. A request with the same id but a different
    body is a conflict.
    """
    client.send(infer(request_id="r1"))
    first = client.frames()
    client.send(infer(request_id="r1"))
    again = client.frames()
    assert len(engine.chunks) == 1
    np.testing.assert_array_equal(first[0]["video"], again[0]["video"])
    assert client.error(infer(request_id="r1", prompt="other")) == "request_id_conflict"


def test_an_interrupted_request_continues_when_repeated(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """A client may send an interrupted request again until it is complete. No frame is lost and
    none is generated twice.
    """
    request = infer(FIRST + 3 * LATER, request_id="r1", session_id="a")
    engine.delay_s = 0.1
    with endpoint.client() as client:
        client.send(request)
        assert client.receive()["index"] == 0
    wait_until(lambda: engine.running == 0)
    with endpoint.client() as client:
        client.send(request)
        messages = client.frames()
    assert [message["index"] for message in messages] == [0, 1, 2, 3]
    assert numbers(messages) == list(range(FIRST + 3 * LATER))
    assert next(iter(engine.worlds.values())).chunk_index == 4


def test_a_running_request_can_be_taken_over(endpoint: EndpointServer, engine: FakeEngine) -> None:
    """When another connection takes over a running request, the older connection is closed with
    4009, and the newer connection gets every message.
    """
    engine.delay_s = 0.3
    request = infer(FIRST + LATER, request_id="r1", session_id="a")
    with endpoint.client() as old, endpoint.client() as new:
        old.send(request)
        assert old.receive()["index"] == 0
        new.send(request)
        assert [message["index"] for message in new.frames()] == [0, 1]
        assert close_code(old) == 4009
    assert len(engine.chunks) == 2


def test_resume_replays_missed_chunks(endpoint: EndpointServer, engine: FakeEngine) -> None:
    """On resume, the server sends the frames after the client's last chunk again."""
    with endpoint.client() as client:
        session_id = client.hello["session_id"]
        client.send(infer(FIRST + 2 * LATER))
        client.frames()
    with endpoint.client() as client:
        resumed = client.request(
            {"endpoint": "resume", "session_id": session_id, "last_chunk_id": 0}
        )
        assert (resumed["type"], resumed["next_chunk_index"], resumed["replayed"]) == (
            "resumed",
            3,
            2,
        )
        assert [client.receive()["chunk_id"], client.receive()["chunk_id"]] == [1, 2]
        client.send(infer(LATER, session_id=session_id, image=None))
        assert client.frames()[0]["chunk_id"] == 3


def test_resume_beyond_the_delivery_log_requires_a_resync(make_endpoint: MakeEndpoint) -> None:
    """Resuming from a chunk that is no longer in the delivery log requires a resync, because the
    size of the log is limited.
    """
    endpoint = make_endpoint(delivery_log_bytes=2 * LATER * 32 * 48 * 3)
    with endpoint.client() as client:
        session_id = client.hello["session_id"]
        client.send(infer(FIRST + 4 * LATER))
        client.frames()
    with endpoint.client() as client:
        refused = client.request(
            {"endpoint": "resume", "session_id": session_id, "last_chunk_id": 0}
        )
        assert (refused["code"], refused["next_chunk_index"]) == ("resync_required", 5)
        assert (
            client.request({"endpoint": "resume", "session_id": session_id, "last_chunk_id": 3})[
                "replayed"
            ]
            == 1
        )


def test_a_wrong_chunk_index_is_refused(client: Client) -> None:
    """A request for a chunk other than the next chunk is refused with the expected index."""
    client.send(infer(chunk_index=0))
    client.frames()
    error = client.request(infer(LATER, image=None, chunk_index=5))
    assert (error["code"], error["expected"]) == ("out_of_order", 1)
    client.send(infer(LATER, image=None, chunk_index=1))
    client.frames()


def test_a_third_request_of_a_session_is_busy(client: Client, engine: FakeEngine) -> None:
    """A session accepts one running and one waiting request. A third request gets
    `session_busy`.
    """
    engine.delay_s = 0.2
    client.send(infer())
    client.send(infer(LATER, image=None))
    assert client.error(infer(LATER, image=None, request_id="third")) == "session_busy"
    assert client.frames()[0]["chunk_index"] == 0
    assert client.frames()[0]["chunk_index"] == 1


def test_branches_are_independent(client: Client, engine: FakeEngine) -> None:
    """A branch continues from its parent's position, and the parent does not change."""
    client.send(infer(FIRST + LATER, session_id="a"))
    client.frames()
    response = client.request({"endpoint": "branch", "session_id": "a", "new_session_id": "b"})
    assert (response["type"], response["session_id"], response["next_chunk_index"]) == (
        "branched",
        "b",
        2,
    )
    for session_id, last in (("b", 3), ("b", 4), ("a", 3)):
        client.send(infer(LATER, session_id=session_id, image=None))
        assert client.frames()[0]["chunk_index"] == last - 1
    assert len(engine.worlds) == 2
    assert (
        client.error({"endpoint": "branch", "session_id": "a", "new_session_id": "b"})
        == "invalid_request"
    )


def test_a_full_server_refuses_at_once_and_accepts_again_after_a_disconnect(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """On a full server, a new session is refused immediately, and the connection of a client
    without a session is closed with 1013. A session in use is never evicted.
    """
    endpoint = make_endpoint(info={"max_sessions": 2})
    with endpoint.client() as first, endpoint.client() as second:
        for client in (first, second):
            client.send(infer())
            client.frames()
        with endpoint.client() as third:
            refused = third.request(infer())
            assert (refused["code"], refused["retryable"]) == ("capacity", True)
            assert close_code(third) == 1013
        first.connection.close()
        with endpoint.client() as third:
            wait_until(
                lambda: (
                    not any(
                        len(s.connections) == 0 and s.is_busy for s in endpoint.manager.sessions()
                    )
                )
            )
            third.send(infer())
            third.frames()
    wait_until(lambda: len(engine.worlds) == 2)


def test_a_session_whose_connection_broke_is_not_evicted_at_once(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """For `reconnect_grace_s`, its client can reconnect and continue on a full server."""
    endpoint = make_endpoint(info={"max_sessions": 1}, reconnect_grace_s=seconds(1.5))
    broken = endpoint.client()
    broken.send(infer(session_id="a"))
    broken.frames()
    broken.connection.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not any(session.connections for session in endpoint.manager.sessions()))
    with endpoint.client() as other:
        assert other.request(infer(session_id="b"))["code"] == "capacity"
    with endpoint.client() as again:
        again.send(infer(LATER, session_id="a", image=None))
        assert again.frames()[0]["chunk_index"] == 1
        again.connection.socket.shutdown(socket.SHUT_RDWR)
    with endpoint.client() as other:
        wait_until(lambda: endpoint.manager.has_room)
        other.send(infer(session_id="b"))
        other.frames()


def test_a_new_session_waits_until_the_old_one_is_freed(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A restart or an eviction frees the old session before the new session starts, so a full
    engine never holds more sessions than it has capacity for.
    """
    engine.max_worlds, engine.close_delay_s = 1, 0.2
    endpoint = make_endpoint(info={"max_sessions": 1})
    with endpoint.client() as client:
        client.send(infer())
        client.frames()
        client.send(infer(restart=True))
        client.frames()
    wait_until(lambda: not any(session.connections for session in endpoint.manager.sessions()))
    with endpoint.client() as client:
        client.send(infer())
        client.frames()
        assert len(engine.worlds) == 1


def test_an_evicted_session_is_reported(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """An evicted idle session is closed in the engine too. A client that continues an evicted
    session gets a retryable error.
    """
    endpoint = make_endpoint(info={"session_idle_s": 0.2})
    with endpoint.client() as client:
        client.send(infer(session_id="a"))
        client.frames()
        wait_until(lambda: not engine.worlds)
        assert client.error(infer(LATER, session_id="a", image=None)) == "session_evicted"
        client.send(infer(session_id="a"))
        assert client.frames()[0]["chunk_index"] == 0


def test_pings_keep_a_session_without_requests(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Pings keep a session without requests alive for `pinged_session_idle_s`. Without pings, an
    idle session is closed after `session_idle_s`.
    """
    endpoint = make_endpoint(info={"session_idle_s": 0.3}, pinged_session_idle_s=60.0)
    with endpoint.client() as client, endpoint.client() as silent:
        for each, session_id in ((client, "a"), (silent, "b")):
            each.send(infer(session_id=session_id))
            each.frames()
        for _ in range(15):
            assert client.request({"endpoint": "ping"})["type"] == "pong"
            pause(0.1)
        assert len(engine.worlds) == 1
        client.send(infer(LATER, session_id="a", image=None))
        assert client.frames()[0]["chunk_index"] == 1
        wait_until(lambda: not engine.worlds)


def test_pings_keep_a_session_for_a_limited_time(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    endpoint = make_endpoint(info={"session_idle_s": 0.1}, pinged_session_idle_s=0.5)
    with endpoint.client() as client:
        client.send(infer(session_id="a"))
        client.frames()
        wait_until(
            lambda: client.request({"endpoint": "ping"})["type"] == "pong" and not engine.worlds
        )


def test_a_session_kept_by_pings_alone_can_be_evicted(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A session that only pings have kept alive for `session_idle_s` can be evicted, so absent
    users do not block other users.
    """
    endpoint = make_endpoint(
        info={"max_sessions": 1, "session_idle_s": 0.5}, pinged_session_idle_s=60.0
    )
    with endpoint.client() as away:
        away.send(infer(session_id="a"))
        away.frames()
        with endpoint.client() as other:
            assert other.request(infer(session_id="b"))["code"] == "capacity"
        for _ in range(8):
            away.request({"endpoint": "ping"})
            pause(0.1)
        with endpoint.client() as other:
            other.send(infer(session_id="b"))
            other.frames()
        assert away.error(infer(LATER, session_id="a", image=None)) == "session_evicted"


def test_a_disposable_branch_can_be_evicted(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A disposable branch can be evicted. Any other branch is not evicted while its client is
    connected.
    """
    endpoint = make_endpoint(info={"max_sessions": 2})
    with endpoint.client() as client, endpoint.client() as other:
        client.send(infer(session_id="a"))
        client.frames()
        client.request({"endpoint": "branch", "session_id": "a", "new_session_id": "kept"})
        assert other.request(infer(session_id="b"))["code"] == "capacity"
        client.request({"endpoint": "close", "session_id": "kept"})
        client.request(
            {"endpoint": "branch", "session_id": "a", "new_session_id": "spare", "disposable": True}
        )
        with endpoint.client() as third:
            third.send(infer(session_id="b"))
            assert third.frames()[0]["chunk_index"] == 0


def test_a_session_the_engine_lost_is_evicted(client: Client, engine: FakeEngine) -> None:
    """If the engine has lost a session, the session's client gets `session_evicted` and can start a
    new session.
    """
    client.send(infer())
    client.frames()
    engine.worlds.clear()
    assert client.error(infer(LATER, image=None)) == "session_evicted"
    client.send(infer())
    assert client.frames()[0]["chunk_index"] == 0


def test_api_keys_do_not_share_session_ids(endpoint: EndpointServer, engine: FakeEngine) -> None:
    """API keys do not share sessions: the same session id with a different API key refers to a
    different session.
    """
    for token in ("one", "two"):
        with endpoint.client(additional_headers={"Authorization": f"Bearer {token}"}) as client:
            client.send(infer(session_id="a"))
            assert client.frames()[0]["chunk_index"] == 0
    assert len(engine.worlds) == 2
