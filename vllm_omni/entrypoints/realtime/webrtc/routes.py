# SPDX-License-Identifier: Apache-2.0
"""`/v1/realtime/webrtc`: WHEP's HTTP exchange, which sets up and ends WebRTC connections.

        POST   /v1/realtime/webrtc         send the SDP offer; 201 with the answer and a Location
        DELETE /v1/realtime/webrtc/{id}    end the connection

A client that has a data channel sends `session.start` through the channel. For a client that has no
data channel, for example a WHEP player, the session's settings come from the query parameters
`prompt`, `seed`, `width` and `height`.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Request
from starlette.responses import Response

from vllm_omni.entrypoints.engine.environment import read_struct
from vllm_omni.entrypoints.errors import ApiError, EndpointError, not_found, respond_to_errors
from vllm_omni.entrypoints.openai.protocol import ErrorReply
from vllm_omni.entrypoints.realtime.connection.connection import principal_of
from vllm_omni.entrypoints.realtime.sessions.session import new_session_id
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.realtime.webrtc.handler import WebRtcClient
from vllm_omni.entrypoints.realtime.webrtc.offer import (
    CONTENT_TYPE,
    MAX_OFFER_BYTES,
    read_offer,
)
from vllm_omni.entrypoints.realtime.webrtc.options import WebRtcOptions

if TYPE_CHECKING:
    from vllm_omni.entrypoints.realtime.webrtc.peer import Peer
    from vllm_omni.entrypoints.server_context import ServerContext

logger = logging.getLogger("vllm." + __name__)

PATH: Final = "/v1/realtime/webrtc"
_QUERY_NUMBERS: Final = ("seed", "width", "height")


class WebRtcRoutes:
    """The WebRTC endpoint of one API server process. If the model has no sessions, every route
    returns 404.
    """

    def __init__(self) -> None:
        self._manager: SessionManager | None = None
        self._options = WebRtcOptions()
        self._peers: dict[tuple[str, str], Peer] = {}

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        self._options = read_struct(WebRtcOptions)
        # Parse the servers now so that invalid settings fail at startup rather than when a client
        # connects.
        self._options.servers()
        errors: dict[int | str, dict[str, Any]] = {
            "4XX": {"model": ErrorReply, "description": "The offer was refused."},
            "5XX": {"model": ErrorReply, "description": "The server failed."},
        }
        answer = {"content": {CONTENT_TYPE: {}}, "description": "The SDP answer."}
        body = {"requestBody": {"required": True, "content": {CONTENT_TYPE: {}}}}
        settings: dict[str, Any] = {"response_class": Response, "response_model": None}
        app.add_api_route(
            PATH,
            self._offer,
            methods=["POST"],
            status_code=201,
            responses={**errors, 201: answer},
            openapi_extra=body,
            tags=["omni"],
            **settings,
        )
        app.add_api_route(
            f"{PATH}/{{connection_id}}",
            self._delete,
            methods=["DELETE"],
            status_code=204,
            responses=errors,
            tags=["omni"],
            **settings,
        )
        return ()

    async def start_serving(self, server: "ServerContext") -> None:
        if server.is_world:
            self.serve(server.sessions)

    def serve(self, manager: SessionManager) -> None:
        """Start serving WebRTC clients, whose sessions belong to the given manager."""
        self._manager = manager

    @respond_to_errors
    async def _offer(self, request: Request) -> Response:
        """Answer a WebRTC client's SDP offer."""
        manager = self._manager
        if manager is None:
            raise not_found("the served model has no sessions")
        if (refusal := manager.guard.refusal(request)) is not None:
            return refusal
        manager.drain.check()
        create = _peer_class()
        offer = read_offer(await _body(request))
        start = None if offer.has_channel else self._start_message(manager, request)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(manager.guard.occupy())
            peer = create(request, self._options.servers(), start)
            stack.push_async_callback(peer.close)
            answer = await peer.answer(offer)
            client = WebRtcClient(manager, peer.websocket, peer.track)
            peer.on_key_frame = client.request_key_frame
            peer.on_bandwidth = client.set_bandwidth
            key = (principal_of(request), new_session_id(manager.server_name))
            self._peers[key] = peer
            stack.callback(self._peers.pop, key, None)
            manager.spawn(self._serve(peer, client, stack.pop_all()))
        headers = {"Location": f"{PATH}/{key[1]}", "Cache-Control": "no-store"}
        return Response(answer, 201, headers, CONTENT_TYPE)

    async def _serve(
        self, peer: "Peer", client: WebRtcClient, stack: contextlib.AsyncExitStack
    ) -> None:
        """Serve one client until either side ends the connection.

        Args:
            peer: The client's WebRTC connection.
            client: Handler for the client.
            stack: Exit stack that closes the connection.
        """
        async with stack:
            connecting = asyncio.create_task(
                peer.close_unless_connected(self._options.webrtc_connect_timeout_s)
            )
            try:
                await client.serve_connection()
                await peer.wait_until_closed()
            finally:
                connecting.cancel()

    @respond_to_errors
    async def _delete(self, request: Request, connection_id: str) -> Response:
        """End a WebRTC connection."""
        peer = self._peers.pop((principal_of(request), connection_id), None)
        if peer is None:
            raise not_found("there is no such connection")
        await peer.close()
        return Response(status_code=204)

    def _start_message(self, manager: SessionManager, request: Request) -> str:
        """Build a `session.start` message from the query parameters, for a client without a data
        channel.

        Raises:
            EndpointError: A number is invalid, or the model requires a start image.
        """
        manager.info.check_image(False, "image_reference")
        query = request.query_params
        start: dict[str, Any] = {"type": "session.start", "prompt": query.get("prompt", "")}
        for name in _QUERY_NUMBERS:
            if (text := query.get(name)) is not None:
                try:
                    start[name] = int(text[:20])
                except ValueError:
                    message = f"{name} must be a whole number"
                    raise EndpointError("invalid_request", message, param=name) from None
        return json.dumps(start)


async def _body(request: Request) -> bytes:
    """Read an offer's body, up to the maximum offer size.

    Raises:
        ApiError: The request has the wrong content type, or the offer is too large.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != CONTENT_TYPE:
        message = f"the body must be an SDP offer ({CONTENT_TYPE})"
        raise ApiError(415, message, code="invalid_offer")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_OFFER_BYTES:
            message = f"the offer has more than {MAX_OFFER_BYTES} bytes"
            raise ApiError(413, message, code="invalid_offer")
    return bytes(body)


def _peer_class() -> "type[Peer]":
    try:
        from vllm_omni.entrypoints.realtime.webrtc.peer import Peer
    except ImportError:
        raise ApiError(
            501,
            'WebRTC needs a package which is missing: pip install ".[webrtc]" in the checkout',
            code="webrtc_unavailable",
        ) from None
    return Peer
