# SPDX-License-Identifier: Apache-2.0
"""A server with the realtime endpoints, the web page and a fake engine. If API keys are given, the
server uses stock vLLM's key check.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from helpers.fake_engine import EndpointServer, FakeEngine
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_omni.entrypoints.limits.access import BrowserAccess
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.webui import pages

MakeServer = Callable[..., "PageServer"]


class PageServer(EndpointServer):
    """A server with the web page, set up as vLLM and the plugin set it up.

    `keys` lists the API keys. If it is empty, requests need no key. `world` is a checkpoint with a
    world description.
    """

    def __init__(
        self,
        engine: FakeEngine,
        limits: EndpointLimits,
        info: StreamInfo,
        keys: list[str],
        environ: dict[str, str],
        world: Path | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        super().__init__(engine, limits, info, origins)
        app = self.server.config.app
        assert isinstance(app, FastAPI)
        for path in ("/work", "/v1/models", "/health"):
            app.add_api_route(path, _work, methods=["GET", "POST"])
        BrowserAccess(keys, environ).attach_to_app(app, open_paths=pages.add_pages(app, world))
        if keys:
            app.add_middleware(AuthenticationMiddleware, tokens=keys)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/omni/"

    def cut_connections(self) -> int:
        """Abort all open WebSockets, as a network failure does, and return their number."""
        sockets = self._open_sockets()
        for item in sockets:
            item.loop.call_soon_threadsafe(item.transport.abort)
        return len(sockets)

    def time_out_pings(self) -> int:
        """Close all open WebSockets as uvicorn does after an unanswered ping, and return their
        number.
        """
        sockets = self._open_sockets()
        for item in sockets:
            item.loop.call_soon_threadsafe(item.keepalive_timeout)
        return len(sockets)

    def _open_sockets(self) -> list[Any]:
        connections: list[Any] = list(self.server.server_state.connections)
        return [item for item in connections if item.transport and not _is_http(item)]


def _work() -> dict[str, bool]:
    return {"done": True}


def _is_http(connection: object) -> bool:
    return "http" in type(connection).__module__
