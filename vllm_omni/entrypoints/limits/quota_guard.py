# SPDX-License-Identifier: Apache-2.0
"""`QuotaGuard`: enforces quotas on HTTP requests. A request that exceeds a quota is refused with
status 429. The bytes of each response are charged to the client.

`../realtime/sessions/session.py` charges sessions, including those of environments. Requests to
`/`, open paths (`OPEN_PATHS`), `/omni` and `/v1/environments` paths, ticket requests, and requests
with methods other than `GET`, `POST` and `PUT` are never charged or refused, and their response
bytes are not charged. The guard runs after the API key has been checked.
"""

from typing import Final

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.environments.protocol import PATH as ENVIRONMENTS_PATH
from vllm_omni.entrypoints.errors import EndpointError, from_failure
from vllm_omni.entrypoints.limits.access import (
    OPEN_PATHS,
    SESSIONS_PATH,
    TICKET_PATH,
    route_path,
)
from vllm_omni.entrypoints.limits.quotas import Quotas
from vllm_omni.entrypoints.realtime.connection.connection import client_of

_FREE: Final = OPEN_PATHS | {"/", TICKET_PATH}
_CHARGED: Final = frozenset({"GET", "POST", "PUT"})


class QuotaGuard:
    """ASGI middleware that charges HTTP requests to their clients' quotas.

    `quotas` is set after the server has read its options and before it accepts requests.
    """

    quotas: Quotas = Quotas()
    """The clients' quotas. Default: no client has a quota."""

    def around(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application with this guard. This method is the factory that Starlette's
        `add_middleware` expects.
        """

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(app, scope, receive, send)

        return guarded

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] not in _CHARGED
            or not _costs(route_path(scope))
        ):
            await app(scope, receive, send)
            return
        allowance = self.quotas.allowance_of(client_of(HTTPConnection(scope)))
        try:
            if scope["method"] == "POST" and not route_path(scope).startswith(SESSIONS_PATH):
                allowance.check_chunk()
                allowance.charge_chunks(1)
            else:
                allowance.check_bytes()
        except EndpointError as refusal:
            await from_failure(refusal).response()(scope, receive, send)
            return

        async def charged(message: Message) -> None:
            if message["type"] == "http.response.body":
                allowance.charge_bytes(len(message.get("body", b"")))
            await send(message)

        await app(scope, receive, charged)


def _costs(path: str) -> bool:
    return path not in _FREE and not path.startswith(("/omni", ENVIRONMENTS_PATH))
