# SPDX-License-Identifier: Apache-2.0
"""Spectators of a session: they join with tokens, share one encoding, and have no effect on the
player.
"""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, Client, EndpointServer, infer
from helpers.waits import wait_until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.codec import decode
from vllm_omni.entrypoints.realtime.encoding.frames import EncodedPart, FrameStamp
from vllm_omni.entrypoints.realtime.encoding.h264 import H264Encoder
from vllm_omni.entrypoints.realtime.spectators.audience import MAX_SPECTATORS, Audience, Spectator
from vllm_omni.entrypoints.realtime.spectators.tokens import MAX_TOKENS, SpectatorTokens


def create_token(endpoint: EndpointServer, session_id: str, query: str = "") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
    connection.request("POST", f"/v1/sessions/{session_id}/spectators{query}")
    response = connection.getresponse()
    reply = json.loads(response.read())
    connection.close()
    return response.status, reply


@contextmanager
def watching(endpoint: EndpointServer, token: str) -> Iterator[ClientConnection]:
    """Connect a spectator with this token, and yield the connection once the spectator has been
    admitted.
    """
    with connect(f"ws://127.0.0.1:{endpoint.port}/omni/watch", close_timeout=0.1) as socket:
        socket.send(json.dumps({"type": "watch", "token": token}))
        assert receive(socket)["type"] == "watch.start"
        yield socket


def receive(socket: ClientConnection) -> dict[str, Any]:
    data = socket.recv(timeout=10)
    assert isinstance(data, bytes)
    message: dict[str, Any] = decode(data).value
    return message


def play(client: Client, num_frames: int, codec: str, number: int = 0) -> None:
    """Generate one chunk as the player."""
    is_first = num_frames == FIRST
    client.send(
        infer(
            num_frames,
            image=np.full((32, 48, 3), 7, np.uint8) if is_first else None,
            request_id=f"{codec}-{num_frames}-{number}",
            extra_body={
                "video_format": codec,
                **({"height": 32, "width": 48} if is_first else {}),
            },
        )
    )
    client.frames()


def brightness(units: list[bytes]) -> list[int]:
    decoder: Any = av.CodecContext.create("h264", "r")
    frames = [frame for unit in units for frame in decoder.decode(av.Packet(unit))]
    frames += decoder.decode(None)
    return [int(frame.to_ndarray(format="rgb24")[20, 30, 1]) for frame in frames]


@pytest.mark.parametrize("codec", ["h264", "jpeg"])
def test_spectators_see_the_session_and_cost_one_encoding(
    endpoint: EndpointServer, client: Client, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Two spectators receive the same access units, starting at a key frame. Each frame of the
    session is encoded as H.264 only once, whatever format the player receives.
    """
    encoded: list[int] = []
    encode_frame = H264Encoder._encode_frame

    def counted(self: H264Encoder, context: Any, frame: Any, stamp: FrameStamp) -> EncodedPart:
        encoded.append(stamp.frame)
        return encode_frame(self, context, frame, stamp)

    monkeypatch.setattr(H264Encoder, "_encode_frame", counted)
    play(client, FIRST, codec)
    status, reply = create_token(endpoint, client.hello["session_id"])
    assert status == 201
    with watching(endpoint, reply["token"]) as one, watching(endpoint, reply["token"]) as two:
        for number in range(3):
            play(client, LATER, codec, number)
        last = FIRST + 3 * LATER - 1
        seen = []
        for socket in (one, two):
            messages = [receive(socket)]
            while messages[-1]["first_frame"] != last:
                messages.append(receive(socket))
            assert messages[0]["is_key_frame"]
            assert messages[0]["codec_string"].startswith("avc1.42c0")
            numbers = [message["first_frame"] for message in messages]
            assert numbers == list(range(numbers[0], last + 1))
            units = [message["video"] for message in messages]
            np.testing.assert_allclose(brightness(units), numbers, atol=3)
            seen.append(units)
        assert seen[0] == seen[1]
    assert len(encoded) == len(set(encoded))


def test_a_spectator_without_controls_cannot_end_the_session(
    endpoint: EndpointServer, client: Client
) -> None:
    """Neither a spectator's messages nor its disconnection affects the session. When the session
    ends, the spectator's connection is closed with 1000.
    """
    play(client, FIRST, "h264")
    session_id = client.hello["session_id"]
    _, reply = create_token(endpoint, session_id)
    with watching(endpoint, reply["token"]) as socket:
        socket.send(json.dumps({"endpoint": "reset", "session_id": session_id}))
    (session,) = endpoint.manager.sessions()
    wait_until(lambda: not session.audience)
    play(client, LATER, "h264")
    with watching(endpoint, reply["token"]) as socket:
        client.send({"endpoint": "close", "session_id": session_id})
        code = None
        while code is None:
            try:
                receive(socket)
            except ConnectionClosed as closed:
                code = closed.rcvd.code if closed.rcvd is not None else 1006
    assert code == 1000


def test_a_spectator_that_does_not_read_does_not_delay_the_player(
    endpoint: EndpointServer, client: Client
) -> None:
    """A spectator that does not read does not delay the player's chunks, and its queue holds at
    most two chunks.
    """
    play(client, FIRST, "h264")
    _, reply = create_token(endpoint, client.hello["session_id"])
    (session,) = endpoint.manager.sessions()
    stuck = session.audience.join()  # nothing reads this spectator's queue
    with watching(endpoint, reply["token"]) as socket:
        started_s = time.monotonic()
        for number in range(8):
            play(client, LATER, "h264", number)
        assert time.monotonic() - started_s < 5
        while receive(socket)["first_frame"] != FIRST + 8 * LATER - 1:
            pass
    assert stuck.num_dropped >= 2
    assert len(stuck._chunks) <= 2


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ('{"type": "watch", "token": "wrong"}', "invalid_token"),
        ('{"type": "watch", "token": ""}', "invalid_token"),
        ('{"type": "watch"}', "invalid_request"),
        ('{"type": "watch", "token": 7}', "invalid_request"),
        ("{", "invalid_request"),
        (b"\xff\xfe", "invalid_request"),
        ('{"type": "watch", "token": "' + "x" * 1000 + '"}', "invalid_request"),
    ],
)
def test_a_wrong_token_is_refused(
    endpoint: EndpointServer, client: Client, first: str | bytes, code: str
) -> None:
    """A first message without a valid token gets a typed error, the connection is closed with 1008,
    and no spectator joins.
    """
    play(client, FIRST, "h264")
    with connect(f"ws://127.0.0.1:{endpoint.port}/omni/watch", close_timeout=0.1) as socket:
        socket.send(first)
        assert receive(socket)["code"] == code
        with pytest.raises(ConnectionClosed) as closed:
            receive(socket)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008
    (session,) = endpoint.manager.sessions()
    assert not session.audience


def test_only_the_owner_of_a_live_session_gets_a_token(
    endpoint: EndpointServer, client: Client
) -> None:
    assert create_token(endpoint, "unknown")[0] == 404
    play(client, FIRST, "h264")
    session_id = client.hello["session_id"]
    assert create_token(endpoint, session_id, "?expires_in_s=60")[1]["expires_in_s"] == 60
    for wrong in ("0", "86401", "soon"):
        assert create_token(endpoint, session_id, f"?expires_in_s={wrong}")[0] in (400, 422)


def test_tokens_expire_and_are_bounded() -> None:
    """An expired token is refused in the same way as an unknown token. When the maximum number of
    tokens exists, a new token replaces the oldest.
    """
    now_s = 100.0
    tokens = SpectatorTokens(lambda: now_s)
    token = tokens.issue(("owner", "a"), 60)
    assert tokens.session_of(token) == ("owner", "a")
    now_s += 61
    with pytest.raises(EndpointError, match="invalid_token"):
        tokens.session_of(token)
    oldest = tokens.issue(("owner", "a"), 60)
    for _ in range(MAX_TOKENS):
        newest = tokens.issue(("owner", "b"), 60)
    assert tokens.session_of(newest) == ("owner", "b")
    with pytest.raises(EndpointError, match="invalid_token"):
        tokens.session_of(oldest)


def test_an_audience_is_bounded() -> None:
    host: Any = None
    audience = Audience(host)
    for _ in range(MAX_SPECTATORS):
        audience.join()
    with pytest.raises(EndpointError, match="capacity"):
        audience.join()


def test_a_slow_spectator_continues_at_a_key_frame() -> None:
    """After a dropped chunk, a slow spectator continues at the next key frame. Access units before
    that key frame are not queued, because they cannot be decoded.
    """

    def unit(frame: int, is_key: bool) -> EncodedPart:
        return EncodedPart(b"", [FrameStamp(0, frame, 0)], 2, 2, is_key)

    spectator = Spectator()
    spectator.put([unit(0, False), unit(1, True), unit(2, False)])
    spectator.put([unit(3, False)])
    queued = [[one.stamps[0].frame for one in units] for units in spectator._chunks]
    assert queued == [[1, 2], [3]]
    spectator.put([unit(4, False)])
    assert (spectator.num_dropped, len(spectator._chunks), spectator.needs_key) == (2, 0, True)
    spectator.put([unit(5, True)])
    assert not spectator.needs_key


def test_pages_of_other_origins_may_not_watch(endpoint: EndpointServer) -> None:
    """Pages of other origins cannot watch a session, because they are refused before the
    upgrade.
    """
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{endpoint.port}/omni/watch", origin=Origin("http://evil.example"))
    assert refused.value.response.status_code == 403
