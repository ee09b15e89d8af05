# SPDX-License-Identifier: Apache-2.0
"""`/v1/realtime/webrtc` with aiortc as the client, real sockets and a fake engine."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import turn_server
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine
from helpers.needs_aiortc import aioice, aiortc
from helpers.relay import Network, UdpRelay, running
from helpers.waits import until, wait_until

from vllm_omni.actions import ActionSpace
from vllm_omni.entrypoints.realtime.webrtc.offer import MAX_OFFER_BYTES, Offer
from vllm_omni.entrypoints.realtime.webrtc.options import IceServer, WebRtcOptions
from vllm_omni.entrypoints.realtime.webrtc.pacer import ChunkPacer
from vllm_omni.entrypoints.realtime.webrtc.peer import Peer

MakeEndpoint = Callable[..., EndpointServer]
PATH = "/v1/realtime/webrtc"
START = {"type": "session.start", "prompt": "a path", "width": 48, "height": 32}
NO_IMAGE = {"actions": ActionSpace(image="none", prompt="required", pose=True)}


def call(
    port: int,
    method: str,
    path: str,
    body: bytes | str = b"",
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes, Any]:
    """Return the status, body and headers of one HTTP request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body, {"Content-Type": "application/sdp", **(headers or {})})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, data, response.headers


class Viewer:
    """A WebRTC client. It has a data channel unless `watches` is set."""

    def __init__(self, watches: bool = False) -> None:
        self.connection = aiortc.RTCPeerConnection()
        self.connection.addTransceiver("video", direction="recvonly")
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.opened = asyncio.Event()
        self.frames: asyncio.Queue[np.ndarray] = asyncio.Queue()
        self.channel = None if watches else self.connection.createDataChannel("control")
        self.location = ""
        if self.channel is not None:
            self.channel.on("open", self.opened.set)
            self.channel.on("message", lambda text: self.messages.put_nowait(json.loads(text)))
        self.connection.on("track", lambda track: asyncio.ensure_future(self._watch(track)))

    async def _watch(self, track: Any) -> None:
        while True:
            try:
                frame = await track.recv()
            except aiortc.mediastreams.MediaStreamError:
                return
            self.frames.put_nowait(frame.to_ndarray(format="rgb24"))

    async def connect(self, port: int, path: str = PATH, relay: UdpRelay | None = None) -> None:
        await self.connection.setLocalDescription(await self.connection.createOffer())
        sdp = self.connection.localDescription.sdp
        if relay is not None:
            sdp = relay.rewrite_offer(sdp)
        status, body, headers = await asyncio.to_thread(call, port, "POST", path, sdp)
        assert status == 201, body
        self.location = headers["Location"]
        assert headers["Content-Type"].startswith("application/sdp")
        text = body.decode() if relay is None else relay.rewrite_answer(body.decode())
        answer = aiortc.RTCSessionDescription(text, "answer")
        await self.connection.setRemoteDescription(answer)

    def send(self, message: dict[str, Any]) -> None:
        assert self.channel is not None
        self.channel.send(json.dumps(message))

    async def message(self, kind: str) -> dict[str, Any]:
        """Return the data channel's next message of the given type."""
        async with asyncio.timeout(15):
            while (message := await self.messages.get())["type"] != kind:
                pass
        return message

    async def brightness(self) -> int:
        """Return the brightness of one pixel of the next frame."""
        async with asyncio.timeout(15):
            frame_HWC = await self.frames.get()
        return int(frame_HWC[20, 30, 1])


@asynccontextmanager
async def viewer(
    port: int, path: str = PATH, watches: bool = False, relay: UdpRelay | None = None
) -> AsyncIterator[Viewer]:
    one = Viewer(watches)
    try:
        await one.connect(port, path, relay)
        if not watches:
            async with asyncio.timeout(15):
                await one.opened.wait()
        yield one
    finally:
        await one.connection.close()


def test_frames_arrive_through_the_track_and_inputs_through_the_channel(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Frame n from the fake engine has brightness n. An interaction sent through the data channel
    reaches the engine. The metadata of the chunk in which the interaction takes effect names the
    interaction as the newest input.
    """
    endpoint = make_endpoint(info={**NO_IMAGE, "fps": 48.0})

    async def main() -> None:
        async with viewer(endpoint.port) as one:
            one.send(START)
            started = await one.message("video.start")
            assert (started["format"], started["config"]["width"]) == ("h264-track", 48)
            first = await one.message("video.chunk_metadata")
            assert (first["num_frames"], first["first_frame"]) == (FIRST, 0)
            seen = [await one.brightness() for _ in range(20)]
            assert seen == sorted(seen)
            assert seen[-1] > seen[0]
            one.send(
                {
                    "type": "session.interaction",
                    "interaction": {"event_id": "rain", "event": {"prompt": "rain"}},
                }
            )
            assert (await one.message("session.interaction.queued"))["event_id"] == "rain"
            while (await one.message("video.chunk_metadata")).get("input_id") != "rain":
                pass
            one.send({"type": "session.stop"})
            assert (await one.message("session.done"))["stopped"] is True
            assert (await one.message("session.closed"))["code"] == 1000

    asyncio.run(main())
    assert "rain" in [call.params.prompt for call in engine.chunks]
    wait_until(lambda: len(endpoint.manager) == 0)
    wait_until(lambda: endpoint.manager.guard.num_connections == 0)


def test_lost_packets_are_sent_again(make_endpoint: MakeEndpoint) -> None:
    """Over a network that loses 5 % of the packets in each direction, frames and data channel
    messages arrive in order and without gaps.
    """
    endpoint = make_endpoint(info={**NO_IMAGE, "fps": 48.0})
    network = Network(loss=0.05, delay_ms=5, jitter_ms=20)

    async def main(relay: UdpRelay) -> None:
        async with viewer(endpoint.port, relay=relay) as one:
            one.send(START)
            numbers = []
            while len(numbers) < 6:
                message = await one.message("video.chunk_metadata")
                numbers.append(message["generation_chunk_index"])
            assert numbers == list(range(6))
            seen = [await one.brightness() for _ in range(FIRST + 4 * LATER)]
            assert seen == sorted(seen)
            assert max(np.diff(seen)) <= 4  # a lost frame would cause a larger step
            # Use an HTTP DELETE, because the message that ends the connection may be lost too, and
            # the server would then wait for it.
            await asyncio.to_thread(call, endpoint.port, "DELETE", one.location)

    with running(UdpRelay(network, network)) as relay:
        asyncio.run(main(relay))
        assert relay.down.num_dropped > 0


@pytest.mark.parametrize("transport", ["udp", "tcp"])
@pytest.mark.skipif(turn_server.TURN_SERVER is None, reason=turn_server.WHY_NOT)
def test_a_client_that_cannot_reach_the_server_gets_frames_over_turn(
    make_endpoint: MakeEndpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str
) -> None:
    """A client that cannot reach any address of the server receives frames through a TURN server,
    which provides the only usable candidate.
    """
    answer = Peer.answer
    answers: list[str] = []

    async def without_addresses(self: Peer, offer: Offer) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(aioice.ice, "get_host_addresses", lambda use_ipv4, use_ipv6: [])
            answers.append(await answer(self, offer))
        return answers[-1]

    monkeypatch.setattr(Peer, "answer", without_addresses)
    with turn_server.running_turn_server(tmp_path, "me", "secret") as address:
        monkeypatch.setenv(
            "VLLM_OMNI_ICE_SERVERS", f"turn:me:secret@{address}?transport={transport}"
        )
        endpoint = make_endpoint(info={**NO_IMAGE, "fps": 48.0})

        async def main() -> None:
            async with viewer(endpoint.port) as one:
                one.send(START)
                await one.message("video.start")
                seen = [await one.brightness() for _ in range(30)]
                assert seen == sorted(seen)

        asyncio.run(main())
        wait_until(lambda: len(endpoint.manager) == 0)
    candidates = [line for line in answers[0].splitlines() if line.startswith("a=candidate")]
    assert candidates
    assert all(" typ relay" in line for line in candidates)


def test_an_input_acts_on_the_chunk_after_the_one_that_plays(make_endpoint: MakeEndpoint) -> None:
    """Chunks are requested as late as playback allows. When a chunk that lasts half a second starts
    to play, the controls of the next chunk have not been sampled yet.
    """
    endpoint = make_endpoint(info={**NO_IMAGE, "fps": 24.0})

    async def main() -> None:
        async with viewer(endpoint.port) as one:
            one.send(START)
            for _ in range(4):  # the request timing adapts after some chunks
                playing = await one.message("video.chunk_metadata")
            one.send(
                {
                    "type": "session.interaction",
                    "interaction": {"event_id": "rain", "event": {"prompt": "rain"}},
                }
            )
            after = await one.message("video.chunk_metadata")
            assert after["generation_chunk_index"] == playing["generation_chunk_index"] + 1
            assert after.get("input_id") == "rain"

    asyncio.run(main())


@pytest.mark.parametrize(("wait_s", "needed_s"), [(0.1, 0.12), (0.4, 0.42)])
def test_a_chunk_is_requested_when_the_video_in_hand_is_as_long_as_the_wait(
    wait_s: float, needed_s: float
) -> None:
    """The server requests the next chunk when the remaining buffered video is as short as the
    measured waiting time requires. Frames that the engine is generating count as buffered video.
    The first chunk is not measured, because it includes compilation.
    """
    now_s, buffered_s = [0.0], [0.0]
    pacer = ChunkPacer(lambda: buffered_s[0], 24.0, lambda: now_s[0])
    assert pacer.needed_s is None
    assert pacer.is_time
    for wall_s in (9.0, wait_s, wait_s):
        pacer.note_request(12)
        now_s[0] += wall_s
        pacer.note_chunk(now_s[0])
    assert pacer.needed_s == pytest.approx(needed_s)
    buffered_s[0] = needed_s + 0.01
    assert not pacer.is_time
    buffered_s[0] = needed_s - 0.01
    assert pacer.is_time
    pacer.note_request(12)
    assert not pacer.is_time


def test_a_player_without_a_data_channel_gets_a_session(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Like a WHEP player, a client without a data channel sends the prompt and the seed in the
    query string, and ends its session with DELETE.
    """
    endpoint = make_endpoint(info={**NO_IMAGE, "fps": 48.0})

    async def main() -> None:
        path = f"{PATH}?prompt=a%20harbour&seed=5&width=48&height=32"
        async with viewer(endpoint.port, path, watches=True) as one:
            seen = [await one.brightness() for _ in range(12)]
            assert seen == sorted(seen)
            status, _, _ = await asyncio.to_thread(call, endpoint.port, "DELETE", one.location)
            assert status == 204
            status, _, _ = await asyncio.to_thread(call, endpoint.port, "DELETE", one.location)
            assert status == 404

    asyncio.run(main())
    assert (engine.chunks[0].params.prompt, engine.chunks[0].params.seed) == ("a harbour", 5)
    wait_until(lambda: len(endpoint.manager) == 0)


def test_a_client_that_leaves_ends_its_session(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """When a client disconnects, its chunk in flight is aborted and its connection is freed."""
    endpoint = make_endpoint(info={**NO_IMAGE, "fps": 48.0})

    async def main() -> None:
        async with viewer(endpoint.port) as one:
            one.send(START)
            await one.message("video.start")
            await one.brightness()

    asyncio.run(main())
    wait_until(lambda: len(endpoint.manager) == 0)
    wait_until(lambda: not engine.worlds)
    wait_until(lambda: endpoint.manager.guard.num_connections == 0)


def test_a_lost_picture_brings_a_key_frame(make_endpoint: MakeEndpoint) -> None:
    """When the client sends a picture loss indication, a key frame is requested from the session's
    encoder.
    """
    endpoint = make_endpoint(info={**NO_IMAGE, "fps": 48.0})
    requested: list[bool] = []

    async def main() -> None:
        async with viewer(endpoint.port) as one:
            one.send(START)
            await one.message("video.start")
            await one.brightness()
            (session,) = endpoint.manager.sessions()
            session.encoders.request_key_frame = lambda: requested.append(True)  # type: ignore[method-assign]
            (receiver,) = one.connection.getReceivers()
            (source,) = receiver.getSynchronizationSources()
            await receiver._send_rtcp_pli(source.source)
            await until(lambda: requested)

    asyncio.run(main())


def test_an_invalid_start_is_refused_through_the_channel(make_endpoint: MakeEndpoint) -> None:
    """An invalid start message gets the same error and close code through the data channel as over
    a WebSocket.
    """
    endpoint = make_endpoint(info=NO_IMAGE)

    async def main() -> None:
        async with viewer(endpoint.port) as one:
            one.send({**START, "width": 49})
            assert (await one.message("error"))["code"] == "unsupported_size"
            assert (await one.message("session.closed"))["code"] == 1008

    asyncio.run(main())
    wait_until(lambda: endpoint.manager.guard.num_connections == 0)


# -- refusals --------------------------------------------------------------------------------------

GOOD_SDP = "\r\n".join(
    [
        *("v=0", "o=- 1 1 IN IP4 127.0.0.1", "s=-", "t=0 0"),
        *("m=video 9 UDP/TLS/RTP/SAVPF 96", "c=IN IP4 0.0.0.0", "a=recvonly", "a=mid:0"),
        *("a=rtpmap:96 H264/90000", ""),
    ]
)
MANY = "\r\n".join(f"m=audio 9 UDP/TLS/RTP/SAVPF {n}" for n in range(50))
CANDIDATES = "\r\n".join(
    f"a=candidate:{n} 1 udp 1 127.0.0.1 {1000 + n} typ host" for n in range(100)
)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_offer"),
        (b"hello", 400, "invalid_offer"),
        (b"\xff\xfe", 400, "invalid_offer"),
        (b'{"sdp": "v=0"}', 400, "invalid_offer"),
        (b"v=0", 400, "invalid_offer"),
        (GOOD_SDP.encode(), 400, "invalid_offer"),  # neither credentials nor fingerprint
        (GOOD_SDP.replace("H264", "VP8").encode(), 400, "unsupported_codec"),
        ((GOOD_SDP + MANY).encode(), 400, "invalid_offer"),
        ((GOOD_SDP + CANDIDATES).encode(), 400, "invalid_offer"),
        ((GOOD_SDP + "a=x\r\n" * 2000).encode(), 400, "invalid_offer"),
        ((GOOD_SDP + "a=" + "x" * 3000).encode(), 400, "invalid_offer"),
        (b"v=0\r\n" * MAX_OFFER_BYTES, 413, "invalid_offer"),
    ],
)
def test_a_bad_offer_is_refused_and_allocates_nothing(
    make_endpoint: MakeEndpoint, body: bytes, status: int, code: str
) -> None:
    """Every invalid offer gets a typed error and leaves no session or connection behind."""
    endpoint = make_endpoint(info=NO_IMAGE)
    replied, reply, _ = call(endpoint.port, "POST", PATH, body)
    assert (replied, json.loads(reply)["error"]["code"]) == (status, code)
    assert len(endpoint.manager) == 0
    assert endpoint.manager.guard.num_connections == 0


def test_other_bodies_and_other_origins_are_refused(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint(info=NO_IMAGE)
    status, _, _ = call(endpoint.port, "POST", PATH, GOOD_SDP, {"Content-Type": "application/json"})
    assert status == 415
    status, _, _ = call(endpoint.port, "POST", PATH, GOOD_SDP, {"Origin": "http://evil.example"})
    assert status == 403


def test_a_player_of_a_model_with_start_images_is_refused(endpoint: EndpointServer) -> None:
    """A model that requires a start image refuses a player without a data channel, because the
    player cannot send an image.
    """
    status, reply, _ = call(endpoint.port, "POST", PATH, GOOD_SDP)
    assert (status, json.loads(reply)["error"]["code"]) == (400, "missing_image")


def test_the_number_of_connections_is_limited(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint(info=NO_IMAGE, max_connections=1)
    with endpoint.manager.guard.occupy():
        status, _, headers = call(endpoint.port, "POST", PATH, GOOD_SDP)
    assert (status, headers["Retry-After"]) == (503, "1")


def test_ice_servers_are_read_from_the_environment() -> None:
    """ICE servers are read from the environment. A TURN server has a user and a password, and the
    error for an invalid entry does not contain the password.
    """
    options = WebRtcOptions(
        ice_servers="stun:stun.example:3478, turn:me:s%40cret@turn.example:3478?transport=tcp"
    )
    assert options.servers() == [
        IceServer("stun:stun.example:3478"),
        IceServer("turn:turn.example:3478?transport=tcp", "me", "s@cret"),
    ]
    with pytest.raises(ValueError, match="VLLM_OMNI_ICE_SERVERS") as error:
        WebRtcOptions(ice_servers="me:secret@turn.example").servers()
    assert "secret" not in str(error.value)
