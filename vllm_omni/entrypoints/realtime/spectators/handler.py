# SPDX-License-Identifier: Apache-2.0
"""The `/omni/watch` WebSocket, which receives a token and sends the H.264 frames of the token's
session.
"""

import asyncio
import contextlib
import logging
from typing import Any, Final

import msgspec
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.errors import ClientDisconnected, EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.connection.codec import encode
from vllm_omni.entrypoints.realtime.connection.live_client import ConnectionHandler
from vllm_omni.entrypoints.realtime.encoding.frames import EncodedPart
from vllm_omni.entrypoints.realtime.encoding.h264 import access_unit_fields
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.realtime.spectators.audience import Spectator
from vllm_omni.entrypoints.realtime.spectators.tokens import MAX_TOKEN_CHARS, SpectatorTokens

logger = logging.getLogger("vllm." + __name__)

_MAX_MESSAGE_CHARS: Final = MAX_TOKEN_CHARS + 128


class WatchMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="watch"):
    """A spectator's first and only message."""

    token: str
    """The session's token."""


class WatchClient(ConnectionHandler):
    """Handler for one spectator's connection."""

    endpoint = "watch"

    def __init__(
        self, manager: SessionManager, websocket: WebSocket, tokens: SpectatorTokens
    ) -> None:
        super().__init__(manager, websocket)
        self._tokens = tokens
        self._session: Session | None = None
        self._spectator: Spectator | None = None
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_active(self) -> bool:
        return self._sending is not None and not self._sending.done()

    async def start_now(self) -> None:
        """Wait for the spectator's token, and add the spectator to the session's audience."""
        data = await self.receive_first("no token arrived")
        session = self.manager.find(self._tokens.session_of(_token(data)))
        if session is None:
            raise EndpointError(
                "unknown_session", "the session has ended", close=WebSocketCloseCode.POLICY
            )
        try:
            self._spectator = session.audience.join()
        except EndpointError as error:
            error.close = WebSocketCloseCode.CAPACITY
            raise
        self._session = session
        start = {"type": "watch.start", "codec": "h264", "model": self.info.model}
        await self.connection.send(
            encode({**start, "width": session.width, "height": session.height})
        )
        self._sending = self.manager.spawn(self._send_all(self._spectator))

    async def _send_all(self, spectator: Spectator) -> None:
        try:
            while (units := await spectator.next_units()) is not None:
                await self.connection.send(*(_message(unit) for unit in units))
            self._end = "the session has ended"
            await self.connection.close(WebSocketCloseCode.NORMAL, self._end)
        except ClientDisconnected:
            pass

    async def handle_message(self, data: bytes | str) -> None:
        """Ignore messages because a spectator has no controls. A spectator that sends too many
        messages is disconnected.
        """

    async def send_error(self, error: EndpointError) -> None:
        message = {"type": "error", "code": error.code, "message": error.message}
        await self.connection.send(encode(message))

    async def stop(self) -> None:
        """Remove the spectator from the audience."""
        if self._session is not None and self._spectator is not None:
            self._session.audience.leave(self._spectator)
        if self._sending is not None:
            self._sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([self._sending])


def _token(data: bytes | str) -> str:
    try:
        if len(data) <= _MAX_MESSAGE_CHARS:
            return msgspec.json.decode(data, type=WatchMessage).token
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    raise EndpointError(
        "invalid_request",
        'the first message must be {"type": "watch", "token": ...}',
        close=WebSocketCloseCode.POLICY,
    )


def _message(unit: EncodedPart) -> bytes:
    stamp = unit.stamps[0]
    message: dict[str, Any] = {
        "type": "frame",
        "codec": "h264",
        "chunk_index": stamp.chunk_index,
        "first_frame": stamp.frame,
        "num_frames": 1,
        "time_us": stamp.time_us,
        "width": unit.width,
        "height": unit.height,
        **access_unit_fields(unit),
        "video": unit.data,
    }
    return encode(message)
