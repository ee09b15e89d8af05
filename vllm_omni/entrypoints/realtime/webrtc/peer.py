# SPDX-License-Identifier: Apache-2.0
"""`Peer`: an aiortc WebRTC connection, which handlers use as a WebSocket and a video track.

The data channel carries the same messages as `/v1/realtime/video`. `Peer.websocket` presents the
channel as an ASGI WebSocket, so the same handler serves it with the same limits. The track sends
the session encoder's access units as is, so an additional viewer requires no additional encoding.

aiortc encrypts and sends on the event loop, whereas encoding runs on other threads.
"""

import asyncio
import contextlib
import fractions
import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import av
from aiortc import (
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtp import RtcpPsfbPacket, unpack_remb_fci
from starlette.requests import HTTPConnection
from starlette.types import Message
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.encoding.frames import EncodedPart
from vllm_omni.entrypoints.realtime.webrtc.offer import Offer
from vllm_omni.entrypoints.realtime.webrtc.options import IceServer

logger = logging.getLogger("vllm." + __name__)

_TIME_BASE: Final = fractions.Fraction(1, 1_000_000)
_NEGOTIATION_S: Final = 10.0
_LAST_WORDS_S: Final = 1.0
_MAX_WAITING_MESSAGES: Final = 256
MAX_MESSAGE_BYTES: Final = 512 * 1024
"""Maximum size in bytes of a client's message, for example a `session.start` message that contains
a start image.

aiortc announces a maximum of 64 KiB, but it reassembles any message that fits in its receive window
of 1 MiB.
"""
_MAX_UNSENT_BYTES: Final = 1024 * 1024
_PLI, _FIR, _APPLICATION = 1, 4, 15  # formats of RTCP payload-specific feedback (RFC 4585, 5104)


class PacketTrack(MediaStreamTrack):
    """Video track that sends access units at their playback times.

    All frames of a chunk arrive at the same time. If they were also sent at the same time, browsers
    would interpret this as jitter and enlarge their buffers.
    """

    kind = "video"

    def __init__(self) -> None:
        super().__init__()
        self._units: deque[EncodedPart] = deque()
        self._changed = asyncio.Event()
        self._start: tuple[float, int] | None = None  # (monotonic s, time_us) of a frame
        self._last_us = -1
        self._offset_us = 0  # added to the stamps, because a track's timestamps must increase
        self._newest: tuple[int, int] | None = None  # (time, playing time) of the last unit

    @property
    def buffered_s(self) -> float:
        """Time in seconds until playback requires another access unit."""
        if self._newest is None:
            return 0.0
        time_us, period_us = self._newest
        if self._start is None:  # no unit has been sent yet
            return len(self._units) * period_us / 1e6
        ends_s = self._start[0] + (time_us + period_us - self._start[1]) / 1e6
        return max(0.0, ends_s - time.monotonic())

    async def put(self, units: Sequence[EncodedPart], ahead: int) -> None:
        """Queue access units.

        Args:
            units: Consecutive access units.
            ahead: Maximum number of units that may be waiting to be sent when the call returns.
        """
        self._units.extend(units)
        for unit in units[-2:]:
            time_us = unit.stamps[0].time_us
            before_us = time_us if self._newest is None else self._newest[0]
            self._newest = time_us, max(0, time_us - before_us)
        self._notify()
        while len(self._units) > ahead and self.readyState == "live":
            await self._changed.wait()

    async def recv(self) -> av.Packet:
        """Return the next access unit at its playback time.

        Raises:
            MediaStreamError: The track has been stopped.
        """
        while not self._units:
            if self.readyState != "live":
                raise MediaStreamError
            await self._changed.wait()
        unit = self._units[0]
        time_us = unit.stamps[0].time_us
        await self._wait_until_due(time_us)
        if self.readyState != "live":
            raise MediaStreamError
        self._units.popleft()
        self._notify()
        if time_us + self._offset_us <= self._last_us:  # the session has restarted
            self._offset_us = self._last_us + 1 - time_us
        self._last_us = time_us + self._offset_us
        packet = av.Packet(bytes(unit.data))
        packet.pts, packet.time_base = self._last_us, _TIME_BASE
        return packet

    async def _wait_until_due(self, time_us: int) -> None:
        now_s = time.monotonic()
        if self._start is not None:
            due_s = self._start[0] + (time_us - self._start[1]) / 1e6
            if now_s <= due_s < now_s + 1.0:
                await asyncio.sleep(due_s - now_s)
                return
        # This is the first frame, the frame is late, or the session has restarted.
        self._start = (now_s, time_us)

    def stop(self) -> None:
        super().stop()
        self._units.clear()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Peer:
    """A WebRTC connection with one client.

    Args:
        request: HTTP request that contained the offer. The request's headers and address identify
            the client.
        ice_servers: STUN and TURN servers.
        start: Message that replaces the client's first message if the client has no data channel.
    """

    def __init__(
        self,
        request: HTTPConnection,
        ice_servers: Sequence[IceServer],
        start: str | None,
    ) -> None:
        self.track = PacketTrack()
        self._connection = RTCPeerConnection(
            RTCConfiguration(
                [RTCIceServer(one.url, one.username, one.credential) for one in ice_servers]
            )
        )
        self.on_key_frame: Callable[[], None] = lambda: None
        """Function that is called when the client requests a key frame."""
        self.on_bandwidth: Callable[[int], None] = lambda bits_per_s: None
        """Function that is called with the client's bandwidth estimate in bits per second."""
        self._channel: RTCDataChannel | None = None
        self._is_open = asyncio.Event()
        self._messages: asyncio.Queue[Message] = asyncio.Queue(_MAX_WAITING_MESSAGES)
        self._messages.put_nowait({"type": "websocket.connect"})
        self._watches = start is not None
        if start is not None:
            self._messages.put_nowait({"type": "websocket.receive", "text": start})
        self._closed = False
        self._ended = asyncio.Event()
        self.websocket = WebSocket(self._scope(request), self._messages.get, self._send)
        """Data channel, presented as a WebSocket."""
        self._connection.on("datachannel", self._take_channel)
        self._connection.on("connectionstatechange", self._note_state)

    async def answer(self, offer: Offer) -> str:
        """Return the SDP answer to an offer, including all candidates of this server.

        Raises:
            EndpointError: `invalid_offer` if aiortc cannot use the offer, `unsupported_codec` if
                the peers have no H.264 format in common, or `timeout` if creating the answer takes
                too long.
        """
        try:
            async with asyncio.timeout(_NEGOTIATION_S):
                sender = self._connection.addTrack(self.track)
                transceiver = self._connection.getTransceivers()[0]
                codecs = RTCRtpSender.getCapabilities("video").codecs
                transceiver.setCodecPreferences(
                    [codec for codec in codecs if codec.mimeType in ("video/H264", "video/rtx")]
                )
                description = RTCSessionDescription(offer.sdp, "offer")
                await self._connection.setRemoteDescription(description)
                await self._connection.setLocalDescription(await self._connection.createAnswer())
        except TimeoutError:
            raise EndpointError("timeout", "no candidates within 10 s") from None
        # aiortc parses with asserts, regular expressions and conversions, which can raise many
        # exception types.
        except Exception as error:
            logger.info("offer_refused reason=%.200r", error)
            if "send parameters" in str(error):
                message = "no H.264 format of the offer is supported"
                raise EndpointError("unsupported_codec", message, param="video") from None
            raise EndpointError("invalid_offer", "the offer cannot be parsed") from None
        self._watch_feedback(sender)
        sdp: str = self._connection.localDescription.sdp
        return re.sub(r"a=max-message-size:\d+", f"a=max-message-size:{MAX_MESSAGE_BYTES}", sdp)

    async def close_unless_connected(self, timeout_s: float) -> None:
        """Close the connection if the client has not connected after `timeout_s` seconds."""
        await asyncio.sleep(timeout_s)
        if self._connection.connectionState in ("new", "connecting"):
            await self.close()

    async def wait_until_closed(self) -> None:
        """Wait briefly for the client to close the connection, so that the client can receive the
        last messages.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _LAST_WORDS_S)

    async def close(self) -> None:
        """Close the connection and free its sockets. Idempotent."""
        self._disconnect()
        self.track.stop()
        await self._connection.close()

    # -- the data channel as a WebSocket -----------------------------------------------------------

    def _scope(self, request: HTTPConnection) -> dict[str, Any]:
        host = request.client.host if request.client is not None else "local"
        return {
            **{
                key: request.scope[key]
                for key in ("headers", "path", "app", "state", "root_path")
                if key in request.scope
            },
            "type": "websocket",
            "query_string": b"",
            "subprotocols": [],
            # Port 0, because a lookup by address must not find the HTTP request's transport.
            "client": (host, 0),
        }

    async def _send(self, message: Message) -> None:
        """Send one ASGI message. The call waits while the client is not reading."""
        if self._closed:
            raise OSError("the connection is closed")
        if self._watches or message["type"] == "websocket.accept":
            return
        await self._is_open.wait()
        assert self._channel is not None
        while self._channel.bufferedAmount > _MAX_UNSENT_BYTES:
            await asyncio.sleep(0.01)
        if message["type"] == "websocket.close":
            end = {"type": "session.closed", "code": message.get("code", 1000)}
            message = {"text": json.dumps({**end, "reason": message.get("reason") or ""})}
        data = message.get("text")
        self._channel.send(data if data is not None else bytes(message["bytes"]))

    def _take_channel(self, channel: RTCDataChannel) -> None:
        if self._channel is not None:  # a client may open only one channel
            channel.close()
            return
        self._channel = channel
        channel.on("message", self._take_message)
        channel.on("close", self._disconnect)
        self._is_open.set()

    def _take_message(self, data: str | bytes) -> None:
        kind = "text" if isinstance(data, str) else "bytes"
        try:
            if len(data) > MAX_MESSAGE_BYTES:
                raise asyncio.QueueFull
            self._messages.put_nowait({"type": "websocket.receive", kind: data})
        except asyncio.QueueFull:
            logger.info("webrtc_flood: a client sends faster than its messages are handled")
            self._disconnect()

    def _note_state(self) -> None:
        if self._connection.connectionState in ("failed", "closed"):
            self._disconnect()

    def _disconnect(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._is_open.set()
        self._ended.set()
        while self._messages.full():
            self._messages.get_nowait()
        self._messages.put_nowait({"type": "websocket.disconnect", "code": 1006})

    # -- feedback ----------------------------------------------------------------------------------

    def _watch_feedback(self, sender: RTCRtpSender) -> None:
        """Read key-frame requests and bandwidth estimates, which aiortc passes only to its own
        encoder.

        aiortc has no hook for tracks that yield packets, so this method wraps one of aiortc's
        private methods. tests/seams/test_aiortc.py detects changes to that method.
        """
        handle = sender._handle_rtcp_packet

        async def note_and_handle(packet: Any) -> None:
            if isinstance(packet, RtcpPsfbPacket):
                if packet.fmt in (_PLI, _FIR):
                    self.on_key_frame()
                elif packet.fmt == _APPLICATION:
                    with contextlib.suppress(ValueError):
                        self.on_bandwidth(unpack_remb_fci(packet.fci)[0])
            await handle(packet)

        vars(sender)["_handle_rtcp_packet"] = note_and_handle
