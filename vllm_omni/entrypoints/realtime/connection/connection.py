# SPDX-License-Identifier: Apache-2.0
"""`Connection`: one of an endpoint's WebSockets, with deadlines and limits.

Every send has a deadline, and receiving has an idle timeout and a rate limit. Messages that cannot
be decoded are counted. Every connection ends with a close code and a reason. If a peer stops
reading, the transport is aborted because a close frame would be queued behind the unread data.
"""

import asyncio
import contextlib
import hashlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from vllm_omni.entrypoints.errors import ClientDisconnected, EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.gathered_writes import Message, writer_of
from vllm_omni.entrypoints.limits.token_bucket import TokenBucket
from vllm_omni.entrypoints.realtime.connection.codec import MAX_NODES, CodecError, TooManyValues
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits

logger = logging.getLogger("vllm." + __name__)

ANONYMOUS: Final = "anonymous"

_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}

_STRIKES: Final = 3
# The kernel buffers at most this many bytes in addition to the bytes in transit. A larger buffer
# would only hide a slow peer.
_UNSENT_BYTES: Final = 64 * 1024
_STRIKE_WINDOW_S: Final = 10.0
_VALUES_BURST_S: Final = 2.0
_LAST_WORDS_S: Final = 1.5
_FAILING_POLL_S: Final = 0.02
_AHEAD_MESSAGES: Final = 4096  # 20 s of key events at 200 per second
_AHEAD_BYTES: Final = 1024 * 1024
_REASON_BYTES: Final = 123  # RFC 6455: at most 125 bytes in a close frame, two of them the code


class Connection:
    """An accepted WebSocket. Only one task may receive messages, but any task may send them.

    Args:
        websocket: The client's WebSocket.
        limits: Timeouts and rates.
        max_strikes: Number of undecodable messages within 10 s after which the connection is
            closed.
    """

    def __init__(
        self, websocket: WebSocket, limits: EndpointLimits, max_strikes: int = _STRIKES
    ) -> None:
        self._websocket = websocket
        self._limits = limits
        self._send_lock = asyncio.Lock()
        self._idle_limit: asyncio.Timeout | None = None
        self._writer = writer_of(websocket.scope)
        self._closed = False
        self.is_broken = False
        """Whether the connection has ended although neither the server nor the client, with code
        1000, has closed it.
        """
        self._failure: EndpointError | None = None
        self._fail_by_s = 0.0
        self._strikes: deque[float] = deque(maxlen=max_strikes)
        self._arrivals: deque[float] = deque(maxlen=limits.max_messages_per_s)
        self._ahead: deque[bytes | str] = deque()
        """Messages that `read_ahead` has received and `receive` has not returned yet."""
        self._values = TokenBucket(
            limits.max_values_per_s, max(_VALUES_BURST_S * limits.max_values_per_s, MAX_NODES)
        )
        self.principal = principal_of(websocket)
        """Owner of the client's sessions, which is derived from the API key but is never the key
        itself.
        """
        self.client = client_of(websocket)
        """The client's identity for `sessions_per_client` and for quotas."""

    async def accept(self, subprotocol: str | None) -> None:
        await self._websocket.accept(subprotocol=subprotocol)
        transport = self._transport()
        if transport is not None:
            # Disable buffering in the transport. Only one message at a time waits for the kernel.
            transport.set_write_buffer_limits(high=0)
        raw = transport.get_extra_info("socket") if transport is not None else None
        if raw is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Pings are queued behind unread data, so the kernel must also drop a peer that
            # acknowledges no data.
            with contextlib.suppress(OSError):  # not a TCP socket
                timeout_ms = int(3 * self._limits.send_deadline_s * 1000)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    async def receive(self, busy: Callable[[], bool]) -> bytes | str:
        """Return the next message from the client.

        Args:
            busy: Function that returns whether any of the client's requests are running. While
                requests are running, the idle timeout does not apply.

        Raises:
            ClientDisconnected: The client disconnected.
            EndpointError: The connection was idle for too long or exceeded a rate limit. The error
                has a close code.
        """
        return self._ahead.popleft() if self._ahead else await self._receive(busy)

    async def read_ahead(self) -> None:
        """Receive messages into a buffer for `receive`. Reading ahead detects a disconnect while a
        request is waiting.

        The call runs until it is cancelled and raises the same errors as `receive`. After
        `_AHEAD_MESSAGES` messages or `_AHEAD_BYTES` bytes, reading stops, and later messages stay
        in the network buffers.
        """
        num_bytes = 0
        while len(self._ahead) < _AHEAD_MESSAGES and num_bytes < _AHEAD_BYTES:
            message = await self._receive(lambda: True)
            num_bytes += len(message)
            self._ahead.append(message)
        await asyncio.Event().wait()

    async def _receive(self, busy: Callable[[], bool]) -> bytes | str:
        while True:
            limit_s = self._limits.idle_timeout_s if self._failure is None else _FAILING_POLL_S
            try:
                async with asyncio.timeout(limit_s) as self._idle_limit:
                    message = await self._websocket.receive()
                break
            except TimeoutError:
                if self._failure is not None:
                    if busy() and time.monotonic() < self._fail_by_s:
                        continue
                    raise self._failure from None
                if not busy():
                    raise EndpointError(
                        "timeout",
                        f"no message for {self._limits.idle_timeout_s:g} s",
                        close=WebSocketCloseCode.IDLE,
                    ) from None
            except RuntimeError:  # Starlette: already disconnected
                raise ClientDisconnected from None
        if message["type"] == "websocket.disconnect":
            self.is_broken = not self._closed and message.get("code") != WebSocketCloseCode.NORMAL
            self._closed = True
            raise ClientDisconnected
        self._count_arrival()
        data = message.get("bytes")
        return data if data is not None else message["text"]

    def fail(self, error: EndpointError, patience_s: float) -> None:
        """Make `receive` raise an error, which ends the connection.

        Args:
            error: Error to raise, with a close code.
            patience_s: Time in seconds within which requests in flight may fail on their own. If no
                request is in flight, the error is raised immediately.
        """
        self._failure, self._fail_by_s = error, time.monotonic() + patience_s
        if self._idle_limit is not None:
            with contextlib.suppress(RuntimeError):  # no task is waiting for a message
                self._idle_limit.reschedule(asyncio.get_running_loop().time())

    def _count_arrival(self) -> None:
        now = time.monotonic()
        if len(self._arrivals) == self._arrivals.maxlen and now - self._arrivals[0] < 1.0:
            raise EndpointError(
                "rate_limited",
                f"more than {self._limits.max_messages_per_s} messages in a second",
                close=WebSocketCloseCode.POLICY,
            )
        self._arrivals.append(now)

    def count_values(self, num_values: int) -> None:
        """Count a message's values towards the rate limit, because their number determines the
        decoding cost.

        Raises:
            EndpointError: The rate limit is exceeded. The error has a close code.
        """
        if not self._values.take_tokens(num_values):
            raise EndpointError(
                "rate_limited",
                f"more than {self._limits.max_values_per_s} values in messages a second; send "
                "values as arrays",
                close=WebSocketCloseCode.POLICY,
            )

    def undecodable(self, error: CodecError) -> EndpointError:
        """Return the error to send after a message that cannot be decoded.

        If the client has sent too many undecodable messages, or if this message contains too many
        values, the error has a close code.
        """
        close = WebSocketCloseCode.POLICY if isinstance(error, TooManyValues) else None
        return self.strike(EndpointError("invalid_msgpack", str(error), close=close))

    def strike(self, error: EndpointError) -> EndpointError:
        """Count an invalid message. If there are too many within 10 s, add a close code to the
        error.
        """
        now = time.monotonic()
        self._strikes.append(now)
        if (
            len(self._strikes) == self._strikes.maxlen
            and now - self._strikes[0] < _STRIKE_WINDOW_S
            and error.close is None
        ):
            error.close = WebSocketCloseCode.POLICY
        return error

    async def send(self, *messages: Message) -> None:
        """Send messages without interleaving them with messages that other tasks send.

        If the call is cancelled, either all or none of the messages are sent. If the peer reads too
        slowly, the connection is closed with 4008.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        try:
            if self._writer is not None and self._writer.has_room and not self._send_lock.locked():
                if self._closed:
                    raise ClientDisconnected
                self._writer.write(messages)
                if len(messages) == 1 or self._writer.has_room:
                    return  # the usual case: no lock and no timer
                messages = ()  # written, but not yet accepted by the kernel
            async with self._send_lock:
                if self._closed:
                    raise ClientDisconnected
                async with asyncio.timeout(self._limits.send_deadline_s) as limit:
                    await self._send_all(messages, limit)
        except TimeoutError:
            self._give_up()
            raise ClientDisconnected from None
        except (WebSocketDisconnect, RuntimeError, OSError):
            self._closed = True
            raise ClientDisconnected from None

    async def _send_all(self, messages: tuple[Message, ...], limit: asyncio.Timeout) -> None:
        if self._writer is not None:
            await self._writer.send(messages)
            return
        for number, message in enumerate(messages):
            try:
                if isinstance(message, str):
                    await self._websocket.send_text(message)
                else:
                    await self._websocket.send_bytes(message)  # type: ignore[arg-type]  # any buffer is sent as it is
            except asyncio.CancelledError:
                # The peer has received part of a message, so the next bytes must be the rest of
                # that message.
                if number and not limit.expired():
                    await self._send_rest(messages[number:], limit)
                raise

    async def _send_rest(self, messages: tuple[Message, ...], limit: asyncio.Timeout) -> None:
        """Send the remaining messages even if this task is cancelled. The send deadline still
        applies.
        """
        sending = asyncio.ensure_future(self._send_all(messages, limit))
        while not sending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([sending])
            if limit.expired() and not sending.done():
                sending.cancel()
                # The caller has been cancelled, so its `asyncio.timeout` does not raise
                # TimeoutError.
                self._give_up()
        if not sending.cancelled():
            sending.exception()  # the connection's next send raises `ClientDisconnected`

    def _give_up(self) -> None:
        logger.info(
            "a client did not read for %g s; closing its connection", self._limits.send_deadline_s
        )
        self._closed = True
        self.cut()

    async def close(self, code: WebSocketCloseCode, reason: str) -> None:
        """Close the connection with a code and a reason. Closing takes no longer than the send
        deadline. Idempotent.
        """
        if self._closed or self._websocket.application_state is not WebSocketState.CONNECTED:
            return
        self._closed = True
        text = reason.encode()[:_REASON_BYTES].decode(errors="ignore")
        try:
            async with asyncio.timeout(self._limits.send_deadline_s), self._send_lock:
                await self._websocket.close(int(code), text)
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            self.cut()

    def cut_soon(self) -> None:
        """Abort the TCP connection after a short delay, which allows a slow peer to receive the
        last messages.
        """
        if (transport := self._transport()) is not None:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, transport.abort)

    def cut(self) -> None:
        """Abort the TCP connection, and discard all unsent data."""
        transport = self._transport()
        if transport is not None:
            transport.abort()

    def _transport(self) -> asyncio.Transport | None:
        return transport_of(self._websocket)


def transport_of(connection: HTTPConnection) -> asyncio.Transport | None:
    """Return uvicorn's transport for a connection.

    Return None if the server is not uvicorn or the connection uses a Unix socket.
    """
    server = getattr(connection.app.state, "server", None)
    if server is None or connection.client is None:
        return None
    peer = tuple(connection.client)
    for protocol in server.server_state.connections:
        if protocol.client == peer:
            transport: asyncio.Transport = protocol.transport
            return transport
    return None


def principal_of(connection: HTTPConnection) -> str:
    """Return a digest of a request's bearer token. vLLM's middleware has already verified the
    token.
    """
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        return ANONYMOUS
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def client_of(connection: HTTPConnection) -> str:
    """Return the identity that limits apply to: the digest of the API key, or the client's address
    if there is no key.
    """
    address = connection.client.host if connection.client is not None else "local"
    principal = principal_of(connection)
    return principal if principal != ANONYMOUS else f"address {address}"


def origin_allowed(headers: Headers, allowed: Collection[str]) -> bool:
    """Return whether the page that sent a request may use this server, based on the `Origin` and
    `Host` headers.

    Non-browser clients send no `Origin` and are always allowed, because the check protects browser
    users.

    Args:
        headers: Headers of an HTTP request or a WebSocket handshake.
        allowed: Origins, as returned by `normalize_origin`, that are allowed in addition to the
            server's own. "*" allows every origin.
    """
    if (origin := headers.get("origin")) is None:
        return True
    origin = normalize_origin(origin)
    if "*" in allowed or origin in allowed:
        return True
    scheme, _, name = origin.partition("://")
    return bool(name) and origin == normalize_origin(f"{scheme}://{headers.get('host', '')}")


def normalize_origin(origin: str) -> str:
    """Return `scheme://host[:port]` in lower case, without a default port or trailing slash.

    For example, `https://Worlds.example:443/` becomes `https://worlds.example`. "null" and "*" are
    returned unchanged.
    """
    scheme, separator, name = origin.rstrip("/").lower().partition("://")
    name = name.removesuffix(_DEFAULT_PORTS.get(scheme, "")).removesuffix(":")
    return f"{scheme}{separator}{name}"
