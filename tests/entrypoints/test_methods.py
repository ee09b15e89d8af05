# SPDX-License-Identifier: Apache-2.0
"""A request that uses an HTTP method not supported by the route gets 405 with an `Allow` header."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.routing import Route

from vllm_omni.entrypoints.engine.readiness import ReadyRoute
from vllm_omni.entrypoints.environments.routes import EnvironmentRoutes
from vllm_omni.entrypoints.fleet.routes import FleetRoutes
from vllm_omni.entrypoints.openai.routes import OpenAIRoutes
from vllm_omni.entrypoints.realtime.spectators.routes import SpectatorRoutes
from vllm_omni.entrypoints.realtime.webrtc.routes import WebRtcRoutes
from vllm_omni.entrypoints.session_routes import SessionRoutes

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")


def app() -> FastAPI:
    server = FastAPI()
    OpenAIRoutes().add_routes(server)
    ReadyRoute().add_routes(server)
    SessionRoutes().add_routes(server)
    EnvironmentRoutes().add_routes(server)
    FleetRoutes().add_routes(server)
    SpectatorRoutes().add_routes(server)
    WebRtcRoutes().add_routes(server)
    return server


def own_methods() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for route in app().routes:
        if isinstance(route, Route):
            found.setdefault(route.path, set()).update(route.methods or ())
    return {
        path: methods
        for path, methods in found.items()
        if path.startswith(("/v1/", "/omni", "/health"))
    }


@pytest.mark.parametrize("path", sorted(own_methods()))
def test_a_method_that_a_route_lacks_is_refused(path: str) -> None:
    own = own_methods()[path]
    parts = ["x" if part.startswith("{") else part for part in path.split("/")]
    with TestClient(app(), raise_server_exceptions=False) as client:
        for method in METHODS:
            if method not in own:
                response = client.request(method, "/".join(parts))
                assert response.status_code == 405, method
                assert set(response.headers["allow"].split(", ")) <= own


def test_the_routes_are_there() -> None:
    found = set(own_methods())
    assert {"/v1/videos", "/v1/images/generations", "/v1/sessions"} <= found
    assert "/v1/environments/{group_id}/step" in found
