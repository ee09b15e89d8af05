# SPDX-License-Identifier: Apache-2.0
"""An HTTP/2 client over TLS that sends requests and opens WebSockets (RFC 8441)."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes
from helpers.waits import seconds


class Http2Client:
    """One HTTP/2 connection. `reset` holds the ids of the streams that the server has reset."""

    def __init__(self, raw: ssl.SSLSocket) -> None:
        self._raw = raw
        self._connection = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._connection.initiate_connection()
        self._flush()
        self.statuses: dict[int, int] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.reset: set[int] = set()
        self._has_settings = False
        while not self._has_settings:
            self.receive()

    @property
    def serves_websockets(self) -> bool:
        settings = self._connection.remote_settings
        return settings[SettingCodes.ENABLE_CONNECT_PROTOCOL] == 1

    def send(self, method: str, path: str, *headers: tuple[str, str], ends: bool = True) -> int:
        """Start a request and return its stream id."""
        stream = self._connection.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", "https"), (":path", path), (":authority", "x")]
        self._connection.send_headers(stream, [*pseudo, *headers], end_stream=ends)
        self._flush()
        return stream

    def open_websocket(self, path: str) -> int:
        stream = self.send(
            "CONNECT",
            path,
            (":protocol", "websocket"),
            ("sec-websocket-version", "13"),
            ends=False,
        )
        while stream not in self.statuses:
            self.receive()
        return stream

    def write(self, stream: int, data: bytes) -> None:
        self._connection.send_data(stream, data)
        self._flush()

    def read_until(self, stream: int, end: bytes) -> bytes:
        while end not in self.bodies[stream]:
            self.receive()
        return self.bodies[stream]

    def read_response(self, stream: int) -> tuple[int, bytes]:
        while stream not in self.ended:
            self.receive()
        return self.statuses[stream], self.bodies[stream]

    def receive(self) -> None:
        data = self._raw.recv(1 << 16)
        assert data, "the server has closed the connection"
        for event in self._connection.receive_data(data):
            self._take(event)
        self._flush()

    def _take(self, event: Event) -> None:
        match event:
            case RemoteSettingsChanged():
                self._has_settings = True
            case ResponseReceived():
                headers = dict(event.headers)
                self.headers[event.stream_id] = headers  # type: ignore[assignment]
                self.statuses[event.stream_id] = int(headers[":status"])  # type: ignore[index]
                self.bodies[event.stream_id] = b""
            case DataReceived():
                self.bodies[event.stream_id] += event.data
                self._connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
            case StreamEnded():
                self.ended.add(event.stream_id)
            case StreamReset():
                self.reset.add(event.stream_id)

    def _flush(self) -> None:
        self._raw.sendall(self._connection.data_to_send())


@contextmanager
def http2_client(port: int, context: ssl.SSLContext) -> Iterator[Http2Client]:
    """Connect to a server on this machine, and check that the server chooses HTTP/2."""
    with (
        socket.create_connection(("127.0.0.1", port), seconds(10)) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as wrapped,
    ):
        assert wrapped.selected_alpn_protocol() == "h2"
        yield Http2Client(wrapped)
