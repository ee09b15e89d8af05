# SPDX-License-Identifier: Apache-2.0
"""Sessions of `/v1/realtime/world/camera` over requests and connections: repetition, resume,
branches, capacity.
"""

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
from helpers.waits import pause, wait_until

MakeEndpoint = Callable[..., EndpointServer]


def test_a_repeated_request_gets_the_same_response(client: Client, engine: FakeEngine) -> None:
    """The engine is asked once; another body under the same id is a conflict."""
    client.send(infer(request_id="r1"))
    first = client.frames()
    client.send(infer(request_id="r1"))
    again = client.frames()
    assert len(engine.chunks) == 1
    np.testing.assert_array_equal(first[0]["video"], again[0]["video"])
    assert client.error(infer(request_id="r1", prompt="other")) == "request_id_conflict"


def test_a_request_cut_off_continues_when_repeated(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """A client may send the same request until it is answered: no frame is lost, none is
    generated twice.
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
    """The older connection is closed with 4009, the newer one gets every message."""
    engine.delay_s = 0.3
    request = infer(FIRST + LATER, request_id="r1", session_id="a")
    with endpoint.client() as old, endpoint.client() as new:
        old.send(request)
        assert old.receive()["index"] == 0
        new.send(request)
        assert [message["index"] for message in new.frames()] == [0, 1]
        assert close_code(old) == 4009
    assert len(engine.chunks) == 2


def test_resume_replays_what_was_missed(endpoint: EndpointServer, engine: FakeEngine) -> None:
    """Frames after the last chunk the client has come again; too far back is `resync_required`."""
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


def test_resume_beyond_the_delivery_log_requests_for_a_resync(make_endpoint: MakeEndpoint) -> None:
    """The journal is bounded in bytes."""
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


def test_chunk_index_is_a_lock(client: Client) -> None:
    """A request for another chunk than the next is refused and says which one is."""
    client.send(infer(chunk_index=0))
    client.frames()
    error = client.request(infer(LATER, image=None, chunk_index=5))
    assert (error["code"], error["expected"]) == ("out_of_order", 1)
    client.send(infer(LATER, image=None, chunk_index=1))
    client.frames()


def test_a_third_request_of_a_session_is_busy(client: Client, engine: FakeEngine) -> None:
    """One runs, one waits; the waiting one follows on."""
    engine.delay_s = 0.2
    client.send(infer())
    client.send(infer(LATER, image=None))
    assert client.error(infer(LATER, image=None, request_id="third")) == "session_busy"
    assert client.frames()[0]["chunk_index"] == 0
    assert client.frames()[0]["chunk_index"] == 1


def test_branches_go_their_own_way(client: Client, engine: FakeEngine) -> None:
    """A branch continues from where its parent was; the parent does not notice."""
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


def test_capacity_is_said_at_once_and_comes_back(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A session in use is never evicted; a client without any session is closed with 1013."""
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


def test_a_new_world_waits_for_the_room_of_an_old_one(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Restarting and evicting free a world first: an engine that is full never sees one too
    many.
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


def test_an_evicted_session_says_so(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """A session left alone is closed, in the engine too; continuing it is a retryable error, not
    a surprise.
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
    """For as long as `pinged_session_idle_s`; a client that falls silent loses it after
    `session_idle_s`.
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


def test_pings_do_not_keep_a_session_for_ever(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    endpoint = make_endpoint(info={"session_idle_s": 0.1}, pinged_session_idle_s=0.5)
    with endpoint.client() as client:
        client.send(infer(session_id="a"))
        client.frames()
        wait_until(
            lambda: client.request({"endpoint": "ping"})["type"] == "pong" and not engine.worlds
        )


def test_a_session_that_only_pings_keep_makes_room(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Once it has been without requests for `session_idle_s`: visitors who are away do not keep
    others out.
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


def test_a_disposable_branch_makes_room(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """Another branch does not: its client is connected."""
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
    """The client hears it in the door's words and may begin again."""
    client.send(infer())
    client.frames()
    engine.worlds.clear()
    assert client.error(infer(LATER, image=None)) == "session_evicted"
    client.send(infer())
    assert client.frames()[0]["chunk_index"] == 0


def test_principals_do_not_share_session_ids(endpoint: EndpointServer, engine: FakeEngine) -> None:
    """The same id under another key is another world."""
    for token in ("one", "two"):
        with endpoint.client(additional_headers={"Authorization": f"Bearer {token}"}) as client:
            client.send(infer(session_id="a"))
            assert client.frames()[0]["chunk_index"] == 0
    assert len(engine.worlds) == 2
